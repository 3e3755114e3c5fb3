"""How to change a command whose answer differs from the full cache's."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from snapkv.errors import PromptTooLongError
from snapkv_app.answering import Answer, prompt_ids
from snapkv_app.cli.methods import accepted
from snapkv_app.cli.options import OWN_FLAGS, RunOptions
from snapkv_app.models import LoadedModel
from snapkv_app.prompts import question_prompt
from snapkv_app.settings import GenerationSettings

Change = Mapping[str, Any]
"""New values of options by name; None removes an option."""

FULL: Change = {"policy": "full", **dict.fromkeys((*OWN_FLAGS, "set_"))}
"""Use the full cache, which has no parameters."""

MORE_BITS: Change = {"exact_bits": True}


def has_few_bits(report: Mapping[str, Any]) -> bool:
    """Whether a cache is quantized."""
    return any(not bits.isdecimal() or int(bits) < 16 for bits in report.get("bits", ()))


def next_change(exactly: Change, options: RunOptions, answer: Answer) -> Change | None:
    """The most likely remedy for an answer that differs from the full cache's, shown beside it.

    That is an exact prefill, more bits, or a larger budget; None if only the full cache has more.

    `exactly` is the change that makes the prefill exact; empty if it is. Recall is not among them,
    since it brings tokens back only for later questions.
    """
    if exactly:
        return exactly
    if has_few_bits(answer.cache):  # a budget of tokens is not quantized
        return MORE_BITS
    change = larger_budget(options, answer)
    return None if change == FULL else change  # the full cache's answer stands beside it


def larger_budget(options: RunOptions, answer: Answer) -> Change | None:
    """Twice the kept tokens, or the full cache if that is as much; None without a budget."""
    if "budget" not in accepted(options.policy):
        return None
    tokens = 2 * max(1, round(answer.kept_tokens))
    return {"budget": tokens, "keep_ratio": None} if tokens < answer.prompt_tokens else FULL


def changed_command(typed: Sequence[str], change: Change) -> str:
    """The command line with that change, quoted for a shell."""
    end = typed.index("--") if "--" in typed else len(typed)
    new = [
        word
        for name, value in change.items()
        if value is not None
        for word in ([_flag(name)] if value is True else [_flag(name), str(value)])
    ]
    return shlex.join(["snapkv", *_without(typed[:end], change), *new, *typed[end:]])


def asked(files: Sequence[str], question: str, model: str | None) -> list[str]:
    """The command line that asks files a question; empty without files."""
    named = [] if model is None else ["--model", model]
    return ["ask", *files, "-q", question, *named] if files else []


@contextmanager
def explained_length(
    loaded: LoadedModel, question: str, settings: GenerationSettings, typed: Sequence[str]
) -> Iterator[None]:
    """Say in the error of a prompt that is too long which command reads passages instead.

    Args:
        loaded: the model, which may have no room for a passage.
        question: what is asked.
        settings: of the answer.
        typed: the command line without `--passages`; empty if that does not help.
    """
    try:
        yield
    except PromptTooLongError as error:
        if not (typed and _leaves_room(loaded, question, settings)):
            raise
        command = changed_command(typed, {"passages": True})
        raise PromptTooLongError(
            f"{error}; to read the passages that fit the question best: {command}"
        ) from error


def _leaves_room(loaded: LoadedModel, question: str, settings: GenerationSettings) -> bool:
    """Whether the model has positions for more than a question and its answer."""
    with suppress(PromptTooLongError):
        prompt_ids(loaded, question_prompt(loaded.tokenizer, "", question), settings)
        return True
    return False


def _without(words: Sequence[str], change: Change) -> Iterator[str]:
    """The words without the options that change and their values."""
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
    """Whether ``NAME=VALUE``, or ``part.NAME=VALUE``, is about an option that changes."""
    name = assignment.partition("=")[0].strip().rpartition(".")[2]
    return name.replace("-", "_") in change


def _flag(name: str) -> str:
    return "--" + name.strip("_").replace("_", "-")
