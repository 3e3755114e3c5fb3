"""What a layer's attention left open at the end of a prompt, for `snapkv.faithfulness` to judge."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """How far a layer's attention is from what the votes take it for.

    Attributes:
        difference: () float32, relative to the expected output.
        tolerance: () float32, what rounding explains.
        attention: name of the attention module's class.
        layer_idx: index of the layer in the model.
    """

    difference: Tensor
    tolerance: Tensor
    attention: str
    layer_idx: int
