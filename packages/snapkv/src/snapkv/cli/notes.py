"""What a user is told behind an answer: the same or not, what was lost, and what to type next."""

import dataclasses
import difflib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal, Self

from rich.text import Text

from snapkv.app.answering import Answer
from snapkv.app.comparison import Comparison
from snapkv.app.remedies import Tried
from snapkv.cache.report import bits_text
from snapkv.cli.options import OWN_FLAGS, RunOptions
from snapkv.cli.policy import accepted, build_policy
from snapkv.policies import Policy
from snapkv.policies.budget import dilution
from snapkv.validation import AUTO

DIFFERS = 3
"""Exit status of `--check` where the answer is not the full cache's."""

SAFE_BELOW = 0.00125
"""Where less than this share of the window's attention is lost at one place, on average over heads
and layers, and in sum less than `SAFE_SUM_BELOW`, answers are those of the full cache but for few
of a hundred: see `docs/results.md`, which says how often each word was right. Both are shares of a
prompt of 1,024 tokens; a longer one dilutes votes, and more that was not looked at is dropped."""

SAFE_SUM_BELOW = 0.15
"""Of all votes, so that an answer whose votes lie scattered counts, too."""

DOUBTFUL_BELOW = 0.008
"""From here on an answer is to be mistrusted; below it, and not safe, most are right."""

Change = Mapping[str, Any]
"""New values of options by their names; None takes an option away."""

FULL: dict[str, Any] = {"policy": "full", **dict.fromkeys((*OWN_FLAGS, "set_"))}
"""The full cache itself, which has none of the parameters of a method."""

FADING: Change = {"pooling": "fading", "kernel_size": None, "decay": None}
WIDE: Change = {"pooling": "max", "kernel_size": "13", "decay": None}

Try = Callable[[Sequence[int], list[Policy]], Tried]
"""Tries policies in order on an answer; see `snapkv.app.remedies.first_that_keeps`."""

Word = Literal["safe", "doubtful", "lost"]


def word_for(peak: float, share: float, tokens: float) -> Word:
    """What the highest lost vote and the sum of them, 0 to 1, mean for an answer.

    They are those of a prompt of so many tokens. What is no number is lost.
    """
    undiluted, total = peak * dilution(tokens), share * dilution(tokens)
    if undiluted < SAFE_BELOW and total < SAFE_SUM_BELOW:
        return "safe"
    return "doubtful" if undiluted < DOUBTFUL_BELOW else "lost"


