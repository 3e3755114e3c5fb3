"""Where the parts of a model are that accelerate's hooks spread over devices (`device_map`).

A layer's hook brings what enters it to the layer's device; offloaded weights are there only while
their module computes.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from snapkv.errors import UnsupportedModelError


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes: it has its first weights there, or a hook brings them."""
    for part in module.modules():
        for weight in part.parameters(recurse=False):
            if weight.device.type != "meta":
                return weight.device
            for hook in _hooks(part):
                return torch.empty(0, device=hook.execution_device).device
    return torch.device("cpu")


def layer_devices(model: Any) -> dict[int, torch.device]:
    """The device of each of the decoder's layers that has weights, by its index."""
    found: dict[int, torch.device] = {}
    for module in model.get_decoder().modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and index not in found and any(True for _ in module.parameters()):
            found[index] = device_of(module)
    return found


def weight_of(module: nn.Module, name: str = "weight") -> Tensor:
    """A parameter of a module, without gradient; where it is offloaded, its values on the host."""
    weight: Tensor = getattr(module, name).detach()
    if weight.device.type != "meta":
        return weight
    for hook in _hooks(module):
        if name in (hook.weights_map or ()):
            held: Tensor = hook.weights_map[name]
            return held.detach()
    raise UnsupportedModelError(
        f"model: expected weights that are there or that accelerate has offloaded, got "
        f"{type(module).__name__}.{name} on the meta device; load the model with from_pretrained"
    )


def _hooks(module: nn.Module) -> Iterator[Any]:
    """Those of accelerate's that bring a module's weights to a device."""
    hook = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):
        if getattr(each, "execution_device", None) is not None:
            yield each
