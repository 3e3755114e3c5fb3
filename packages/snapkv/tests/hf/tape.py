"""A CUDA graph's stand-in on a CPU: what was run is run again on the very same tensors.

As there, numbers that Python knew stay what they were, and nothing but the operations happens.
"""

import contextlib

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Notes every operation; `replay` runs them in their order."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **options or {})
        self.operations.append((function, arguments, options or {}, made))
        return made

    def replay(self):
        for function, arguments, options, made in self.operations:
            again = function(*arguments, **options)
            for held, tensor in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(held, Tensor) and held.data_ptr() != tensor.data_ptr():
                    held.copy_(tensor)


class TapeRecorder:
    """Records on a CPU; what is recorded has not happened, as on a GPU."""

    aside = staticmethod(contextlib.nullcontext)

    def record(self, step):
        with Tape() as tape:
            step()
        return tape.replay