@dataclass(frozen=True, kw_only=True)
class LostVotes:
    """What a report of a cache says about the votes that were lost, in plain words.

    Attributes:
        share: mean over layers and heads, 0 to 1; None where the method measures none.
        highest: that of the worst layer; None where there is none.
        peak: the highest vote that is lost, as a share of the window's attention, mean over layers
            and heads, see `CacheReport`; None where the method measures none.
        word: None where nothing is known; where nothing is dropped, it is "safe".
        drops_nothing: whether all tokens are held.
    """

    share: float | None
    highest: float | None
    peak: float | None
    word: Word | None
    drops_nothing: bool

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> Self:
        """Read a `CacheReport`, which need not know of votes."""
        layers = [row.get("lost_votes") for row in report.get("layers", ())]
        peak, tokens = report.get("lost_vote_peak"), report.get("chosen_at", report["seen_tokens"])
        drops_nothing = report["kept_tokens"] >= report["seen_tokens"]
        share = report.get("lost_votes")
        known = None if peak is None or share is None else word_for(peak, share, tokens)
        return cls(
            share=share,
            highest=max((lost for lost in layers if lost is not None), default=None),
            peak=peak,
            word="safe" if drops_nothing else known,
            drops_nothing=drops_nothing,
        )

    def __str__(self) -> str:
        if self.drops_nothing:
            return "nothing was dropped"
        return "-" if self.share is None else f"{100 * self.share:.0f} % ({self.word})"


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
        tried: tries policies on the prompt.
        full_start: the first so many tokens of the full cache's answer.
    """
    ours, *full = answers
    way = options.reading
    notes = [
        Note(key="prefill", record=way.describe(), lines=[Text(way.note)] if way.note else []),
        *_budget_note(ours, options, typed),
        votes_note(ours, options, typed),
    ]
    if options.compare:
        notes.append(compared_note(ours, full[0], options, typed, tried))
    if options.check is not None:
        reference = full[0] if full else full_start(options.check)
        notes.append(checked_note(ours, reference, options.check))
    return notes


def _budget_note(answer: Answer, options: RunOptions, typed: Sequence[str]) -> Iterator[Note]:
    """How much of the prompt was kept, in how many bits, where that was chosen; else none."""
    budget = _parameter_of(answer.policy, "budget")
    auto = budget.get(AUTO) if isinstance(budget, dict) else None
    if auto is None and not options.chooses_bits:
        return
    tokens, bits = answer.prompt_tokens, answer.cache["bits"]
    behind = answer.cache.seen_tokens - tokens
    rows = [row for row in answer.cache["layers"] if row["kind"] == "compressed"]
    kept = [row["kept_tokens"] - behind for row in rows]
    mean, least, most = fmean(kept), min(kept), max(kept)
    name = "budget auto" if auto else "budget"
    line = f"{name}: nothing was dropped, {bits_text(bits)}"
    if options.protect_first >= tokens and least >= tokens:
        command = changed_command(typed, {"protect_first": None})
        line += f", since --protect-first covers all {tokens:,} prompt tokens; without: {command}"
    if least < tokens:
        line = (
            f"{name}: {mean:,.0f} of {tokens:,} prompt tokens kept in each layer "
            f"({least:,.0f} to {most:,.0f}) {bits_text(bits)}"
        )
        if auto:
            limit = auto["most"]
            cut = "" if limit is None or most < limit else f", but no more than {limit:,}"
            bound = 100 * auto["lost_vote"] / dilution(tokens)
            line += f": the window, and what it gave a pooled vote of more than {bound:.2g} %{cut}"
    record = {AUTO: auto, "kept_tokens": mean, "least": least, "most": most, "bits": bits}
    record |= {"held_bytes": answer.cache.held_bytes}
    yield Note(key="budget", record=record, lines=[Text(line)])


def votes_note(answer: Answer, options: RunOptions, typed: Sequence[str]) -> Note:
    """How much of the vote was lost, and where that is much, the command for a larger budget.

    What a full cache stands by needs none.
    """
    lost = LostVotes.of(answer.cache)
    change = None
    if lost.word in ("doubtful", "lost") and not options.compare:
        change = larger_budget(options, answer)
    command = None if change is None else changed_command(typed, change)
    return Note(
        key="lost_votes",
        record={
            **{name: getattr(lost, name) for name in ("share", "highest", "peak", "word")},
            "command": command,
        },
        lines=[Text(f"lost votes: {lost}; for a larger budget: {command}")] if command else [],
    )


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
        outcome = tried(
            full.token_ids, [build_policy(changed_options(options, each)) for each in changes]
        )
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
        diff = word_diff(ours.text, full.text)
        lines = [Text.assemble(("different", "bold red"), ": ", diff), _next_step(note, command)]
    record = {**asdict(found), "remedy": remedy, "command": command, "note": note}
    return Note(key="comparison", record=record, lines=lines)


def _next_step(note: str, command: str | None) -> Text:
    if not note:
        return Text(f"next to try, which keeps the full cache's answer: {command}")
    if command:
        return Text(f"{note}; for the full cache: {command}")
    return Text(f"what to try next is {note}")


def word_diff(ours: str, theirs: str) -> Text:
    """What stands in one text only, word by word: [-of ours-] in red, {+of theirs+} in green."""
    left, right = ours.split(), theirs.split()
    parts: list[tuple[str, str]] = []
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    for kind, begin, end, other_begin, other_end in matcher.get_opcodes():
        if kind == "equal":
            parts.append((" ".join(left[begin:end]), ""))
            continue
        if begin < end:
            parts.append((f"[-{' '.join(left[begin:end])}-]", "red"))
        if other_begin < other_end:
            parts.append((f"{{+{' '.join(right[other_begin:other_end])}+}}", "green"))
    return Text(" ").join(Text(text, style) for text, style in parts)


def changes_by_price(options: RunOptions, answer: Answer) -> Iterator[Change]:
    """Changes to try, those that hold fewer bytes first: other poolings, then twice the budget...

    All that is tried reads the prompt exactly. Recall is none of the changes: what it brings back,
    it brings back for a later question.
    """
    exactly: Change = {} if options.reading.holds_all else {"prefill": None}
    if exactly:
        yield exactly
    known = accepted(options.policy, {})
    poolings = list(_other_poolings(answer.policy)) if "pooling" in known else []
    yield from ({**exactly, **pooling} for pooling in poolings)
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
    new = [(_flag(name), str(value)) for name, value in change.items() if value is not None]
    words = (*_without(typed[:end], change), *(word for pair in new for word in pair), *typed[end:])
    return shlex.join(["snapkv", *words])


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
