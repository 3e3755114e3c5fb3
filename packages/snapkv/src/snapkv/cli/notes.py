"""What a user is told behind an answer: the same or not, what was lost, and what to type next."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Protocol

from rich.text import Text

from snapkv.app.answering import Answer
from snapkv.app.comparison import Comparison
from snapkv.app.prefills import Prefill
from snapkv.cli.command_line import changed_command
from snapkv.cli.lost_votes import LostInWords
from snapkv.cli.options import RunOptions
from snapkv.cli.remedies import Remedy, Try, larger_budget, parameter_of, remedy_for
from snapkv.policies.budget import dilution
from snapkv.validation import AUTO

DIFFERS = 3
"""Exit status of `--check` where the answer is not the full cache's."""


class Note(Protocol):
    """Something told behind an answer."""

    @property
    def key(self) -> str:
        """Its name in the JSON object."""

    @property
    def status(self) -> int:
        """Exit status of the command."""

    def record(self) -> dict[str, Any]:
        """Its place in the JSON object."""

    def lines(self) -> list[Text]:
        """What people read; nothing where there is nothing to say."""


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
    notes: list[Note] = [ReadBy.of(options), *AutoKept.of(ours), Votes.of(ours, options, typed)]
    if options.compare:
        notes.append(Compared.of(answers, options, typed, tried))
    if options.check is not None:
        reference = full[0] if full else full_start(options.check)
        notes.append(Checked.of(ours, reference, options.check))
    return notes


@dataclass(frozen=True, kw_only=True)
class ReadBy:
    """How the prompt was read, and what that means for the answer."""

    prefill: Prefill
    key: str = "prefill"
    status: int = 0

    @classmethod
    def of(cls, options: RunOptions) -> "ReadBy":
        """Read it off the options."""
        return cls(prefill=options.reading)

    def record(self) -> dict[str, Any]:
        """Its name and parameters."""
        return self.prefill.describe()

    def lines(self) -> list[Text]:
        """One line where it was not exact."""
        return [Text(self.prefill.note)] if self.prefill.note else []


