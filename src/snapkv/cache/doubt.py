"""What a layer's attention left open at the end of a prompt, for `snapkv.faithfulness` to judge."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """How far a layer's attention is from what the votes take it for.

    Attributes:
        found: (3,) float32, on the layer's device: the norm of the difference between both outputs,
            that of the expected one, and the largest score of the query.
        tolerance: what the dtype explains of the relative difference.
        epsilon: how far scores are rounded, relative to their size.
        attention: name of the attention module's class.
        layer_idx: index of the layer in the model.
    """

    found: Tensor
    tolerance: float
    epsilon: float
    attention: str
    layer_idx: int
