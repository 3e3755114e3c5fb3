"""Which layer of a model a cache's layer is, and by which rule it goes on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from snapkv.cache.paging import PageRecall
from snapkv.policies.fair import Segments
from snapkv.policies.spans import Spans

Rotation = Callable[[Tensor, Tensor], Tensor]
"""Turns (B, H, N, D) states on by (B, N) positions, float32."""


@dataclass(frozen=True, kw_only=True)
class LayerIdentity:
    """Which layer of the model it is, and the parts of that layer that the policy needs.

    Attributes:
        layer_idx: index of the layer in the model.
        depth: how many compressed layers come before it.
        num_layers: how many compressed layers the model has.
        rotation: turns keys on by positions; None where the policy does not need it.
        output_projection: the module behind attention; None where the policy does not need it.
    """

    layer_idx: int
    depth: int = 0
    num_layers: int = 1
    rotation: Rotation | None = None
    output_projection: Any = None


@dataclass(frozen=True, kw_only=True)
class TurnRule:
    """Every later prompt brings the layer back to its budget.

    Attributes:
        refresh_every: choose again after as many tokens behind the prompt; None for never.
        pages: what of the evicted tokens each step attends to; None for nothing.
    """

    refresh_every: int | None = None
    pages: PageRecall | None = None


@dataclass(frozen=True, kw_only=True)
class SpanRule:
    """What is said of spans of positions, counted over the whole conversation, pads left out.

    Attributes:
        protect: what every layer and head keeps, or None.
        fair: what shares the budget, or None.
    """

    protect: Spans | None = None
    fair: Segments | None = None
