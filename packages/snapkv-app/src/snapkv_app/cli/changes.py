"""How to change a command whose answer differs from the full cache's."""

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from snapkv.errors import PromptTooLongError
from snapkv.hf.placement import device_of
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
    """Add to the error of a prompt that is too long the command that reads passages instead.

    Args:
        loaded: the model. It reads a few tokens after the error, to learn how fast it is here.
        question: the question that is asked.
        settings: how the answer is generated.
        typed: the command line without `--passages`; empty if that option does not help.

    Raises:
        PromptTooLongError: the error of the block, with the command if the model has positions
            for passages beside the question and the answer.
    """
    try:
        yield
    except PromptTooLongError as error:
        room = _room_for_passages(loaded, question, settings) if typed else 0
        if room <= 0:
            raise
        tokens_per_second = _reading_speed(loaded)
        tokens = min(room, max(_FEWEST_TOKENS, int(_SECONDS * tokens_per_second)))
        command = changed_command(typed, {"passages": tokens})
        raise PromptTooLongError(
            f"{error}; to read the passages that match the question best, {tokens:,} tokens in "
            f"about {tokens / tokens_per_second:.0f} s: {command}"
        ) from error


_SECONDS = 30
"""Time in which the suggested number of tokens is read, so that an answer comes in a minute."""

_FEWEST_TOKENS = 512
"""Fewest tokens to suggest, some two passages, however slow the model is."""

_SPEED_TOKENS = 64
"""Number of tokens that are read to measure the speed."""


def _room_for_passages(loaded: LoadedModel, question: str, settings: GenerationSettings) -> int:
    """Return how many tokens a prompt may have; 0 if question and answer leave no room for text.

    The model has a limit of positions, since a prompt was too long for it.
    """
    with suppress(PromptTooLongError):
        prompt_ids(loaded, question_prompt(loaded.tokenizer, "", question), settings)
        return (loaded.max_tokens or 0) - settings.max_new_tokens
    return 0


def _reading_speed(loaded: LoadedModel) -> float:
    """Measure how many tokens the model reads in a second; the second of two passes counts."""
    ids = torch.zeros(1, _SPEED_TOKENS, dtype=torch.int64, device=device_of(loaded.model))
    with torch.inference_mode():
        for _ in range(2):
            begin = time.perf_counter()
            loaded.model(ids, use_cache=False).logits.sum().item()  # waits for the device
            seconds = time.perf_counter() - begin
    return _SPEED_TOKENS / seconds


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
