"""Notes after an answer: equal to the full cache's or not, and what to try next."""

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
"""Exit status of `--check` where the answer is not the full cache's."""

SAME = "the compressed cache gives the full cache's answer"
DIFFERENT = "the compressed cache gives another answer than the full cache"
"""What `--compare` compared. Neither says whether an answer is right."""

LITTLE_VOTE = 0.00125
"""Little is lost if every dropped position had less than this share of the window's attention, on
average over heads and layers, and all of them together less than `LITTLE_SUM`. Both are for prompts
of 1,024 tokens, and are lower for longer ones, which dilute votes."""

LITTLE_SUM = 0.15
"""Share of all votes, for answers whose votes are spread over many positions."""


def drops_nothing(report: Mapping[str, Any]) -> bool:
    """Whether a cache holds all tokens."""
    return bool(report["kept_tokens"] >= report["seen_tokens"])


def is_little_lost(report: Mapping[str, Any]) -> bool | None:
    """Whether the lost votes are few enough to hardly change answers; None if not measured."""
    if drops_nothing(report):
        return True
    share, peak = report.get("lost_votes"), report.get("lost_vote_peak")
    if share is None or peak is None:
        return None
    diluted = dilution(report.get("chosen_at", report["seen_tokens"]))
    return bool(peak * diluted < LITTLE_VOTE and share * diluted < LITTLE_SUM)


def said_of_votes(report: Mapping[str, Any]) -> str:
    """The table cell for the share of lost votes."""
    if drops_nothing(report):
        return "nothing was dropped"
    share = report.get("lost_votes")
    return "-" if share is None else f"{100 * share:.0f} %"


@dataclass(frozen=True, kw_only=True)
class Note:
    """A note after an answer.

    Attributes:
        key: its name in the JSON object.
        record: its value there.
        lines: the lines to print; may be empty.
        status: exit status of the command.
    """

    key: str
    record: dict[str, Any]
    lines: Sequence[Text] = ()
    status: int = 0


def notes_on(answers: Sequence[Answer], source: Source) -> list[Note]:
    """Return the notes after an answer.

    Args:
        answers: the compressed one and, to compare it, the full cache's.
        source: of the answers.
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
    """The share of lost votes and, if it is large, the command to type next.

    That has a larger budget or, where the votes chose it, compares with the full cache, which
    then says whether a larger one helps. There is none where that is compared anyway.
    """
    ours, *full = answers
    change, gain = larger_budget(options, ours), "for a larger budget"
    if _is_chosen_by_votes(ours.policy):
        change, gain = {"compare": True}, "to check it against the full cache"
    is_much = not full and is_little_lost(ours.cache) is False
    command = None if change is None or not is_much else changed_command(typed, change)
    share, peak = ours.cache.get("lost_votes"), ours.cache.get("lost_vote_peak")
    record = {"share": share, "peak": peak}
    lines = [Text(f"{gain}: {command}")] if command else []
    return Note(key="lost_votes", record=record | {"command": command}, lines=lines)


def _is_chosen_by_votes(policy: Mapping[str, Any]) -> bool:
    """Whether nobody has set the budget of a method, or of the one that it wraps."""
    budget, inner = policy.get("budget"), policy.get("policy")
    if isinstance(inner, Mapping):
        return _is_chosen_by_votes(inner)
    return isinstance(budget, Mapping) and AUTO in budget


def checked_note(answer: Answer, full: Answer, tokens: int) -> Note:
    """Whether the first tokens of an answer are the full cache's."""
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
    """Whether two answers are equal and, if not, the command to try next."""
    found = Comparison.of(ours, full)
    is_told = not (found.same or options.temperature)  # sampled answers differ by chance
    change = next_change(exactly, options, ours) if is_told else None
    command = None if change is None else changed_command(typed, change)
    lines = [Text(SAME, "green") if found.same else Text(DIFFERENT, "bold red")]
    lines += [Text(f"next to try: {command}")] if command else []
    return Note(key="comparison", record={**asdict(found), "command": command}, lines=lines)
