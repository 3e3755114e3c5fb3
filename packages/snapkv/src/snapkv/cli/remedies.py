"""What to try next where a compressed answer is not the full cache's, with the command to type."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from snapkv.app.answering import Answer
from snapkv.app.remedies import Tried
from snapkv.cli.command_line import Change, changed_options
from snapkv.cli.options import RunOptions
from snapkv.cli.policy import OWN_FLAGS, accepted, build_policy
from snapkv.policies import Policy

FULL: dict[str, Any] = {"policy": "full", **dict.fromkeys((*OWN_FLAGS, "set_"))}
"""The full cache itself, which has none of the parameters of a method."""

EXACTLY: dict[str, Any] = {"prefill": None}
"""Reading the prompt exactly, as all that is tried does."""

FADING: Change = {"pooling": "fading", "kernel_size": None, "decay": None}
WIDE: Change = {"pooling": "max", "kernel_size": "13", "decay": None}

Try = Callable[[Sequence[int], list[Policy]], Tried]
"""Tries policies in order on an answer; see `snapkv.app.remedies.first_that_keeps`."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """The next thing to try.

    Attributes:
        change: of the options; None where none is known.
        keeps: whether it was found to keep the full cache's answer.
        note: why it is no more than that; empty where it keeps the answer.
    """

    change: Change | None
    keeps: bool
    note: str = ""


def remedy_for(options: RunOptions, answer: Answer, full: Answer, tried: Try) -> Remedy:
    """The cheapest change that keeps the full cache's answer, found by trying.

    Args:
        options: those of the answer.
        answer: the compressed one, which differs.
        full: the full cache's.
        tried: tries policies on the prompt.
    """
    changes = list(changes_by_price(options, answer))
    policies = [build_policy(changed_options(options, change)) for change in changes]
    found = tried(full.token_ids, policies)
    if found.untold:
        return Remedy(change=None, keeps=False, note=f"not computed: {found.untold}")
    if found.keeper is None:
        return Remedy(
            change=FULL | EXACTLY, keeps=False, note="nothing smaller that was tried keeps it"
        )
    return Remedy(change=changes[found.keeper], keeps=True)


def changes_by_price(options: RunOptions, answer: Answer) -> Iterator[Change]:
    """Changes to try, those that hold fewer bytes first: other poolings, then twice the budget...

    Recall is none of them: what it brings back, it brings back for a later question.
    """
    exactly = {} if options.reading.holds_all else EXACTLY
    if exactly:
        yield exactly
    yield from ({**exactly, **change} for change in _changes(options, answer))


def _changes(options: RunOptions, answer: Answer) -> Iterator[Change]:
    known = accepted(options.policy, {})
    poolings = list(_other_poolings(answer.policy)) if "pooling" in known else []
    yield from poolings
    for budget in _larger_budgets(answer) if "budget" in known else ():
        larger = {"budget": budget, "keep_ratio": None}
        yield larger
        yield from (larger | dict(pooling) for pooling in poolings if pooling is FADING)


def larger_budget(options: RunOptions, answer: Answer) -> Change | None:
    """Twice the budget, or everything where that is as much; None for a method without a budget."""
    if "budget" not in accepted(options.policy, {}):
        return None
    budget = next(_larger_budgets(answer), None)
    return FULL if budget is None else {"budget": budget, "keep_ratio": None}


def _other_poolings(method: dict[str, Any]) -> Iterator[Change]:
    """Poolings that reach further than that of a method, or elsewhere."""
    kind, width = parameter_of(method, "pooling"), parameter_of(method, "kernel_size")
    if kind != "fading":
        yield FADING
    if not isinstance(width, int) or width < int(WIDE["kernel_size"]):
        yield WIDE


def _larger_budgets(answer: Answer) -> Iterator[int]:
    """Twice what was kept of the prompt, four times, ... as long as it is less than the prompt."""
    budget = parameter_of(answer.policy, "budget")
    if not isinstance(budget, int):
        budget = max(1, round(answer.kept_tokens))
    while (budget := 2 * budget) < answer.prompt_tokens:
        yield budget


def parameter_of(method: dict[str, Any], name: str) -> Any:
    """A parameter of a method, or else of one that it wraps; None where there is none."""
    if method.get(name) is not None:
        return method[name]
    wrapped = (value for value in method.values() if isinstance(value, dict))
    values = (parameter_of(each, name) for each in wrapped)
    return next((value for value in values if value is not None), None)
