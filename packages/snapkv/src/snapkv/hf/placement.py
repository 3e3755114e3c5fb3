"""The devices of a model's parts, which accelerate may spread over several (`device_map`).

accelerate adds a hook to each layer that moves its inputs to its device. The weights of an
offloaded module are on its device only while the module computes.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from snapkv.errors import UnsupportedModelError, wrong


def device_of(module: nn.Module) -> torch.device:
    """Return the device on which a module computes.

    It is the device of the module's first weights. If accelerate has offloaded them, it is the
    device to which its hook moves them; without weights it is the CPU.
    """
    for part in module.modules():
        for weight in part.parameters(recurse=False):
            if weight.device.type != "meta":
                return weight.device
            for hook in _hooks(part):
                return torch.empty(0, device=hook.execution_device).device
    return torch.device("cpu")


def layer_devices(model: Any) -> dict[int, torch.device]:
    """Return the device of each decoder layer that has weights, by the layer's index."""
    found: dict[int, torch.device] = {}
    for module in model.get_decoder().modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and index not in found and any(True for _ in module.parameters()):
            found[index] = device_of(module)
    return found


def weight_of(module: nn.Module, name: str = "weight") -> Tensor:
    """Return a parameter of a module without its gradient.

    Args:
        module: the module that has the parameter itself.
        name: the name of the parameter.

    Returns:
        The values in the shape and dtype of the parameter. They are on the host if accelerate has
        offloaded them.

    Raises:
        UnsupportedModelError: the parameter is on the meta device, and accelerate has no values.
    """
    weight: Tensor = getattr(module, name).detach()
    if weight.device.type != "meta":
        return weight
    for hook in _hooks(module):
        if name in (hook.weights_map or ()):
            held: Tensor = hook.weights_map[name]
            return held.detach()
    raise wrong(
        "model",
        f"the weight {type(module).__name__}.{name} is on the meta device and was not offloaded "
        "by accelerate",
        "Use from_pretrained to load the model",
        UnsupportedModelError,
    )


def _hooks(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks of accelerate that move a module's weights to a device."""
    hook = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):
        if getattr(each, "execution_device", None) is not None:
            yield each
