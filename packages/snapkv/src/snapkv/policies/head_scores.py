"""Scores of heads: a number for every KV head of every layer, given as such or in a file."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snapkv.errors import InvalidArgumentError, InvalidTypeError

HeadScores = tuple[tuple[float, ...], ...]
"""A row of numbers for every layer, one for each of its KV heads."""

MOST_BYTES = 1 << 20
"""Of a file; the largest models need a few ten thousand."""


def head_scores(argument: str, given: object) -> HeadScores:
    """Scores as a user has given them, rows of numbers or the name of a file, checked."""
    if isinstance(given, str | os.PathLike):
        return scores_in(argument, Path(given))
    if not isinstance(given, Sequence):
        raise InvalidTypeError(
            f"{argument}: expected rows of numbers, a layer each, or the name of a file, got "
            f"{given!r} of type {type(given).__name__}; pass for instance ((1, 0), (0, 1))"
        )
    return _checked(argument, given, "the argument")


def scores_in(argument: str, path: Path) -> HeadScores:
    """The scores in a file, with a row for every layer and a number for every KV head.

    Either JSON: the rows, or an object that has them under "scores", as `snapkv study heads` writes
    it. Or numbers with tabs between them, a line for each layer, as the authors publish theirs in
    ``full_attention_heads.tsv``.

    Raises:
        InvalidArgumentError: no such file, a larger one than 1 MiB, or one with something else.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InvalidArgumentError(
            f"{argument}: expected a file with a score for every head, got {str(path)!r}, which "
            f"cannot be read ({error.strerror}); write one with snapkv study heads"
        ) from error
    if len(data) > MOST_BYTES:
        raise InvalidArgumentError(
            f"{argument}: expected a file of at most {MOST_BYTES:,} bytes, got {str(path)!r} with "
            "more; pass one with a number for every layer and KV head"
        )
    try:
        rows = _rows(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        rows = None
    return _checked(argument, rows, repr(str(path)))


def _rows(text: str) -> Any:
    """What JSON says are the rows, or the numbers of a table; a ValueError where it is neither."""
    if text.lstrip()[:1] in ("{", "["):
        found = json.loads(text)
        return found.get("scores") if isinstance(found, dict) else found
    return [[float(part) for part in line.split()] for line in text.splitlines() if line.strip()]


def _checked(argument: str, rows: Any, place: str) -> HeadScores:
    """Rows of finite numbers, as many in each."""
    is_table = isinstance(rows, list | tuple) and all(isinstance(row, list | tuple) for row in rows)
    if not is_table or not all(_is_score(value) for row in rows for value in row):
        raise InvalidArgumentError(
            f"{argument}: expected rows of finite numbers, a row for every layer and a number for "
            f"every KV head, got something else in {place}; write one with snapkv study heads"
        )
    lengths = sorted({len(row) for row in rows})
    if len(lengths) != 1 or not lengths[0]:
        raise InvalidArgumentError(
            f"{argument}: expected as many numbers in every row, at least one, got rows of "
            f"{' and '.join(map(str, lengths)) or 'none'} in {place}; pass one for every KV head"
        )
    return tuple(tuple(float(value) for value in row) for row in rows)


def _is_score(value: object) -> bool:
    """Whether it is a finite number; a truth value counts as 1 or 0."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer beyond what a float can hold
        return False
