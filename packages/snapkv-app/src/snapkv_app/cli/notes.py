"""Notes after an answer: whether it equals the full cache's answer, and what to try next."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text

from snapkv.policies.budget import dilution
from snapkv.validation import AUTO
from snapkv_app.answering import Answer, Comparison
from snapkv_app.cli.changes import (
    Change,
    changed_command,
    larger_budget,
    next_change,
)
from snapkv_app.cli.options import RunOptions
from snapkv_app.cli.sources import Source

DIFFERS = 3
"""The exit status if `--check` finds an answer that differs from the full cache's answer."""

SAME = "the compressed cache gives the full cache's answer"
DIFFERENT = "the compressed cache gives another answer than the full cache"
"""The results of `--compare`. Neither of them says whether an answer is right."""

LITTLE_VOTE = 0.00125
"""The largest share of the window's attention, on average over heads and layers, that a dropped
position may have if little is to be lost. All dropped positions together must have less than
`LITTLE_SUM`. Both numbers are for prompts of 1,024 tokens, and are lower for longer prompts, which
dilute votes."""

LITTLE_SUM = 0.15
"""The same for all dropped positions together, since votes may be spread over many positions."""


def drops_nothing(report: Mapping[str, Any]) -> bool:
    """Return whether the report describes a cache that holds all tokens."""
    return bool(report["kept_tokens"] >= report["seen_tokens"])


def is_little_lost(report: Mapping[str, Any]) -> bool | None:
    """Return whether too few votes are lost to change answers often; None if that is unknown.

    True if nothing was dropped. Otherwise the numbers `lost_votes` and `lost_vote_peak` in the
    report of the cache are compared with `LITTLE_SUM` and `LITTLE_VOTE`; without both of them, the
    result is None.
    """
    if drops_nothing(report):
        return True
    share, peak = report.get("lost_votes"), report.get("lost_vote_peak")
    if share is None or peak is None:
        return None
    diluted = dilution(report.get("chosen_at", report["seen_tokens"]))
    return bool(peak * diluted < LITTLE_VOTE and share * diluted < LITTLE_SUM)


def format_lost_votes(report: Mapping[str, Any]) -> str:
    """Return the table cell for the votes that a compressed cache has lost.

    It is the share in percent, such as "12 %"; "nothing was dropped"; or "-" if the share is
    unknown. `report` is the report of the cache.
    """
    if drops_nothing(report):
        return "nothing was dropped"
    share = report.get("lost_votes")
    return "-" if share is None else f"{100 * share:.0f} %"


@dataclass(frozen=True, kw_only=True)
class Note:
    """A note that is printed after an answer, or put into the JSON object.

    Attributes:
        key: the name of the note in the JSON object.
        record: the value of the note in the JSON object.
        lines: the lines to print; may be empty.
        status: the exit status of the command.
    """

    key: str
    record: dict[str, Any]
    lines: Sequence[Text] = ()
    status: int = 0


def notes_on(answers: Sequence[Answer], source: Source) -> list[Note]:
    """Return the notes after an answer: on lost votes, and for ``--compare`` and ``--check``.

    For ``--check`` without ``--compare``, the answer of the full cache is computed.

    Args:
        answers: the answer of the compressed cache and, with ``--compare``, that of the full cache.
        source: the source of the answers.

    Raises:
        SnapKVError: the answer of the full cache cannot be computed.
    """
    ours, *full = answers
    options, typed = source.options, source.typed
    notes = [votes_note(answers, options, typed)]
    if options.compare:
        notes.append(compared_note(ours, full[0], options, typed, source.exactly))
    if options.check is not None:
        reference = full[0] if full else source.full_answer(options.check)
        notes.append(checked_note(ours, reference, options.check))
    return notes


def votes_note(answers: Sequence[Answer], options: RunOptions, typed: Sequence[str]) -> Note:
    """Return the note on lost votes, with the command to type next if many are lost.

    The command has a larger budget. If the votes have chosen the budget, the command compares with
    the full cache instead, which shows whether a larger budget would help. There is no command if
    the answers are compared already, and none for a method without a budget.

    Args:
        answers: the answer of the compressed cache and, to compare, that of the full cache.
        options: the options of the command.
        typed: the command line, as it was typed.

    Returns:
        A note whose record has "share" and "peak", the fraction of votes that were lost and the
        largest one of a single position; and "command". Each of them may be None.
    """
    ours, *full = answers
    change, gain = larger_budget(options, ours), "for a larger budget"
    if _has_auto_budget(ours.policy):
        change, gain = {"compare": True}, "to check it against the full cache"
    is_much = not full and is_little_lost(ours.cache) is False
    command = None if change is None or not is_much else changed_command(typed, change)
    share, peak = ours.cache.get("lost_votes"), ours.cache.get("lost_vote_peak")
    record = {"share": share, "peak": peak}
    lines = [Text(f"{gain}: {command}")] if command else []
    return Note(key="lost_votes", record=record | {"command": command}, lines=lines)


def _has_auto_budget(policy: Mapping[str, Any]) -> bool:
    """Return whether the votes choose the budget of a method, or of the method that it wraps.

    `policy` has the name and the parameters of the method, as `Policy.describe` returns them.
    """
    budget, inner = policy.get("budget"), policy.get("policy")
    if isinstance(inner, Mapping):
        return _has_auto_budget(inner)
    return isinstance(budget, Mapping) and AUTO in budget


def checked_note(answer: Answer, full: Answer, tokens: int) -> Note:
    """Return the note on whether the first `tokens` tokens of both answers are equal.

    Its record has "tokens" and the fields of `Comparison`. If the tokens differ, its exit status is
    `DIFFERS`.
    """
    found = Comparison.of_first(answer, full, tokens)
    if found.first_difference is None:
        first = "token is" if tokens == 1 else f"{tokens:,} tokens are"
        line = Text(f"check: the first {first} the full cache's", "green")
    else:
        place = found.first_difference + 1
        line = Text(
            f"check: token {place:,} of the first {tokens:,} is not the full cache's", "bold red"
        )
    return Note(
        key="check",
        record={"tokens": tokens, **asdict(found)},
        lines=[line],
        status=0 if found.same else DIFFERS,
    )


def compared_note(
    ours: Answer, full: Answer, options: RunOptions, typed: Sequence[str], exactly: Change
) -> Note:
    """Return the note on whether two answers are equal and, if not, the command to try next.

    There is no command for sampled answers, or if only the full cache is left to try.

    Args:
        ours: the answer of the compressed cache.
        full: the answer of the full cache.
        options: the options of the command.
        typed: the command line, as it was typed.
        exactly: the change of options that makes the prefill exact; empty if it is exact.

    Returns:
        A note whose record has the fields of `Comparison`, and "command", which may be None.
    """
    found = Comparison.of(ours, full)
    has_reason = not (found.same or options.temperature)  # sampled answers differ by chance
    change = next_change(exactly, options, ours) if has_reason else None
    command = None if change is None else changed_command(typed, change)
    lines = [Text(SAME, "green") if found.same else Text(DIFFERENT, "bold red")]
    lines += [Text(f"next to try: {command}")] if command else []
    return Note(key="comparison", record={**asdict(found), "command": command}, lines=lines)
