"""Which tokens of a chat's prompt belong to the question. This module does not import vLLM.

The vocabulary tells which bytes each token stands for. If the bytes of the last tokens are the end
of the prompt's text, the place of each token in the text is known, and nothing has to be tokenized
again.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from snapkv.policies.default import MOST_CHAT_VOTERS

_BYTE = re.compile("<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


def count_question_tokens(
    messages: Sequence[Mapping[str, Any]], text: str, ids: Sequence[int], tokenizer: Any
) -> int | None:
    """Return how many of the last tokens of a chat's prompt belong to the question or follow it.

    The question is the last text in the last message of a user. If it stands in the prompt several
    times, the last place counts.

    Args:
        messages: the messages of the chat.
        text: the prompt as text.
        ids: the prompt as token ids.
        tokenizer: the tokenizer of the model.

    Returns:
        The number of tokens; None if there is no question or it is not in `text`, if it has more
        than `MOST_CHAT_VOTERS` tokens to the end of the prompt, or if the tokens cannot be placed
        in the text; see `count_tokens_from`.
    """
    contents = (one.get("content") for one in reversed(messages) if one.get("role") == "user")
    content = next(contents, None)
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in reversed(parts) if isinstance(part, Mapping)]
    question = next((one.strip() for one in texts if isinstance(one, str) and one.strip()), None)
    place = -1 if question is None else text.rfind(question)
    return None if place < 0 else count_tokens_from(tokenizer, text, ids, place, MOST_CHAT_VOTERS)


def count_tokens_from(
    tokenizer: Any, text: str, ids: Sequence[int], place: int, most: int
) -> int | None:
    """Return how many of the last tokens cover the text from the character `place` to its end.

    Args:
        tokenizer: the tokenizer of the model.
        text: the text that `ids` encode.
        ids: the token ids.
        place: the first character to cover, before the end of the text.
        most: the largest result.

    Returns:
        The number of tokens. None if it is above `most`, if there are no ids, if the tokenizer is
        not a fast one, or if the bytes of the last tokens are not known or are not the end of the
        text.
    """
    if not (ids and getattr(tokenizer, "is_fast", False)):
        return None
    pieces = _token_bytes(_vocabulary(tokenizer), ids[-most:])
    if pieces is None or len(text) - place > sum(map(len, pieces)):
        return None
    tail = text[place:].encode()
    if not b"".join(pieces).endswith(tail):
        return None
    reach = accumulate(map(len, reversed(pieces)))
    return next(number for number, size in enumerate(reach, 1) if size >= len(tail))


def _token_bytes(vocabulary: Sequence[bytes], ids: Sequence[int]) -> list[bytes] | None:
    """Return the bytes that each token stands for. The result is None if the bytes of some token
    are not known. There must be at least one id.
    """
    if not 0 <= min(ids) <= max(ids) < len(vocabulary):
        return None
    pieces = [vocabulary[one] for one in ids]
    return pieces if all(pieces) else None


@functools.cache
def _vocabulary(tokenizer: Any) -> Sequence[bytes]:
    """Return the bytes that every token of the vocabulary stands for, by its id, so that the result
    is as long as the largest id plus 1. They are empty for a token whose bytes are not known and
    for an unused id. The result is cached.
    """
    from tokenizers.decoders import ByteLevel

    backend = tokenizer.backend_tokenizer
    spelt = _byte_level_bytes if isinstance(backend.decoder, ByteLevel) else _sentencepiece_bytes
    numbers = backend.get_vocab(with_added_tokens=True)
    found = [b""] * (max(numbers.values(), default=-1) + 1)
    for token, number in numbers.items():
        found[number] = spelt(token)
    for number, added in backend.get_added_tokens_decoder().items():
        found[number] = added.content.encode()
    return found


def _sentencepiece_bytes(token: str) -> bytes:
    """Return the bytes of a token from a SentencePiece vocabulary, in which `<0x41>` stands for one
    byte.
    """
    byte = _BYTE.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.replace(_SPACE, " ").encode()


def _byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a token from a byte-level vocabulary such as that of GPT-2, in which each
    letter stands for one byte. They are empty if the token has another letter.
    """
    return bytes(_LETTERS[one] for one in token) if _LETTERS.keys() >= set(token) else b""


def _byte_letters() -> dict[str, int]:
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in shown]
    return {chr(one): one for one in shown} | {chr(0x100 + n): one for n, one in enumerate(hidden)}


_LETTERS = _byte_letters()
