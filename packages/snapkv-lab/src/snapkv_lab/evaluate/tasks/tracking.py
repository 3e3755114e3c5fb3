"""A state that is carried through a long answer, checked line by line.

Methods that evict while generating (H2O, TOVA, StreamingLLM, R-KV) are told apart by what an answer
of thousands of tokens still needs of its prompt and of itself. Three kinds of answers need it:

- copy: a record is written again. Every line is needed once, far behind the one before it.
- cycle: names are gone through in their order, again and again. The prompt has the order, and so
  has every pass of the answer.
- ledger: every round adds to each account what the prompt says. A balance needs the one of the
  round before, which only the answer has, and an amount, which only the prompt has.

A copy and a cycle need nothing but repeating what followed a word before, which small models can do
where the answer is begun for them; a ledger needs a model that adds.
"""

import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from snapkv.app.settings import GenerationSettings
from snapkv.errors import InvalidArgumentError
from snapkv_lab.evaluate.haystack import number, words
from snapkv_lab.evaluate.sample import Sample
from snapkv_lab.evaluate.task import Task, require_some

_LEAST_TOKENS = 16
_MARGIN_TOKENS = 16  # behind the last step, so that it is not cut off
_LEAD_TOKENS = 48  # before the first one, where the answer is not begun
_SECOND_ROUND = 4  # steps of it that are begun: small models see by them that it is one
_NAME_LETTERS = range(4, 9)


@dataclass(frozen=True, kw_only=True)
class _Puzzle:
    """What the prompt says, and the steps that follow from it."""

    context: str
    question: str
    title: str
    steps: Iterator[str]
    begun: int


