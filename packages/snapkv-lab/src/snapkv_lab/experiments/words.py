"""How often the word for the lost votes was right, with the bits that `snapkv ask` chooses.

Texts of 1k to 3k tokens of kinds that no pooling and no word was chosen by: settings,
invoices in readmes, purchases in a language reference, and constants in source code.
Rounds 0 to 3 of them set the bound on what bits may move the output (`AutoCodes.most_error`), so
what is stored begins with the next.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

import torch

from snapkv import AutoBudget, CompressedCache, default_policy
from snapkv.cli.notes import LostVotes
from snapkv.cli.policy import LOST_VOTE_IN_FEW_BITS
from snapkv.policies import Policy
from snapkv_lab.evaluate.haystack import (
    distinct,
    number,
    python_sources,
    python_topics,
    readmes,
    word_key,
    words,
)
from snapkv_lab.experiments.auto_budget import WORDS, Answering, answered_in_full
from snapkv_lab.experiments.experiment import Experiment, Given, Sized
from snapkv_lab.experiments.held_out import Pair, text_of
from snapkv_lab.experiments.pages import markdown_table
from snapkv_lab.experiments.prompts import encode
from snapkv_lab.experiments.records import Row, last_run
from snapkv_lab.experiments.texts import Text, counted

LENGTHS = (1024, 2048, 3072)
ASKED = 6
SEED = 77

WAYS: dict[str, tuple[Callable[[], Policy], Any]] = {
    "default": (lambda: default_policy(AutoBudget(lost_vote=LOST_VOTE_IN_FEW_BITS)), "auto"),
    "default, 16 bits": (lambda: default_policy(AutoBudget()), None),
    "1/4 of the bytes": (lambda: default_policy("25%"), "auto"),
    "1/8 of the bytes": (lambda: default_policy("12.5%"), "auto"),
    "1/16 of the bytes": (lambda: default_policy("6.25%"), "auto"),
}


def _texts(given: Given) -> Iterator[Text]:
    """Round after round a text of every kind, each of another length than in the round before."""
    tokenizer = given.loaded.tokenizer
    for index in range(given.first, given.rounds):
        for place, (kind, make) in enumerate(_KINDS.items()):
            tokens = LENGTHS[(index + place) % len(LENGTHS)]
            lines, pairs = make(random.Random(f"{SEED}/{kind}/{index}"), 4 * tokens)
            document = _cut(tokenizer, lines, tokens)
            known = [pair for pair in pairs if pair[1] in document][:ASKED]
            yield text_of(tokenizer, f"{kind}/{tokens}/{index}", document, known)


def _cut(tokenizer: Any, lines: Sequence[str], tokens: int) -> str:
    kept = str(tokenizer.decode(encode(tokenizer, "\n".join(lines))[:tokens]))
    return kept.rpartition("\n")[0]


def _settings(draw: random.Random, characters: int) -> tuple[list[str], list[Pair]]:
    names = ("retries", "timeout", "workers", "batch", "depth", "queue", "limit", "delay")
    lines = [
        f"{draw.choice(names)}_{draw.choice(words('noun'))} = {draw.randrange(2, 900)}"
        for _ in range(characters // 40)
    ]
    return _between(
        draw,
        lines,
        {key: number(draw, 4) for key in distinct(lambda: word_key(draw), 8)},
        "port of {} = {}",
        "Which port has {}?",
        "The port of {} =",
    )


def _invoices(draw: random.Random, characters: int) -> tuple[list[str], list[Pair]]:
    return _between(
        draw,
        _lines(draw, readmes(), characters),
        {key: number(draw, 4) for key in distinct(lambda: word_key(draw), 8)},
        "The invoice {} amounts to {} crowns.",
        "How many crowns does the invoice {} amount to?",
        "The invoice {} amounts to",
    )


def _purchases(draw: random.Random, characters: int) -> tuple[list[str], list[Pair]]:
    return _between(
        draw,
        _lines(draw, python_topics().pieces, characters),
        {name: f"{number(draw, 3)} {draw.choice(words('noun'))}" for name in _NAMES},
        "On Monday {} bought {}.",
        "What did {} buy?",
        "On Monday {} bought",
    )


def _lines(draw: random.Random, texts: Sequence[str], characters: int) -> list[str]:
    """Lines with words in them, of texts in an order that is drawn."""
    joined = "\n".join(draw.sample(texts, len(texts)))[:characters]
    return [line for line in joined.splitlines() if line.strip()]


def _constants(draw: random.Random, characters: int) -> tuple[list[str], list[Pair]]:
    keys = distinct(lambda: word_key(draw).replace("-", "_").upper(), 8)
    source = _lines(draw, python_sources(characters), characters)
    return _between(
        draw,
        source,
        {key: number(draw, 4) for key in keys},
        "{} = {}",
        "What is the value of {}?",
        "The value of {} is",
    )


def _between(
    draw: random.Random,
    lines: list[str],
    facts: dict[str, str],
    told: str,
    question: str,
    start: str,
) -> tuple[list[str], list[Pair]]:
    """Lines with facts at places drawn among them, and a question for each fact."""
    for key, value in facts.items():
        lines.insert(draw.randrange(1, len(lines)), told.format(key, value))
    pairs = [(question.format(key), value, start.format(key)) for key, value in facts.items()]
    return lines, draw.sample(pairs, len(pairs))


_NAMES = ("Agnes", "Bruno", "Carmen", "Dario", "Edith", "Felix", "Gwen", "Hassan")

_KINDS: dict[str, Callable[[random.Random, int], tuple[list[str], list[Pair]]]] = {
    "settings": _settings,
    "invoices": _invoices,
    "purchases": _purchases,
    "constants": _constants,
}


@torch.inference_mode()
def _measure(given: Given, text: Text) -> Iterator[Row]:
    """How every way answers each question that the full cache answers right."""
    for row, answering, ids in answered_in_full(given, text):
        if row["full"]:
            row["answers"] = {
                name: _answer(answering, ids, answering.prompt.compressed(policy(), quantize=bits))
                for name, (policy, bits) in WAYS.items()
            }
        yield row


def _answer(answering: Answering, ids: list[int], cache: CompressedCache) -> Row:
    """An answer, and what `snapkv ask` says of its cache."""
    report = cache.report()
    lost = LostVotes.of(report)
    return answering.answered(cache, ids) | {
        "kept": round(report.kept_tokens, 1),
        "bytes": round(report.held_bytes / report.full_bytes, 5),
        "word": lost.word,
        "lost": lost.share,
        "peak": lost.peak,
    }


def _pages(rows: list[Row]) -> list[str]:
    known, asked = [row for row in rows if row.get("answers")], sum("text" in row for row in rows)
    kinds = [kind for kind in _KINDS if any(row["kind"] == kind for row in known)]
    right = [
        [
            way,
            f"{100 * fmean(row['answers'][way]['bytes'] for row in known):.0f} %",
            *(str(_right(known, way, lambda row, own=kind: row["kind"] == own)) for kind in kinds),
            str(_right(known, way, lambda _: True)),
        ]
        for way in WAYS
    ]
    told = [
        [
            word,
            *(
                str(counted(found for way in ways for found in _behind(known, way, word)))
                for ways in (WAYS, ["default"], [way for way in WAYS if "bytes" in way])
            ),
        ]
        for word in WORDS
    ]
    return [
        f"## Right answers, {len(known)} of {asked} questions",
        markdown_table(["way", "bytes", *kinds, "all"], right),
        "## The word, and whether the answer was right",
        markdown_table(["word", "all", "default", "given bytes"], told),
    ]


def _right(rows: Sequence[Row], way: str, of: Callable[[Row], bool]) -> Any:
    return counted(row["answers"][way]["right"] for row in rows if of(row))


def _behind(rows: Sequence[Row], way: str, word: str) -> Iterator[bool]:
    """Whether answers are right that this word was said of."""
    for row in rows:
        if row["answers"][way]["word"] == word:
            yield row["answers"][way]["right"]


WORDS_ON_OTHERS = Experiment(
    name="words",
    title="The word for the lost votes, on texts of kinds that chose nothing",
    takes="an hour",
    measure=_measure,
    cases=lambda given, _: _texts(given),
    options={"first": Sized(4, 0), "rounds": Sized(12, 1)},
    measured=last_run,
    tables=_pages,
)
