"""Sharing a budget fairly: every segment of a prompt keeps the same fraction of itself."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from snapkv import ops
from snapkv.errors import InvalidArgumentError, InvalidTypeError
from snapkv.policies.budget import largest_remainder
from snapkv.policies.spans import Span, require_span


@dataclass(frozen=True)
class Segments:
    """Named parts of a prompt; what lies in none of them is one more.

    Attributes:
        parts: the half-open span of every name, ascending; none overlaps another.
    """

    parts: tuple[tuple[str, Span], ...]

    @classmethod
    def of(cls, argument: str, given: object) -> Self:
        """The segments that a user has given."""
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise InvalidTypeError(
                f"{argument}: expected names and their spans, got {given!r} of type "
                f'{type(given).__name__}; pass for instance {{"rules": (0, 200)}}'
            )
        named = [(name, require_span(f"{argument}[{name!r}]", given[name])) for name in given]
        parts = sorted(named, key=lambda part: part[1])
        for (before, span), (name, following) in itertools.pairwise(parts):
            if following[0] < span[1]:
                raise InvalidArgumentError(
                    f"{argument}: expected segments that do not overlap, got {before!r} at {span} "
                    f"and {name!r} at {following}; a token counts in one of them"
                )
        return cls(tuple(parts))

    def tokens(self, prefix_tokens: int) -> list[int]:
        """How many of the first positions lie in each segment, and last in none."""
        inside = [max(0, min(stop, prefix_tokens) - start) for _, (start, stop) in self.parts]
        return [*inside, prefix_tokens - sum(inside)]

    def indices(self, positions: Tensor) -> Tensor:
        """Which segment positions lie in, counted as in `tokens`: int64; -1 below 0."""
        found = torch.full_like(positions, len(self.parts))
        for index, (_, (start, stop)) in enumerate(self.parts):
            found.masked_fill_((positions >= start) & (positions < stop), index)
        return found.masked_fill_(positions < 0, -1)


def fair_shares(tokens: Sequence[int], total: int, least: Sequence[int]) -> list[int]:
    """Share `total` slots out in proportion to `tokens`, each share between `least` and those.

    `total` lies between the sum of `least` and that of `tokens`; the result adds up to it.
    """
    shares, open_ = list(least), [index for index, count in enumerate(tokens) if count]
    while open_:
        rest = total - sum(least[index] for index in range(len(tokens)) if index not in open_)
        whole = sum(tokens[index] for index in open_)
        quotas = {index: rest * tokens[index] / whole for index in open_}
        enough = [index for index in open_ if quotas[index] >= least[index]]
        if len(enough) == len(open_):
            rounded = largest_remainder(list(quotas.values()), rest)
            for index, share in zip(open_, rounded, strict=True):
                shares[index] = share
            break
        open_ = enough
    return shares


def keep_fair(
    scores: Tensor,
    keep_tokens: Sequence[int],
    prefix_lengths: Sequence[int],
    segments: Segments,
    must_stay: Tensor | None,
) -> Tensor:
    """The best of every segment, as many as its share; otherwise as `ops.keep_best`.

    Args:
        scores: (B, H, P) float32, over the prefixes of rows of which nothing was dropped.
        keep_tokens: B numbers, how many each row keeps.
        prefix_lengths: B numbers, how many each row has; before them stand its pads.
        segments: which share.
        must_stay: (B, 1 or H, P) bool, the same in all heads; they count in their segments.

    Returns:
        (B, H, max(keep_tokens)) int64, ascending, after -1 where a row keeps fewer.
    """
    pads = torch.tensor([scores.shape[-1] - own for own in prefix_lengths], device=scores.device)
    slots = torch.arange(scores.shape[-1], device=scores.device)
    where = segments.indices(slots - pads[:, None])[:, None]
    count = len(segments.parts) + 1
    least = [[0] * count for _ in keep_tokens]
    if must_stay is not None:
        inside = [(must_stay[:, :1] & (where == index)).sum(dim=(1, 2)) for index in range(count)]
        least = torch.stack(inside, dim=1).tolist()
    shares = [
        fair_shares(segments.tokens(own), kept, row)
        for own, kept, row in zip(prefix_lengths, keep_tokens, least, strict=True)
    ]
    best = [
        ops.keep_best(
            scores.masked_fill(where != index, float("-inf")),
            [row[index] for row in shares],
            protected=None if must_stay is None else must_stay & (where == index),
        )
        for index in range(count)
    ]
    merged = torch.cat(best, dim=-1).sort(dim=-1).values
    return merged[..., merged.shape[-1] - max(keep_tokens) :]
