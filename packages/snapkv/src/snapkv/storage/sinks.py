"""Attention sinks that are numbered by their place in the cache: moved on, behind a gap."""

from collections.abc import Callable

import torch
from torch import Tensor


def move_sinks(
    keys: Tensor,
    sink_tokens: int,
    gap: Tensor,
    rotation: Callable[[Tensor, Tensor], Tensor],
    before: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor]:
    """Turn the first keys, in place, as if their tokens stood right before those that follow them.

    They always turn from their original keys, so that rounding does not add up. All other keys stay
    as they are, bit for bit.

    Args:
        keys: (B, H, S, D).
        sink_tokens: how many of the first keys.
        gap: (B,) int64, how many tokens of each row have been dropped behind them.
        rotation: turns keys on by a number of positions.
        before: what this returned the last time, or twice None.

    Returns:
        (B, H, sinks, D) the keys as they were first, and (B, 1, 1, 1) bool, whether a row's sinks
        stand at other positions than their own.
    """
    moved = (gap > 0)[:, None, None, None]
    sinks = keys[..., :sink_tokens, :].clone()
    original, were_moved = before
    if original is not None and were_moved is not None:
        sinks = torch.where(were_moved, original, sinks)
    turned = rotation(sinks, gap[:, None].expand(-1, sink_tokens)).to(sinks.dtype)
    keys[..., :sink_tokens, :] = torch.where(moved, turned, sinks)
    return sinks, moved
