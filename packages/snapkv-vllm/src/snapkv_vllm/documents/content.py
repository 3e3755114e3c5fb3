"""What a document says is text: no control word in it opens a turn, or ends one.

A tokenizer takes control words (such as <|im_end|>) for what they mean wherever they stand. In a
document each is put into the tokens that spell it.
"""

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from snapkv.control_words import control_words as words_of_template
from snapkv_vllm.agents.messages import Marked, located
from snapkv_vllm.agents.places import tokens_of
from snapkv_vllm.names import RefusedError, shown, wrong


def spelt_out(
    tokenizer: Any, ids: Sequence[int], inside: Sequence[bool] | None = None
) -> list[int]:
    """Tokens with control words in their letters, all or those that are text, as `inside` says."""
    words, found = control_words(tokenizer), list[int]()
    for number, one in enumerate(ids):
        is_text = inside is None or inside[number]
        found += _letters(tokenizer, words[one]) if is_text and one in words else [one]
    return found


def chat_spelt_out(
    tokenizer: Any,
    rendered: tuple[str | None, Sequence[int]],
    with_marks: tuple[str | None, Sequence[int]],
    marks: Marked,
) -> list[int]:
    """The tokens of a chat with every control word of its texts in letters.

    Args:
        tokenizer: the server's.
        rendered: the chat by the template: as text, None where that is not known, and its tokens.
        with_marks: the same with a mark in the place of every text.
        marks: those texts, and the messages that were rendered so.
    """
    (text, ids), (marked_text, marked_ids) = rendered, with_marks
    words = control_words(tokenizer)
    elsewhere = json.dumps(marks.messages, ensure_ascii=False)
    for word in words.values():
        if word in elsewhere:
            raise _unclear(f"'{shown(word)}' outside of them")
    if sum(one in words for one in ids) == sum(one in words for one in marked_ids):
        return list(ids)
    tokens = None if text is None else tokens_of(tokenizer, text, ids)
    if tokens is None or marked_text is None:
        raise _unclear("a tokenizer that does not say where they are")
    try:
        spans = sorted(located(str(text), marked_text, marks.pieces).values())
    except RefusedError:
        raise _unclear("a chat template that shows texts otherwise than as they are") from None
    inside = [False] * len(ids)
    for span in spans:
        first, end = tokens.inside(span)
        inside[first:end] = [True] * (end - first)
    return spelt_out(tokenizer, ids, inside)


@functools.cache
def control_words(tokenizer: Any) -> Mapping[int, str]:
    """A tokenizer's own, but for that of what it does not know."""
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if not added:  # Mistral's own reads no text so
        return {}
    unknown = tokenizer.unk_token
    if tokenizer.is_fast:  # GPT-2's stands for nothing that is not known
        unknown = getattr(tokenizer.backend_tokenizer.model, "unk_token", unknown)
    words = words_of_template(tokenizer)
    return {number: word for word, number in words.items() if word != unknown}


def _letters(tokenizer: Any, word: str) -> list[int]:
    ids: list[int] = []
    if tokenizer.is_fast:
        ids = _splitting(tokenizer).encode(word, add_special_tokens=False).ids
    if not ids or control_words(tokenizer).keys() & set(ids):
        raise _unclear(f"'{shown(word)}', which this tokenizer has no letters for")
    return ids


@functools.cache
def _splitting(tokenizer: Any) -> Any:
    """A copy that takes special tokens for text."""
    own = copy.deepcopy(tokenizer.backend_tokenizer)
    own.encode_special_tokens = True
    return own


def _unclear(got: str) -> RefusedError:
    expected = "control words in texts alone, which can be spelt out"
    return wrong("document", expected, got, "leave them out of the document")