@dataclass(frozen=True, kw_only=True)
class AutoKept:
    """How much of the prompt a budget that the votes chose has kept, and by which rule.

    Attributes:
        auto: the parameters of the rule, see `snapkv.AutoBudget`.
        layers: tokens that each compressed layer keeps of the prompt, the mean of its heads.
        prompt_tokens: what there was.
    """

    auto: Mapping[str, Any]
    layers: Sequence[float]
    prompt_tokens: int
    key: str = "budget"
    status: int = 0

    @classmethod
    def of(cls, answer: Answer) -> "list[AutoKept]":
        """Read it off an answer's cache; none where the budget is a number."""
        budget = parameter_of(answer.policy, "budget")
        if not isinstance(budget, dict):
            return []
        behind = answer.cache.seen_tokens - answer.prompt_tokens
        rows = [row for row in answer.cache["layers"] if row["kind"] == "compressed"]
        kept = [row["kept_tokens"] - behind for row in rows]
        return [cls(auto=budget[AUTO], layers=kept, prompt_tokens=answer.prompt_tokens)]

    def record(self) -> dict[str, Any]:
        """The rule, and the tokens per layer: mean, least and most."""
        return {
            AUTO: self.auto,
            "kept_tokens": fmean(self.layers),
            "least": min(self.layers),
            "most": max(self.layers),
        }

    def lines(self) -> list[Text]:
        """One line."""
        least, most, limit = min(self.layers), max(self.layers), self.auto["most"]
        if least >= self.prompt_tokens:
            return [Text("budget auto: nothing was dropped")]
        cut = "" if limit is None or most < limit else f", but no more than {limit:,}"
        bound = f"{100 * self.auto['lost_vote'] / dilution(self.prompt_tokens):.2g} %"
        return [
            Text(
                f"budget auto: {fmean(self.layers):,.0f} of {self.prompt_tokens:,} prompt tokens "
                f"kept in each layer ({least:,.0f} to {most:,.0f}): the window, and what it gave "
                f"a pooled vote of more than {bound}{cut}"
            )
        ]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Whether two answers are the same, and where not, what to try next."""

    comparison: Comparison
    texts: tuple[str, str]
    remedy: Remedy | None
    typed: Sequence[str]
    key: str = "comparison"
    status: int = 0

    @classmethod
    def of(
        cls, answers: Sequence[Answer], options: RunOptions, typed: Sequence[str], tried: Try
    ) -> "Compared":
        """Compare the compressed and the full answer; where they differ, look for a remedy."""
        ours, full = answers
        found = Comparison.of(ours, full)
        remedy = None if found.same else remedy_for(options, ours, full, tried)
        texts = ours.text, full.text
        return cls(comparison=found, texts=texts, remedy=remedy, typed=typed)

    @property
    def command(self) -> str | None:
        """What to type next."""
        change = None if self.remedy is None else self.remedy.change
        return None if change is None else changed_command(self.typed, change)

    def record(self) -> dict[str, Any]:
        """The comparison; `remedy` is None where nothing keeps the answer, and `note` says why."""
        kept = self.remedy is not None and self.remedy.keeps
        change = self.remedy.change if self.remedy and kept else None
        return {
            **asdict(self.comparison),
            "remedy": change and {name: value for name, value in change.items() if value},
            "command": self.command,
            "note": self.remedy.note if self.remedy else "",
        }

    def lines(self) -> list[Text]:
        """One line, or the differences and the next command below it."""
        if self.remedy is None:
            return [Text("same answer", "green")]
        lines = [Text.assemble(("different", "bold red"), ": ", word_diff(*self.texts))]
        if self.remedy.keeps:
            lines.append(Text(f"next to try, which keeps the full cache's answer: {self.command}"))
        elif self.command:
            lines.append(Text(f"{self.remedy.note}; for the full cache: {self.command}"))
        else:
            lines.append(Text(f"what to try next is {self.remedy.note}"))
        return lines


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Whether the first tokens of an answer are the full cache's."""

    tokens: int
    comparison: Comparison
    key: str = "check"

    @classmethod
    def of(cls, answer: Answer, full: Answer, tokens: int) -> "Checked":
        """Compare that many tokens."""
        return cls(tokens=tokens, comparison=Comparison.of_first(answer, full, tokens))

    @property
    def status(self) -> int:
        """`DIFFERS` where they do."""
        return 0 if self.comparison.same else DIFFERS

    def record(self) -> dict[str, Any]:
        """How many tokens were compared, and the first that differs."""
        return {"tokens": self.tokens, **asdict(self.comparison)}

    def lines(self) -> list[Text]:
        """One line."""
        place = self.comparison.first_difference
        if place is None:
            first = "token is" if self.tokens == 1 else f"{self.tokens:,} tokens are"
            return [Text(f"check: the first {first} the full cache's", "green")]
        text = f"check: token {place + 1:,} of the first {self.tokens:,} is not the full cache's"
        return [Text(text, "bold red")]


@dataclass(frozen=True, kw_only=True)
class Votes:
    """How much of the vote was lost, and where that is much, the command for a larger budget."""

    lost: LostInWords
    command: str | None
    key: str = "lost_votes"
    status: int = 0

    @classmethod
    def of(cls, answer: Answer, options: RunOptions, typed: Sequence[str]) -> "Votes":
        """Read them off an answer's cache; what a full cache verifies, or stands by, needs none."""
        lost = LostInWords.of(answer.cache)
        needs_more = lost.calls_for_more and not (options.self_speculate or options.compare)
        change = larger_budget(options, answer) if needs_more else None
        command = None if change is None else changed_command(typed, change)
        return cls(lost=lost, command=command)

    def record(self) -> dict[str, Any]:
        """The shares, the word, and the command, if there is one."""
        shares = {name: getattr(self.lost, name) for name in ("share", "highest", "peak")}
        return {**shares, "word": self.lost.word, "command": self.command}

    def lines(self) -> list[Text]:
        """One line where a larger budget is called for."""
        if self.command is None:
            return []
        return [Text(f"lost votes: {self.lost}; for a larger budget: {self.command}")]


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
