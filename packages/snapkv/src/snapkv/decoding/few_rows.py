"""Matrix products of a few rows on a processor, at about the price of one.

A product of one row reads the weights once, at the speed of memory. For two to five rows torch's
float32 kernel takes about twice as long, which is what drafts are meant to save; the same product
turned around, weights first, does not. Narrower types have kernels of their own that are as fast.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter

MOST_ROWS = 5
"""Beyond so many rows torch's own product is the faster one."""


@contextlib.contextmanager
def fast_few_rows(model: Module) -> Iterator[None]:
    """Within this block the model's linear layers read few rows as fast as they can."""
    slow = [
        module
        for module in model.modules()
        if type(module) is Linear and _is_slow(module.weight) and "forward" not in vars(module)
    ]
    for module in slow:
        vars(module)["forward"] = functools.partial(_forward, module)
    try:
        yield
    finally:
        for module in slow:
            vars(module).pop("forward", None)


def _is_slow(weight: Tensor) -> bool:
    plain = type(weight) is Parameter and type(weight.data) is Tensor
    return plain and weight.device.type == "cpu" and weight.dtype == torch.float32


def _forward(module: Linear, states: Tensor) -> Tensor:
    """(..., N): states (..., K) through a weight (N, K), as `Linear.forward` does."""
    rows = states.numel() // module.in_features
    usual = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    if usual or not 1 < rows <= MOST_ROWS or states.dtype != module.weight.dtype:
        return Linear.forward(module, states)
    product = torch.mm(module.weight, states.reshape(rows, -1).T).T
    if module.bias is not None:
        product = product + module.bias
    return product.contiguous().view(*states.shape[:-1], module.out_features)
