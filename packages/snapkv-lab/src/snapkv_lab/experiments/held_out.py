"""Texts and questions of other kinds than those by which pooling, bounds and words were chosen.

Comments of Python's sources, sentences of installed readmes, logs, phrases hidden in source code;
and facts between lines: settings, invoices in readmes, purchases in a language reference, constants
in source code. Every question is asked as `snapkv ask` asks it, with the model's chat template;
some answers are begun for the model, as `--answer-start` does.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from snapkv.app.prompts import question_prompt
from snapkv_lab.evaluate.haystack import (
    distinct,
    number,
    python_sources,
    python_topics,
    readmes,
    word_key,
    words,
)
from snapkv_lab.experiments.prompts import encode
from snapkv_lab.experiments.texts import Text

LENGTHS = (1024, 2048, 4096)
"""Tokens of a text, in turn."""

QUESTIONS = range(3, 9)
"""How many are asked of a text."""

SEED = 31


Pair = tuple[str, str, str]
"""A question, what a right answer has in it, and how the answer is begun."""


class Asked(NamedTuple):
    """What is read behind a text, up to where the answer goes on, and what it has to have in it."""

    ids: Sequence[int]
    expected: str


def held_out(tokenizer: Any, rounds: range) -> Iterator[Text]:
    """Round after round a text of every kind, each of another length than in the round before."""
    for index in rounds:
        for place, (kind, make) in enumerate(_KINDS.items()):
            tokens = LENGTHS[(index + place) % len(LENGTHS)]
            draw = random.Random(f"{SEED}/{kind}/{index}")
            document, pairs = make(tokenizer, tokens, draw)
            yield _text_of(tokenizer, f"{kind}/{tokens}/{index}", document, pairs)


def _text_of(tokenizer: Any, name: str, document: str, pairs: Sequence[Pair]) -> Text:
    """A document with questions about it, as `snapkv ask` asks them."""
    begun, asked = "", []
    for question, expected, start in pairs:
        text = question_prompt(tokenizer, document, question, answer_start=start).text
        end = text.index(document) + len(document)
        begun = text[:end]
        asked.append(Asked(encode(tokenizer, text[end:]), expected))
    return Text(name=name, ids=encode(tokenizer, begun), cases=asked)


def _comments(tokenizer: Any, tokens: int, draw: random.Random) -> tuple[str, list[Pair]]:
    """A module's source, and how lines of its comments and docstrings go on."""
    while True:
        text = _cut(tokenizer, draw.choice(python_sources(4 * max(LENGTHS))), tokens, draw)
        lines = re.findall(r"^ *(?:# )?([A-Z][a-z]+(?: [\w',()-]+){9,})[.:]?$", text, re.MULTILINE)
        if pairs := _going_on(text, lines, "line", draw):
            return text, pairs


def _sentences(tokenizer: Any, tokens: int, draw: random.Random) -> tuple[str, list[Pair]]:
    """Readmes of installed packages, and how sentences of them go on."""
    while True:
        joined = "\n\n".join(draw.sample(readmes(), 6))
        text = " ".join(_cut(tokenizer, joined, tokens, draw).split())
        found = re.findall(r"(?<=[.?!] )[A-Z][A-Za-z ,'()-]{60,200}[.?!] ", text)
        if pairs := _going_on(text, found, "sentence", draw):
            return text, pairs


def _going_on(text: str, found: Sequence[str], what: str, draw: random.Random) -> list[Pair]:
    """Questions about what begins like nothing else in a text; none if there are too few."""
    begun = [
        (" ".join(words[:6]), " ".join(words[6:10])) for words in map(str.split, found) if words[9:]
    ]
    begun = [(start, rest) for start, rest in begun if text.count(start) == 1]
    if len(begun) < QUESTIONS[0]:
        return []
    question = f"What does the text say in that {what}?"
    return [(question, rest, f'The text says: "{start}') for start, rest in _some(begun, draw)]


def _logs(tokenizer: Any, tokens: int, draw: random.Random) -> tuple[str, list[Pair]]:
    keys = distinct(lambda: word_key(draw), 8)
    failed = {key: number(draw, 5) for key in keys}
    services, count = ("gateway", "billing", "search", "mailer"), round(tokens / 32)
    lines = [
        f"INFO {draw.choice(services)} job {draw.randrange(100, 999)} done in "
        f"{draw.randrange(2, 900)} ms"
        for _ in range(count)
    ]
    for key, code in failed.items():
        line = f"ERROR {draw.choice(services)} job {key} failed with exit code {code}"
        lines.insert(draw.randrange(len(lines)), line)
    second, stamped = 8 * 3600, []
    for line in lines:
        second += draw.randrange(1, 40)
        stamped.append(f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02} {line}")
    question, start = (
        "With which exit code did the job {} fail?",
        "The job {} failed with exit code",
    )
    asked = _some(keys, draw)
    pairs = [(question.format(key), failed[key], start.format(key)) for key in asked]
    return "\n".join(stamped), pairs


