"""Keys and values that synthetic tasks hide: words, numbers, identifiers.

The words are the lists of the package wonderwords, read without importing it.
"""

import functools
import random
import uuid
from collections.abc import Callable, Collection
from typing import Literal

from snapkv.packages import package_file

WordList = Literal["noun", "adjective", "verb"]


@functools.cache
def words(*kinds: WordList) -> tuple[str, ...]:
    """The words of one or more lists, each once, in the alphabet's order.

    Raises:
        MissingDependencyError: wonderwords is not installed.
    """
    files = [package_file("wonderwords", "assets", f"{kind}list.txt") for kind in kinds]
    found = {word for file in files for word in file.read_text("utf-8").splitlines()}
    return tuple(sorted(found - {""}))


def word_key(draw: random.Random) -> str:
    """An adjective and a noun, such as "brave-lantern"."""
    return f"{draw.choice(words('adjective'))}-{draw.choice(words('noun'))}"


def number(draw: random.Random, digits: int) -> str:
    """A number of that many digits; the first is not 0."""
    return str(draw.randrange(10 ** (digits - 1), 10**digits))


def identifier(draw: random.Random) -> str:
    """A random UUID (version 4)."""
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def distinct(make: Callable[[], str], count: int, besides: Collection[str] = ()) -> list[str]:
    """That many different texts, none of them among `besides`."""
    made: dict[str, None] = {}
    while len(made) < count:
        text = make()
        if text not in besides:
            made[text] = None
    return list(made)
