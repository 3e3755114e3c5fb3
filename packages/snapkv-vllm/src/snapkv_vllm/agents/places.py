"""Where the tokens of a prompt lie in its text; no vLLM is needed here.

A vocabulary says which bytes a token stands for. Where those of all tokens are the text's, each
lies where it must, and nothing is tokenized again.
"""

import copy
import functools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from snapkv.policies.spans import Span

_BYTE = re.compile("<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


@dataclass(frozen=True)
class Tokens:
    """The tokens of a text: where each begins and ends, by characters."""

    starts: Sequence[int]
    ends: Sequence[int]

    def inside(self, span: Span) -> Span:
        """Those that lie in a span of characters as a whole; none where the two are the same."""
        first = bisect_left(self.starts, span[0])
        return first, max(first, bisect_right(self.ends, span[1]))

    def around(self, span: Span) -> Span:
        """Those that have a character of it."""
        first = bisect_right(self.ends, span[0])
        return first, max(first, bisect_left(self.starts, span[1]))


def tokens_of(tokenizer: Any, text: str, ids: Sequence[int]) -> Tokens | None:
    """Where the tokens of a text lie, which are these; None where that cannot be told."""
    if not (ids and getattr(tokenizer, "is_fast", False)):
        return None
    return _by_vocabulary(_vocabulary(tokenizer), text, ids) or _tokenized(tokenizer, text, ids)


def tokens_behind(
    tokenizer: Any, text: str, ids: Sequence[int], place: int, most: int
) -> int | None:
    """How many of a text's last tokens, of these, have what stands behind a place in it.

    None where that cannot be told, or they are more than `most`.
    """
    if not (ids and getattr(tokenizer, "is_fast", False)):
        return None
    pieces = _spelt(_vocabulary(tokenizer), ids[-most:])
    if pieces is None or len(text) - place > sum(map(len, pieces)):
        return None
    behind = text[place:].encode()
    if not b"".join(pieces).endswith(behind):
        return None
    reach = accumulate(map(len, reversed(pieces)))
    return next(number for number, size in enumerate(reach, 1) if size >= len(behind))


def _spelt(vocabulary: Sequence[bytes], ids: Sequence[int]) -> list[bytes] | None:
    """What each token stands for; None where one of them is not known."""
    if not 0 <= min(ids) <= max(ids) < len(vocabulary):
        return None
    pieces = [vocabulary[one] for one in ids]
    return pieces if all(pieces) else None


def _by_vocabulary(vocabulary: Sequence[bytes], text: str, ids: Sequence[int]) -> Tokens | None:
    pieces, whole = _spelt(vocabulary, ids), text.encode()
    if pieces is None or b"".join(pieces) != whole:
        return None
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    ends = lengths.cumsum()
    characters = ((np.frombuffer(whole, np.uint8) & 0xC0) != 0x80).cumsum()  # up to every byte
    return Tokens((characters[ends - lengths] - 1).tolist(), characters[ends - 1].tolist())


@functools.cache
def _vocabulary(tokenizer: Any) -> Sequence[bytes]:
    """What every token stands for, if it is spelt in one of the two usual ways."""
    from tokenizers.decoders import ByteLevel

    backend = tokenizer.backend_tokenizer
    spelt = _spelt_bytes if isinstance(backend.decoder, ByteLevel) else _spelt_words
    numbers = backend.get_vocab(with_added_tokens=True)
    found = [b""] * (max(numbers.values(), default=-1) + 1)
    for token, number in numbers.items():
        found[number] = spelt(token)
    for number, added in backend.get_added_tokens_decoder().items():
        found[number] = added.content.encode()
    return found


def _spelt_words(token: str) -> bytes:
    """A byte in brackets, or a text with a sign for the space."""
    byte = _BYTE.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.replace(_SPACE, " ").encode()


def _spelt_bytes(token: str) -> bytes:
    """A letter for every byte, as GPT-2 has them; nothing for what has others."""
    return bytes(_LETTERS[one] for one in token) if _LETTERS.keys() >= set(token) else b""


def _letters() -> dict[str, int]:
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in shown]
    return {chr(one): one for one in shown} | {chr(0x100 + n): one for n, one in enumerate(hidden)}


_LETTERS = _letters()


def _tokenized(tokenizer: Any, text: str, ids: Sequence[int]) -> Tokens | None:
    for special in (False, True):
        found = _own(tokenizer).encode(text, add_special_tokens=special)
        if found.ids == list(ids):
            return Tokens(*zip(*found.offsets, strict=True))
    return None


@functools.cache
def _own(tokenizer: Any) -> Any:
    """A copy, for any thread: the server's own may be told at any time where to truncate."""
    own = copy.deepcopy(tokenizer.backend_tokenizer)
    own.no_truncation()
    own.no_padding()
    return own
