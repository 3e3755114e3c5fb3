"""Attention to quantized heads that decodes everything first: the specification."""

from torch import Tensor

from snapkv.ops.codes.coding import Codes
from snapkv.ops.codes.layout import BlockLayout
from snapkv.ops.ragged import reference
from snapkv.ops.ragged.inputs import TailInputs
from snapkv.ops.ragged.layout import RaggedLayout


def flat_states(codes: Codes, layout: BlockLayout) -> Tensor:
    """Decode the keys or values of all heads, and return them one head after the other.

    Returns:
        (N, D).
    """
    return codes.decoded().flatten(0, 1).index_select(0, layout.flat)


def coded_attention(inputs: TailInputs, keys: Codes, values: Codes, layout: BlockLayout) -> Tensor:
    """Decode all keys and values, and compute the attention in float32 or wider.

    The arguments are those of `snapkv.ops.coded_attention`.

    Returns:
        (B, Hq, Q, Dv), in the dtype of the tail's values.
    """
    ragged = RaggedLayout(layout.head_tokens, layout.device)
    states = flat_states(keys, layout), flat_states(values, layout)
    return reference.ragged_attention(inputs, *states, ragged)