def _phrases(tokenizer: Any, tokens: int, draw: random.Random) -> tuple[str, list[Pair]]:
    """Source code, between whose lines pass phrases of people stand."""
    people = draw.sample(_PEOPLE, 7)
    told = {
        person: " ".join(draw.choice(words("adjective", "noun")) for _ in range(4))
        for person in people
    }
    lines = _cut(
        tokenizer, draw.choice(python_sources(4 * max(LENGTHS))), tokens - 150, draw
    ).splitlines()
    for person, phrase in told.items():
        lines.insert(draw.randrange(len(lines)), f"# The pass phrase of {person} is {phrase}.")
    question = "What is the pass phrase of {}?"
    start = 'The text says: "The pass phrase of {} is'
    asked = _some(people, draw)
    pairs = [(question.format(who), told[who], start.format(who)) for who in asked]
    return "\n".join(lines), pairs


_PEOPLE = (
    "Amara", "Bjorn", "Chiara", "Dmitri", "Eleni", "Farid", "Greta", "Hiroshi", "Ines", "Jamal",
    "Katya", "Lorenzo", "Mei", "Nadia", "Oskar", "Priya",
)  # fmt: skip


def _settings(tokenizer: Any, tokens: int, draw: random.Random) -> tuple[str, list[Pair]]:
    names = ("retries", "timeout", "workers", "batch", "depth", "queue", "limit", "delay")
    lines = [
        f"{draw.choice(names)}_{draw.choice(words('noun'))} = {draw.randrange(2, 900)}"
        for _ in range(tokens // 10)
    ]
    return _between(
        tokenizer,
        tokens,
        draw,
        lines,
        {key: number(draw, 4) for key in distinct(lambda: word_key(draw), 8)},
        "port of {} = {}",
        "Which port has {}?",
        "The port of {} =",
    )


def _invoices(tokenizer: Any, tokens: int, draw: random.Random) -> tuple[str, list[Pair]]:
    return _between(
        tokenizer,
        tokens,
        draw,
        _lines(draw, readmes(), tokens),
        {key: number(draw, 4) for key in distinct(lambda: word_key(draw), 8)},
        "The invoice {} amounts to {} crowns.",
        "How many crowns does the invoice {} amount to?",
        "The invoice {} amounts to",
    )


def _purchases(tokenizer: Any, tokens: int, draw: random.Random) -> tuple[str, list[Pair]]:
    return _between(
        tokenizer,
        tokens,
        draw,
        _lines(draw, python_topics().pieces, tokens),
        {name: f"{number(draw, 3)} {draw.choice(words('noun'))}" for name in _NAMES},
        "On Monday {} bought {}.",
        "What did {} buy?",
        "On Monday {} bought",
    )


def _lines(draw: random.Random, texts: Sequence[str], tokens: int) -> list[str]:
    """Lines with words in them, of texts in an order that is drawn."""
    joined = "\n".join(draw.sample(texts, len(texts)))[: 4 * tokens]
    return [line for line in joined.splitlines() if line.strip()]


def _constants(tokenizer: Any, tokens: int, draw: random.Random) -> tuple[str, list[Pair]]:
    keys = distinct(lambda: word_key(draw).replace("-", "_").upper(), 8)
    source = _lines(draw, python_sources(4 * tokens), tokens)
    return _between(
        tokenizer,
        tokens,
        draw,
        source,
        {key: number(draw, 4) for key in keys},
        "{} = {}",
        "What is the value of {}?",
        "The value of {} is",
    )


def _between(
    tokenizer: Any,
    tokens: int,
    draw: random.Random,
    lines: list[str],
    facts: dict[str, str],
    told: str,
    question: str,
    start: str,
) -> tuple[str, list[Pair]]:
    """Lines with facts at places drawn among them, and questions about those that fit."""
    for key, value in facts.items():
        lines.insert(draw.randrange(1, len(lines)), told.format(key, value))
    text = _begun(tokenizer, "\n".join(lines), tokens)
    pairs = [(question.format(key), value, start.format(key)) for key, value in facts.items()]
    return text, _some([pair for pair in pairs if pair[1] in text], draw)


_NAMES = ("Agnes", "Bruno", "Carmen", "Dario", "Edith", "Felix", "Gwen", "Hassan")

_KINDS: dict[str, Callable[[Any, int, random.Random], tuple[str, list[Pair]]]] = {
    "comments": _comments,
    "sentences": _sentences,
    "logs": _logs,
    "phrases": _phrases,
    "settings": _settings,
    "invoices": _invoices,
    "purchases": _purchases,
    "constants": _constants,
}


def _some(found: Sequence[Any], draw: random.Random) -> list[Any]:
    return draw.sample(found, min(len(found), QUESTIONS[-1]))


def _cut(tokenizer: Any, text: str, tokens: int, draw: random.Random) -> str:
    """So many tokens from the beginning of a line on, or what there is."""
    begin = draw.randrange(max(1, len(text) - 4 * tokens))
    text = text[text.rfind("\n", 0, begin) + 1 :]
    return _begun(tokenizer, text, tokens)


def _begun(tokenizer: Any, text: str, tokens: int) -> str:
    """The lines of a text that begin with its first tokens."""
    ids = encode(tokenizer, text[: 8 * tokens])[:tokens]
    return str(tokenizer.decode(ids)).rpartition("\n")[0]
