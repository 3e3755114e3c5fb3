"""How much fits: the longest text whose prompt stays within a length."""

from collections.abc import Callable
from typing import Any

from snapkv_lab.evaluate.sample import Sample

Build = Callable[[int], Sample]
"""Makes a sample whose text has that many parts: lines, words, documents; always the same one."""


def fitted(
    build: Build, tokenizer: Any, length: int, *, least: int, most: int, hint: int | None = None
) -> tuple[Sample, int] | None:
    """The sample with as many parts as fit, and how many; None where not even `least` fit.

    Args:
        build: makes the sample of a given size.
        tokenizer: the model's.
        length: tokens that prompt and answer may take together, as `needed_tokens` counts them.
        least: parts below which there is no such sample.
        most: parts that there are.
        hint: how many fitted in a sample like this one; saves trying small ones.
    """
    parts = least
    if hint is None:
        while parts < most and needed_tokens(build(parts), tokenizer) <= length:
            parts = 2 * parts + 1
    else:
        parts = hint + hint // 8 + 1
    parts = max(least, min(parts, most))
    while True:
        sample = build(parts)
        used = needed_tokens(sample, tokenizer)
        if used <= length:
            return sample, parts
        if parts <= least:
            return None
        # A prompt holds something beside its parts, so that taking them away in proportion to the
        # excess comes down on the largest count that fits, as far as they are of one length.
        parts = max(least, min(parts - 1, parts * length // used))


def needed_tokens(sample: Sample, tokenizer: Any) -> int:
    """Tokens of prompt and answer together, chat template included where the tokenizer has one."""
    prompt = sample.prompt(tokenizer, "tokenizer", "visible")
    return int(prompt.token_ids(tokenizer).shape[1]) + sample.settings.max_new_tokens


def percents(count: int) -> list[int]:
    """That many whole percents from 0 to 100, evenly; the middle for one."""
    return [50] if count == 1 else [round(100 * i / (count - 1)) for i in range(count)]
