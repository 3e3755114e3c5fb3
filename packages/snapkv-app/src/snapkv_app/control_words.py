"""Prevent the text of messages and documents from being read as control tokens.

A chat template writes words, such as <|im_end|>, that become control tokens wherever they are. In a
document they would end its message and begin another one. So such words are quoted before a
template gets the text: a mark is inserted into each of them, templates copy it, and the tokenizer
receives the pieces between marks, none of which contains a control word of the content. Text
without such words is one piece.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from snapkv.errors import wrong

_MARK = "\ufdd0"
"""A code point that is not a character; one that occurs in the content is doubled."""

_SAMPLE = "a text"


def control_words(tokenizer: Any) -> dict[str, int]:
    """Return the words that the tokenizer always turns into one control token.

    They are the special tokens, and the added words that the chat template contains, because in
    some model families the tokens that begin a turn are not special. Words with a single visible
    character are left out, and so are words of letters and digits alone that are not special.

    Returns:
        A new dict of the id of each control token, by its word.
    """
    template = str(tokenizer.chat_template or "")
    return {
        word: token
        for token, added in tokenizer.added_tokens_decoder.items()
        if len((word := str(added)).strip()) > 1
        and (added.special or (word in template and not word.isalnum()))
    }


def quoted(tokenizer: Any, content: str) -> str:
    """Return `content` with a mark inside every control word, for a chat template.

    The mark comes after the first character of the word. A mark that the content itself contains
    is doubled. `unquoted` restores the content.
    """
    content = content.replace(_MARK, 2 * _MARK)
    words = [re.escape(word) for word in control_words(tokenizer) if word in content]
    if not words:
        return content
    return re.sub(f"(?={'|'.join(words)})(.)", rf"\1{_MARK}", content, flags=re.DOTALL)


def unquoted(written: str) -> tuple[str, tuple[int, ...]]:
    """Remove the marks of `quoted` from a text that contains quoted content.

    Returns:
        The text with the content as it was before `quoted`, and the ascending positions of the
        characters that had a mark before them.
    """
    text: list[str] = []
    cuts, length = [], 0
    for part in re.split(f"({_MARK}{_MARK}?)", written):
        if part == _MARK:
            cuts.append(length)
            continue
        text.append(_MARK if part == 2 * _MARK else part)
        length += len(text[-1])
    return "".join(text), tuple(cuts)


def tokenized(
    tokenizer: Any,
    text: str,
    cuts: Sequence[int] = (),
    *,
    special_tokens: bool = False,
    offsets: bool = False,
) -> tuple[list[int], list[tuple[int, int]]]:
    """Tokenize a text such that no token extends over a cut.

    Args:
        tokenizer: a tokenizer of transformers.
        text: the text that `unquoted` returns, or its beginning.
        cuts: the ascending positions that it returns; those after the end of the text are ignored.
        special_tokens: whether to add the tokens that the tokenizer puts around every text.
        offsets: whether to return where each token begins and ends, which needs a fast tokenizer.

    Returns:
        The tokens; and their offsets in `text`, which are (0, 0) for special tokens around the
        text, or an empty list if `offsets` is False.

    Raises:
        InvalidArgumentError: the tokenizer turns something that is not a control word into a
            control token, for example after normalizing it.
    """
    before, after = special_tokens_around(tokenizer) if special_tokens else ([], [])
    places = [0, *(cut for cut in cuts if cut < len(text)), len(text)]
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for start, stop in pairwise(places):
        asked = {"return_offsets_mapping": True} if offsets else {}
        found = tokenizer(
            text[start:stop],
            add_special_tokens=False,
            verbose=False,  # the length is checked against the model, with a better message
            **asked,
        )
        ids += found["input_ids"]
        spans += [(start + begin, start + end) for begin, end in found.get("offset_mapping", ())]
    _require_as_written(tokenizer, [text[start:stop] for start, stop in pairwise(places)], ids)
    if offsets:
        spans = [*[(0, 0)] * len(before), *spans, *[(0, 0)] * len(after)]
    return [*before, *ids, *after], spans


def content_ids(tokenizer: Any, content: str) -> list[int]:
    """Return the token ids of `content`, in which control words become ordinary tokens.

    Neither a chat template nor special tokens are put around it.

    Raises:
        InvalidArgumentError: the tokenizer turns words that are not control words into control
            tokens.
    """
    return tokenized(tokenizer, *unquoted(quoted(tokenizer, content)))[0]


def special_tokens_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids of the tokens that a tokenizer puts before every text, and after every text.

    Both lists are empty if it puts none, or if a sample does not show which ones it puts.
    """
    complete = tokenizer(_SAMPLE)["input_ids"]
    plain = tokenizer(_SAMPLE, add_special_tokens=False)["input_ids"]
    for place in range(len(complete) - len(plain) + 1):
        if complete[place : place + len(plain)] == plain:
            return complete[:place], complete[place + len(plain) :]
    return [], []


def control_tokens(tokenizer: Any, ids: Sequence[int]) -> int:
    """Count the control tokens among `ids`, without the token for unknown words."""
    control = set(control_words(tokenizer).values()) - {tokenizer.unk_token_id}
    return sum(map(control.__contains__, ids))


def _require_as_written(tokenizer: Any, pieces: Sequence[str], ids: Sequence[int]) -> None:
    """Raise if the tokens contain more control tokens than the pieces contain control words.

    Raises:
        InvalidArgumentError: there are more control tokens.
    """
    written = sum(piece.count(word) for word in control_words(tokenizer) for piece in pieces)
    if control_tokens(tokenizer, ids) > written:
        raise wrong(
            "text",
            "the tokenizer turns some of its words into control tokens, although they are not the "
            "model's control words",
            "Remove those words from the text",
        )
