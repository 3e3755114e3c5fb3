"""Attention to quantized heads, and which implementation runs."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from snapkv.ops.choice import implementation
from snapkv.ops.codes import blocked, reference
from snapkv.ops.codes.coding import Codes
from snapkv.ops.codes.layout import BlockLayout
from snapkv.ops.ragged.api import kernel_obstacle
from snapkv.ops.ragged.inputs import TailInputs

CodedImplementation = Literal["auto", "reference", "blocked", "triton"]

_IN_TORCH: dict[str, Callable[..., Tensor]] = {
    "reference": reference.coded_attention,
    "blocked": blocked.coded_attention,
}


def coded_attention(
    inputs: TailInputs,
    keys: Codes,
    values: Codes,
    layout: BlockLayout,
    *,
    impl: CodedImplementation = "auto",
) -> Tensor:
    """Compute the attention of the last tokens to heads whose keys and values are quantized.

    The tail, which all heads share and which is exact, is attended to as well.

    Args:
        inputs: the queries, the tail in the model's dtype, and how scores are computed.
        keys: M blocks of codes, in groups along tokens.
        values: M blocks of codes, in groups along channels; they may have other bits.
        layout: which head each block belongs to.
        impl: "reference", which decodes everything; "blocked", a few products with the integers as
            they are; "triton", a kernel for CUDA. "auto" takes the kernel if it can run, else
            "blocked".

    Returns:
        (B, Hq, Q, Dv), in the dtype of the tail's values.

    Raises:
        InvalidArgumentError: `impl` is unknown or cannot run here.
    """
    attend = implementation(
        "coded_attention",
        impl,
        inputs.queries,
        _IN_TORCH,
        fitting="blocked",
        kernels="snapkv.ops.codes.triton",
        obstacle=lambda: _obstacle(inputs, values),
    )
    return attend(inputs, keys, values, layout)


def _obstacle(inputs: TailInputs, values: Codes) -> str | None:
    queries = inputs.queries
    if queries.dtype == torch.float32 and max(queries.shape[-1], values.channels) > 64:
        return "with float32 heads of more than 64 channels, which fill its registers"
    return kernel_obstacle(inputs)
