"""Suggest how to change a command whose answer differs from the answer of the full cache."""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from snapkv.errors import PromptTooLongError
from snapkv_app.answering import Answer, prompt_ids
from snapkv_app.cli.amounts import ReadingLimit
from snapkv_app.cli.methods import accepted
from snapkv_app.cli.options import OWN_FLAGS, RunOptions
from snapkv_app.models import LoadedModel
from snapkv_app.prompts import question_prompt
from snapkv_app.reading import reading_speed
from snapkv_app.settings import GenerationSettings

Change = Mapping[str, Any]
"""The new values of options by name; None removes an option from the command."""

FULL: Change = {"policy": "full", **dict.fromkeys((*OWN_FLAGS, "set_"))}
"""Use the full cache, and remove the parameters of the method, since it has none."""

MORE_BITS: Change = {"exact_bits": True}


def has_few_bits(report: Mapping[str, Any]) -> bool:
    """Return whether the report describes a quantized cache."""
    return any(not bits.isdecimal() or int(bits) < 16 for bits in report.get("bits", ()))


def next_change(exactly: Change, options: RunOptions, answer: Answer) -> Change | None:
    """Choose the change that most likely gives the answer of the full cache.

    An exact prefill comes first, then unquantized storage, then a larger budget. Recall is not
    suggested, since it restores tokens only for later questions.

    Args:
        exactly: the change that makes the prefill exact; empty if the prefill is exact.
        options: the options of the command.
        answer: the answer that differs.

    Returns:
        The change, or None if only the full cache is left, whose answer is already shown.
    """
    if exactly:
        return exactly
    if has_few_bits(answer.cache):  # a budget of tokens is not quantized
        return MORE_BITS
    change = larger_budget(options, answer)
    return None if change == FULL else change


def larger_budget(options: RunOptions, answer: Answer) -> Change | None:
    """Return the change to a budget of twice the tokens that the answer kept.

    Returns:
        The change; `FULL` if that budget would keep the whole prompt, and None if the method has
        no budget.
    """
    if "budget" not in accepted(options.policy):
        return None
    tokens = 2 * max(1, round(answer.kept_tokens))
    return {"budget": tokens, "keep_ratio": None} if tokens < answer.prompt_tokens else FULL


def changed_command(typed: Sequence[str], change: Change) -> str:
    """Return the command line after the change, quoted for a shell, with ``snapkv`` before it.

    Args:
        typed: the arguments as they were typed, without the name of the program. Options with the
            changed names are removed, also in ``--set``.
        change: the new options, which are added at the end or before ``--``.
    """
    end = typed.index("--") if "--" in typed else len(typed)
    new = [
        word
        for name, value in change.items()
        if value is not None
        for word in ([_flag(name)] if value is True else [_flag(name), str(value)])
    ]
    return shlex.join(["snapkv", *_without(typed[:end], change), *new, *typed[end:]])


def ask_command(files: Sequence[str], question: str, model: str | None) -> list[str]:
    """Return the arguments of an `ask` command about the files, or an empty list without files."""
    named = [] if model is None else ["--model", model]
    return ["ask", *files, "-q", question, *named] if files else []


@contextmanager
def explained_length(
    loaded: LoadedModel, question: str, settings: GenerationSettings, typed: Sequence[str]
) -> Iterator[None]:
    """If a prompt is too long, add a command that reads only matching passages to the error.

    Args:
        loaded: the model. After the error it reads a few tokens, to measure how fast it is.
        question: the question that the passages must match.
        settings: how the answer is generated.
        typed: the command line without `--passages`; empty if that option does not help.

    Raises:
        PromptTooLongError: the prompt in the block is too long. The command is added if the model
            has enough positions for passages, the question and the answer.
    """
    try:
        yield
    except PromptTooLongError as error:
        most_tokens = _tokens_for_passages(loaded, question, settings) if typed else 0
        if most_tokens <= 0:
            raise
        tokens_per_second = reading_speed(loaded.model)
        half_time = ReadingLimit.DEFAULT_SECONDS / 2  # the answer takes time, too
        tokens = min(most_tokens, max(FEWEST_TOKENS, int(half_time * tokens_per_second)))
        seconds = tokens / tokens_per_second
        most_seconds = max(ReadingLimit.DEFAULT_SECONDS, math.ceil(2 * seconds))
        command = changed_command(typed, {"passages": ReadingLimit(tokens, most_seconds)})
        raise PromptTooLongError(
            f"{str(error).rstrip('.')}. To read the passages that match the question best, "
            f"{tokens:,} tokens in about {seconds:.0f} seconds, run: {command}"
        ) from error


FEWEST_TOKENS = 512
"""The smallest number of tokens to suggest, about two passages, however slow the model is."""


def _tokens_for_passages(loaded: LoadedModel, question: str, settings: GenerationSettings) -> int:
    """Return how many tokens a prompt may have, or 0 if the question alone is too long.

    The model must have a limit of positions, as it has after a prompt was too long for it.
    """
    with suppress(PromptTooLongError):
        prompt_ids(loaded, question_prompt(loaded.tokenizer, "", question), settings)
        return (loaded.max_tokens or 0) - settings.max_new_tokens
    return 0


def _without(words: Sequence[str], change: Change) -> Iterator[str]:
    """Yield the words of a command line without the changed options and their values.

    Each ``--set`` that assigns one of them is left out as well. No changed option may be among the
    words as a flag without a value, because the word after it is taken for its value.
    """
    flags = {_flag(name) for name in change}
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag not in flags | {"--set"}:
            yield word
            continue
        value = value if equals else next(rest, "")
        if flag not in flags and not _assigns(value, change):
            yield from (flag, value)


def _assigns(assignment: str, change: Change) -> bool:
    """Return whether ``NAME=VALUE`` or ``part.NAME=VALUE`` sets an option that is changed."""
    name = assignment.partition("=")[0].strip().rpartition(".")[2]
    return name.replace("-", "_") in change


def _flag(name: str) -> str:
    return "--" + name.strip("_").replace("_", "-")
