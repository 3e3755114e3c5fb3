"""Tokens that are numbered by their place in the cache: the first ones, moved behind a gap."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from snapkv.rotary import Rotation


@dataclass(frozen=True, kw_only=True)
class MovedSinks:
    """Keys that have been turned to other positions.

    They always turn from their original keys, so that rounding does not add up.

    Attributes:
        keys: (B, H, start, D), as they were before.
        moved: (B, 1, 1, 1) bool, whether a row's sinks stand at other positions than their own.
    """

    keys: Tensor
    moved: Tensor

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> "MovedSinks":
        """The rows that `change` makes of these."""
        return MovedSinks(keys=change(self.keys), moved=change(self.moved))


def move_sinks(
    keys: Tensor, sink_tokens: int, gap: Tensor, rotation: Rotation, before: MovedSinks | None
) -> MovedSinks:
    """Turn the first keys, in place, as if their tokens stood right before those that follow them.

    All other keys stay as they are, bit for bit.

    Args:
        keys: (B, H, S, D).
        sink_tokens: how many of the first keys.
        gap: (B,) int64, how many tokens of each row have been dropped behind them.
        rotation: turns keys on by a number of positions.
        before: what this returned the last time, or None.
    """
    moved = (gap > 0)[:, None, None, None]
    sinks = keys[..., :sink_tokens, :].clone()
    if before is not None:
        sinks = torch.where(before.moved, before.keys, sinks)
    turned = rotation(sinks, gap[:, None].expand(-1, sink_tokens)).to(sinks.dtype)
    keys[..., :sink_tokens, :] = torch.where(moved, turned, sinks)
    return MovedSinks(keys=sinks, moved=moved)
