"""What a user is told behind an answer: the same or not, and what to type next."""

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from rich.text import Text

from snapkv.app.answering import Answer
from snapkv.app.comparison import Comparison
from snapkv.app.remedies import Tried
from snapkv.cli.options import OWN_FLAGS, RunOptions
from snapkv.cli.policy import accepted
from snapkv.policies.budget import dilution

DIFFERS = 3
"""Exit status of `--check` where the answer is not the full cache's."""

SAFE_BELOW = 0.00125
"""Where less than this share of the window's attention is lost at one place, on average over heads
and layers, and in sum less than `SAFE_SUM_BELOW`, an answer is called safe. Both are shares of a
prompt of 1,024 tokens; a longer one dilutes votes, and more that was not looked at is dropped."""

SAFE_SUM_BELOW = 0.15
"""Of all votes, so that an answer whose votes lie scattered counts, too."""

Change = Mapping[str, Any]
"""New values of options by their names; None takes an option away."""

FULL: dict[str, Any] = {"policy": "full", **dict.fromkeys((*OWN_FLAGS, "set_"))}
"""The full cache itself, which has none of the parameters of a method."""

FADING: Change = {"pooling": "fading", "kernel_size": None, "decay": None}
WIDE: Change = {"pooling": "max", "kernel_size": "13", "decay": None}

MORE_BITS: Change = {"exact_bits": True}

Try = Callable[[Sequence[int], Sequence[RunOptions]], Tried]
"""Tries an answer with each of the options in order; see `snapkv.app.remedies.first_that_keeps`."""


def are_few(peak: float, share: float, tokens: float) -> bool:
    """Whether the highest lost vote and the sum of them, 0 to 1, mean little for an answer.

    They are those of a prompt of so many tokens. What is no number is not few.
    """
    return peak * dilution(tokens) < SAFE_BELOW and share * dilution(tokens) < SAFE_SUM_BELOW


@dataclass(frozen=True, kw_only=True)
class LostVotes:
    """What a report of a cache says about the votes that were lost.

    Attributes:
        share: mean over layers and heads, 0 to 1; None where the method measures none.
        peak: the highest vote that is lost, as a share of the window's attention, mean over layers
            and heads, see `CacheReport`; None where the method measures none.
        few: whether so little is lost that hardly an answer differs; None where nothing is known.
        drops_nothing: whether all tokens are held.
    """

    share: float | None
    peak: float | None
    few: bool | None
    drops_nothing: bool

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> Self:
        """Read a `CacheReport`, which need not know of votes."""
        share, peak = report.get("lost_votes"), report.get("lost_vote_peak")
        tokens = report.get("chosen_at", report["seen_tokens"])
        drops_nothing = report["kept_tokens"] >= report["seen_tokens"]
        known = None if peak is None or share is None else are_few(peak, share, tokens)
        few = True if drops_nothing else known
        return cls(share=share, peak=peak, few=few, drops_nothing=drops_nothing)

    def said(self, *, safe: bool) -> str:
        """In the table below an answer, which is called safe or not."""
        if self.drops_nothing:
            return "nothing was dropped"
        share = "-" if self.share is None else f"{100 * self.share:.0f} %"
        return f"{share} (safe)" if safe else share


def has_few_bits(report: Mapping[str, Any]) -> bool:
    """Whether a cache holds other numbers than the model's own."""
    return any(not bits.isdecimal() or int(bits) < 16 for bits in report.get("bits", ()))


def is_safe(answers: Sequence[Answer], options: RunOptions) -> bool:
    """Whether the compressed answer is called safe.

    Votes know nothing of few bits, nor of what layers have not read; and where the full cache's
    answer is there and differs, it is known better.
    """
    ours, *full = answers
    same = all(Comparison.of(ours, other).same for other in full)
    exact = options.reading.holds_all and not has_few_bits(ours.cache)
    return same and exact and bool(LostVotes.of(ours.cache).few)


@dataclass(frozen=True, kw_only=True)
class Note:
    """Something told behind an answer.

    Attributes:
        key: its name in the JSON object.
        record: its place there.
        lines: what people read; none where there is nothing to say.
        status: exit status of the command.
    """

    key: str
    record: dict[str, Any]
    lines: Sequence[Text] = ()
    status: int = 0


def notes_on(
    answers: Sequence[Answer],
    options: RunOptions,
    typed: Sequence[str],
    *,
    tried: Try,
    full_start: Callable[[int], Answer],
) -> list[Note]:
    """What is told of an answer.

    Args:
        answers: the compressed one and, to compare it, the full cache's.
        options: those of the command.
        typed: the command line.
        tried: tries other options on the prompt.
        full_start: the first so many tokens of the full cache's answer.
    """
    ours, *full = answers
    notes = [votes_note(answers, options, typed)]
    if options.compare:
        notes.append(compared_note(ours, full[0], options, typed, tried))
    if options.check is not None:
        reference = full[0] if full else full_start(options.check)
        notes.append(checked_note(ours, reference, options.check))
    return notes