def _copy(draw: random.Random, names: list[str], tokens: int, items: int) -> _Puzzle:
    del items
    # A line has two tokens at least, so that no more of them are asked for.
    lines = [f"{name} {number(draw, 3)}" for name in names[: tokens // 2 + 2]]
    return _Puzzle(
        context="A record of lines, each with a name and a number:\n\n",
        question="\n\nWrite the whole record again, line by line in its order, and nothing else.",
        title="\n\nThe record again, line by line:\n\n",
        steps=iter(lines),
        begun=1,
    )


def _cycle(draw: random.Random, names: list[str], tokens: int, items: int) -> _Puzzle:
    del draw, tokens
    names = names[:items]
    return _Puzzle(
        context="Names in their order:\n\n" + "\n".join(names),
        question="\n\nGo through the names in their order, again and again, {count} lines in all: "
        "a name in every line, behind the last name the first one, and nothing else.",
        title="\n\nThe names in their order, again and again:\n\n",
        steps=itertools.cycle(names),
        begun=items + _SECOND_ROUND,
    )


def _ledger(draw: random.Random, names: list[str], tokens: int, items: int) -> _Puzzle:
    del tokens
    accounts = [(name, draw.randrange(10, 100), draw.randrange(2, 10)) for name in names[:items]]
    return _Puzzle(
        context="Accounts, what each has, and what it receives in every round:\n\n"
        + "\n".join(f"{name} {start} +{amount}" for name, start, amount in accounts),
        question="\n\nWrite what every account has after each round, {count} lines in all: a name "
        "and a number in every line, the accounts in their order, behind the last one the first "
        "one in the next round, and nothing else.",
        title="\n\nWhat every account has after each round:\n\n",
        steps=(
            f"{name} {start + turn * amount}"
            for turn in itertools.count(1)
            for name, start, amount in accounts
        ),
        begun=items + _SECOND_ROUND,
    )


_KINDS: dict[str, Callable[[random.Random, list[str], int, int], _Puzzle]] = {
    "copy": _copy,
    "cycle": _cycle,
    "ledger": _ledger,
}


@dataclass(frozen=True, kw_only=True)
class Tracking(Task):
    """A state kept through a long answer: a record copied, names in turn, accounts that grow.

    Args:
        answer_tokens: tokens of the right answer, about, behind what is begun of it.
        kinds: which of copy, cycle and ledger.
        items: how many names of a cycle, accounts of a ledger.
        samples_each: samples of every length and kind.
        cloze: begin the answer for the model, which small models need; a cycle and a ledger with
            their first round and four steps.
        seed: of names and numbers.
    """

    name: ClassVar[str] = "tracking"
    metric: ClassVar[str] = "steps before a mistake"
    axes: ClassVar[tuple[str, ...]] = ("answer_tokens", "kind")

    answer_tokens: tuple[int, ...] = (1024, 2048, 4096)
    kinds: tuple[str, ...] = tuple(_KINDS)
    items: int = 32
    samples_each: int = 5
    cloze: bool = False
    seed: int = 42

    def __post_init__(self) -> None:
        self.require(samples_each=1, items=2, answer_tokens=_LEAST_TOKENS)
        require_some("kinds", self.kinds, _KINDS)

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        for tokens, kind, index in itertools.product(
            self.answer_tokens, self.kinds, range(self.samples_each)
        ):
            yield self._sample(tokenizer, tokens, kind, f"{tokens}/{kind}/{index}")

    def score(self, sample: Sample, prediction: str) -> float:
        """The share of the steps that are right before the first mistake.

        A line that does not look like a step, such as a heading, is passed over, and so are a
        number and marks before one.
        """
        wanted = [_step(line) for line in sample.references[0].splitlines()]
        shape = _shape(wanted[0])
        given = [step for step in map(_step, prediction.splitlines()) if _shape(step) == shape]
        pairs = zip(wanted, given, strict=False)
        right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return right / len(wanted)

    def _sample(self, tokenizer: Any, tokens: int, kind: str, name: str) -> Sample:
        draw = random.Random(f"{self.seed}/{name}")
        names = [noun for noun in words("noun") if _is_name(noun)]
        draw.shuffle(names)
        if self.items > len(names):
            raise InvalidArgumentError(
                f"items: expected at most {len(names):,}, as many names as there are, got "
                f"{self.items:,}; pass a smaller number"
            )
        puzzle = _KINDS[kind](draw, names, tokens, self.items)
        begun = list(itertools.islice(puzzle.steps, puzzle.begun if self.cloze else 0))
        steps = _lasting(puzzle.steps, tokenizer, tokens)
        if steps is None:
            raise InvalidArgumentError(
                f"answer_tokens: expected a record of at most {len(names):,} names, as many as "
                f"there are, got {tokens:,} tokens; pass a smaller number, or leave copy out"
            )
        record = "\n".join([*begun, *steps]) if kind == "copy" else ""
        reference = "\n".join(steps)
        asked = puzzle.title if self.cloze else puzzle.question.format(count=len(steps))
        spare = _MARGIN_TOKENS + (0 if self.cloze else _LEAD_TOKENS)
        return Sample(
            name=name,
            cell={"answer_tokens": tokens, "kind": kind},
            context=puzzle.context + record,
            question=asked,
            plain_question=asked if self.cloze else f"{asked}\n\n",
            answer_start="".join(f"{step}\n" for step in begun),
            references=(reference,),
            settings=GenerationSettings(max_new_tokens=_tokens(tokenizer, reference) + spare),
        )


def _lasting(steps: Iterator[str], tokenizer: Any, tokens: int) -> list[str] | None:
    """The first steps that take that many tokens together; None where they end before."""
    taken, used = [], 0
    for step in steps:
        taken.append(step)
        used += _tokens(tokenizer, f"{step}\n")
        if used >= tokens:
            return taken
    return None


def _tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _is_name(noun: str) -> bool:
    return noun.isascii() and noun.isalpha() and noun.islower() and len(noun) in _NAME_LETTERS


def _step(line: str) -> list[str]:
    """A line's words and numbers; without the number that it may be given in a list."""
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", line.lower())
    return list(itertools.dropwhile(str.isdigit, re.findall(r"[a-z]+|\d+", plain)))


def _shape(step: list[str]) -> list[bool]:
    return [word.isdigit() for word in step]
