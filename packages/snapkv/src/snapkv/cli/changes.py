"""What to change about a command whose answer is not the full cache's, and what to type then."""

import dataclasses
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


def changes_by_price(options: RunOptions, answer: Answer) -> Iterator[Change]:
    """Changes to try, those that hold fewer bytes first: more bits, twice the budget, four times...

    All that is tried reads the prompt exactly. Recall is none of the changes: what it brings back,
    it brings back for a later question.
    """
    exactly: Change = {} if options.reading.holds_all else {"prefill": None}
    if exactly:
        yield exactly
    if has_few_bits(answer.cache):  # which a budget of tokens has not
        yield {**exactly, **MORE_BITS}
    yield from ({**exactly, **larger} for larger in _larger_budgets(options, answer))


def larger_budget(options: RunOptions, answer: Answer) -> Change | None:
    """Twice the budget, or everything where that is as much; None for a method without a budget."""
    if "budget" not in accepted(options.policy, {}):
        return None
    return next(_larger_budgets(options, answer), FULL)


def _larger_budgets(options: RunOptions, answer: Answer) -> Iterator[Change]:
    """Twice what was kept of the prompt, four times, ... as long as it is less than the prompt."""
    if "budget" in accepted(options.policy, {}):
        tokens = max(1, round(answer.kept_tokens))
        while (tokens := 2 * tokens) < answer.prompt_tokens:
            yield {"budget": tokens, "keep_ratio": None}


def changed_options(options: RunOptions, change: Change) -> RunOptions:
    """The options with that change; what ``--set`` says of the same parameters is gone, too."""
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    values: dict[str, Any] = {
        "set_": [each for each in options.set_ or [] if not _assigns(each, change)] or None
    }
    values |= {name: defaults[name] if new is None else new for name, new in change.items()}
    return dataclasses.replace(options, **values)


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
