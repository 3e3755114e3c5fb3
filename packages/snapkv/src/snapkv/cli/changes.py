"""What to change about a command whose answer is not the full cache's, and what to type then."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from snapkv.app.answering import Answer
from snapkv.cli.options import OWN_FLAGS, RunOptions
from snapkv.cli.policy import accepted

Change = Mapping[str, Any]
"""New values of options by their names; None takes an option away."""

FULL: Change = {"policy": "full", **dict.fromkeys((*OWN_FLAGS, "set_"))}
"""The full cache itself, which has none of the parameters of a method."""

MORE_BITS: Change = {"exact_bits": True}


def has_few_bits(report: Mapping[str, Any]) -> bool:
    """Whether a cache holds other numbers than the model's own."""
    return any(not bits.isdecimal() or int(bits) < 16 for bits in report.get("bits", ()))


def next_change(exactly: Change, options: RunOptions, answer: Answer) -> Change | None:
    """What an answer lacks most likely: a reading by all layers, more bits, or a larger budget.

    `exactly` is the change that makes the reading exact, empty where it is. Recall is none: what it
    brings back, it brings back for a later question.
    """
    if exactly:
        return exactly
    if has_few_bits(answer.cache):  # which a budget of tokens has not
        return MORE_BITS
    return larger_budget(options, answer)


def larger_budget(options: RunOptions, answer: Answer) -> Change | None:
    """Twice what was kept, or everything where that is as much; None for a method that has none."""
    if "budget" not in accepted(options.policy, {}):
        return None
    tokens = 2 * max(1, round(answer.kept_tokens))
    return {"budget": tokens, "keep_ratio": None} if tokens < answer.prompt_tokens else FULL


def changed_command(typed: Sequence[str], change: Change) -> str:
    """The command line, all behind the program's name, with that change, quoted for a shell."""
    end = typed.index("--") if "--" in typed else len(typed)
    new = [
        word
        for name, value in change.items()
        if value is not None
        for word in ([_flag(name)] if value is True else [_flag(name), str(value)])
    ]
    return shlex.join(["snapkv", *_without(typed[:end], change), *new, *typed[end:]])


def _without(words: Sequence[str], change: Change) -> Iterator[str]:
    """The words without the options that change, and their values."""
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
