"""What a person or a document says is read as text, even where it names a control token.

A chat template writes words, such as <|im_end|>, that become control tokens wherever they are.
In a document they would end its message and begin another one. So such words are quoted before a
template gets the text: a mark stands within each, templates copy it, and the tokenizer is handed
the pieces between marks, none of which holds a control word of the content. Text without such words
is one piece.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from snapkv.errors import wrong

_MARK = "\ufdd0"
"""No character: Unicode leaves it to programs. Where content has one, it is written twice."""

_SAMPLE = "a text"


def control_words(tokenizer: Any) -> dict[str, int]:
    """Words that are one token wherever they stand, and that token.

    They are the special tokens, and what else the chat template writes of the words that were added
    to the vocabulary: some families do not call the tokens special that begin their turns.
    """
    template = str(tokenizer.chat_template or "")
    return {
        word: token
        for token, added in tokenizer.added_tokens_decoder.items()
        if len((word := str(added)).strip()) > 1
        and (added.special or (word in template and not word.isalnum()))
    }


def quoted(tokenizer: Any, content: str) -> str:
    """Content as a template may have it: marks stand within its control words."""
    content = content.replace(_MARK, 2 * _MARK)
    words = [re.escape(word) for word in control_words(tokenizer) if word in content]
    if not words:
        return content
    return re.sub(f"(?={'|'.join(words)})(.)", rf"\1{_MARK}", content, flags=re.DOTALL)


def unquoted(written: str) -> tuple[str, tuple[int, ...]]:
    """A text that holds quoted content, without the marks; and before which characters they were.

    The places are ascending.
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
    """The tokens of a text, none of which lies over a cut; and where each is in it.

    Args:
        tokenizer: of transformers.
        text: what `unquoted` gives, or a beginning of it.
        cuts: ascending; those after the text's end count for nothing.
        special_tokens: whether those stand around it that the tokenizer puts around every text.
        offsets: whether to say where each token begins and ends, which a fast tokenizer knows; a
            token that is around the text has (0, 0).

    Raises:
        InvalidArgumentError: the tokenizer makes a control token of what is no control word as it
            stands in the text, for instance after it has normalized it.
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
    """The tokens of content by itself."""
    return tokenized(tokenizer, *unquoted(quoted(tokenizer, content)))[0]


def special_tokens_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer puts before and after every text."""
    whole = tokenizer(_SAMPLE)["input_ids"]
    plain = tokenizer(_SAMPLE, add_special_tokens=False)["input_ids"]
    for place in range(len(whole) - len(plain) + 1):
        if whole[place : place + len(plain)] == plain:
            return whole[:place], whole[place + len(plain) :]
    return [], []


def control_tokens(tokenizer: Any, ids: Sequence[int]) -> int:
    """How many of these tokens are control tokens; one for what is unknown is none."""
    control = set(control_words(tokenizer).values()) - {tokenizer.unk_token_id}
    return sum(map(control.__contains__, ids))


def _require_as_written(tokenizer: Any, pieces: Sequence[str], ids: Sequence[int]) -> None:
    """Refuse control tokens beyond the control words that are in the pieces."""
    written = sum(piece.count(word) for word in control_words(tokenizer) for piece in pieces)
    if control_tokens(tokenizer, ids) > written:
        raise wrong(
            "text",
            "the tokenizer turns other words of it than the model's control words into control "
            "tokens",
            "Remove those words from the text",
        )
