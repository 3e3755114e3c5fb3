"""Cutting the middle out of a prompt that is too long, as LongBench does.

Its beginning holds the instructions and its end the question, so both stay.
"""

from typing import Any


def truncated(
    tokenizer: Any, context: str, question: str, max_prompt_tokens: int
) -> tuple[str, str]:
    """Context and question of a prompt without its middle, or as they are where that fits.

    The prompt is read with the tokenizer's special tokens; of its ids the first and the last half
    of `max_prompt_tokens` are turned into text again and joined. Where the question alone is longer
    than a half, its beginning is cut off too.
    """
    ids = _encode(tokenizer, context + question)
    if len(ids) <= max_prompt_tokens:
        return context, question
    half = max_prompt_tokens // 2
    head, tail = (
        tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:])
    )
    place = len(head) + _start_of(_as_decoded(tokenizer, question), tail)
    text = head + tail
    return text[:place], text[place:]


def _start_of(question: str, tail: str) -> int:
    """Where a question begins that a text ends with, or 0 where the text is only a part of it.

    White space is not compared: what a tokenizer gives back of it depends on what stands before.
    """
    letters = sum(not character.isspace() for character in question)
    place = len(tail)
    while letters and place:
        place -= 1
        letters -= not tail[place].isspace()
    return place


def _as_decoded(tokenizer: Any, text: str) -> str:
    """The text as the tokenizer gives it back, which may know some characters by others."""
    decoded: str = tokenizer.decode(_encode(tokenizer, text), skip_special_tokens=True)
    return decoded


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, truncation=False, verbose=False)["input_ids"]
    return ids