def votes_note(answers: Sequence[Answer], options: RunOptions, typed: Sequence[str]) -> Note:
    """How much of the vote was lost, and where that is much, the command for a larger budget.

    What a full cache stands by needs none.
    """
    ours, *full = answers
    lost = LostVotes.of(ours.cache)
    change = larger_budget(options, ours) if lost.few is False and not full else None
    command = None if change is None else changed_command(typed, change)
    record = {"share": lost.share, "peak": lost.peak, "safe": is_safe(answers, options)}
    lines = [Text(f"for a larger budget: {command}")] if command else []
    return Note(key="lost_votes", record=record | {"command": command}, lines=lines)


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
    ours: Answer, full: Answer, options: RunOptions, typed: Sequence[str], tried: Try
) -> Note:
    """A compressed answer beside the full cache's; where it differs, the cheapest change that does
    not, found by trying.
    """
    found = Comparison.of(ours, full)
    change: Change | None = None
    remedy, note = None, ""
    if not found.same:
        changes = list(changes_by_price(options, ours))
        outcome = tried(full.token_ids, [changed_options(options, each) for each in changes])
        if outcome.untold:
            note = f"not computed: {outcome.untold}"
        elif outcome.keeper is None:
            change, note = {**FULL, "prefill": None}, "nothing smaller that was tried keeps it"
        else:
            change = changes[outcome.keeper]
            remedy = {name: value for name, value in change.items() if value}
    command = None if change is None else changed_command(typed, change)
    if found.same:
        lines = [Text("same answer", "green")]
    else:
        lines = [Text("different", "bold red"), _next_step(note, command)]
    record = {**asdict(found), "remedy": remedy, "command": command, "note": note}
    return Note(key="comparison", record=record, lines=lines)


def _next_step(note: str, command: str | None) -> Text:
    if not note:
        return Text(f"next to try, which keeps the full cache's answer: {command}")
    if command:
        return Text(f"{note}; for the full cache: {command}")
    return Text(f"what to try next is {note}")


def changes_by_price(options: RunOptions, answer: Answer) -> Iterator[Change]:
    """Changes to try, those that hold fewer bytes first: poolings, more bits, twice the budget...

    All that is tried reads the prompt exactly. Recall is none of the changes: what it brings back,
    it brings back for a later question.
    """
    exactly: Change = {} if options.reading.holds_all else {"prefill": None}
    if exactly:
        yield exactly
    known = accepted(options.policy, {})
    poolings = list(_other_poolings(answer.policy)) if "pooling" in known else []
    yield from ({**exactly, **pooling} for pooling in poolings)
    if has_few_bits(answer.cache):  # which a budget of tokens has not
        yield {**exactly, **MORE_BITS}
    for budget in _larger_budgets(answer) if "budget" in known else ():
        larger = {**exactly, "budget": budget, "keep_ratio": None}
        yield larger
        if FADING in poolings:
            yield {**larger, **FADING}


def larger_budget(options: RunOptions, answer: Answer) -> Change | None:
    """Twice the budget, or everything where that is as much; None for a method without a budget."""
    if "budget" not in accepted(options.policy, {}):
        return None
    budget = next(_larger_budgets(answer), None)
    return FULL if budget is None else {"budget": budget, "keep_ratio": None}


def _other_poolings(method: dict[str, Any]) -> Iterator[Change]:
    """Poolings that reach further than that of a method, or elsewhere."""
    kind, width = _parameter_of(method, "pooling"), _parameter_of(method, "kernel_size")
    if kind != "fading":
        yield FADING
    if not isinstance(width, int) or width < int(WIDE["kernel_size"]):
        yield WIDE


def _larger_budgets(answer: Answer) -> Iterator[int]:
    """Twice what was kept of the prompt, four times, ... as long as it is less than the prompt."""
    budget = _parameter_of(answer.policy, "budget")
    if not isinstance(budget, int):
        budget = max(1, round(answer.kept_tokens))
    while (budget := 2 * budget) < answer.prompt_tokens:
        yield budget


def _parameter_of(method: dict[str, Any], name: str) -> Any:
    """A parameter of a method, or else of one that it wraps; None where there is none."""
    if method.get(name) is not None:
        return method[name]
    wrapped = (value for value in method.values() if isinstance(value, dict))
    values = (_parameter_of(each, name) for each in wrapped)
    return next((value for value in values if value is not None), None)


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
