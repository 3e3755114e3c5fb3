"""Two pretended devices: tensors that claim to be on a device, with values in host memory.

Every operation runs on the CPU, and an operation on tensors of two devices is refused, as a GPU
would. What needs CUDA itself (streams, kernels, its memory) is not pretended.
"""

import contextlib
import functools

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "pretended"
MOVES = {"_to_copy", "copy_", "lift_fresh"}
INDEXES = {"index", "index_put_", "_index_put_impl_"}  # those of a device take indices of the host
JOINS = {"stack", "cat"}  # others take a single number of the host


class _Backend(_DummyBackendModule):
    def device_count(self):
        return 2


@functools.cache
def device(index=0):
    """The device of that number; from the first call on 0 is this process's accelerator."""
    if not index:
        _setup_privateuseone_for_python_backend(NAME, _Backend())
    return torch.device(NAME, index)


class Pretended(torch.Tensor):
    """A tensor on a device whose values are in `held`, on the CPU."""

    @staticmethod
    def __new__(cls, held, on):
        pretended = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=on,
        )
        pretended.held = held
        return pretended

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        return run(function, arguments, options or {})

    __torch_function__ = torch._C._disabled_torch_function_impl

    def as_subclass(self, cls):
        made = Pretended if cls is torch.Tensor else _on_a_device(cls)
        return Pretended.__new__(made, self.held, self.device)


@functools.cache
def _on_a_device(cls):
    """A subclass of tensors whose values are on such a device."""
    return type(cls.__name__, (cls, Pretended), {})


def run(function, arguments, options):
    """Run an operation of PyTorch on the values, and say where its results are."""
    name = function.overloadpacket.__name__
    there = [t for t in _tensors(arguments, options) if isinstance(t, Pretended)]
    must_match = arguments
    if name in INDEXES and isinstance(arguments[0], Pretended):
        on_host = [t for t in _tensors(arguments[1]) if not isinstance(t, Pretended)]
        must_match = [t for t in _tensors(arguments) if not any(t is each for each in on_host)]
    known = [t for t in _tensors(must_match, options) if isinstance(t, Pretended)]
    here = [t for t in _tensors(must_match, options) if not isinstance(t, Pretended)]
    here = [t for t in here if t.dim() or name in JOINS]
    if len({t.device for t in known} | {t.device for t in here}) > 1 and name not in MOVES:
        raise RuntimeError(f"{function}: expected all tensors on one device, but got several")
    on = there[0].device if there else None
    asked = options.get("device")
    if asked is not None:
        options = options | {"device": torch.device("cpu")}
        asked = torch.device(asked)
        on = device(asked.index or 0) if asked.type == NAME else None
    if name == "copy_":
        on = arguments[0].device if isinstance(arguments[0], Pretended) else None
    held, options = tree_map(_held, arguments), tree_map(_held, options)
    if name == "histc":  # of integers a GPU only; mixtures of experts count with it there
        held = (held[0].float(), *held[1:])
    result = function(*held, **options)

    def wrap(value):
        if not isinstance(value, torch.Tensor) or on is None:
            return value
        same = [t for t in there if t.held is value]
        return same[0] if same else Pretended(value, on)

    return tree_map(wrap, result)


def _tensors(*values):
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]


def _held(value):
    return value.held if isinstance(value, Pretended) else value


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        return run(function, arguments, options or {})


class _Functions(TorchFunctionMode):
    """What PyTorch does before it comes to operations."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = dict(options or {})
        if function in (torch.Tensor.tolist, torch.Tensor.data_ptr):
            return function(_held(arguments[0]))
        if function in (torch.tensor, torch.as_tensor) and options.get("device") is not None:
            device = options.pop("device")
            return function(*arguments, **options).to(device)
        if function is torch.Tensor.__getitem__ and isinstance(arguments[1], list):
            arguments = (arguments[0], torch.tensor(arguments[1], dtype=torch.int64))
        return function(*arguments, **options)


@contextlib.contextmanager
def pretending():
    """Inside, tensors can be made on the device and moved there and back."""
    there = device(0)
    with _Operations(), _Functions():
        yield there
