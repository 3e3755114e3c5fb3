"""A CUDA graph's stand-in on a CPU: what was run is run again on the very same tensors.

As there, numbers that Python knew stay what they were, and nothing but the operations happens.
"""

import contextlib

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GenerationMixin

from snapkv.hf import step_graph
from snapkv.hf.cache_argument import cache_among


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

    side_stream = staticmethod(contextlib.nullcontext)

    def record(self, step):
        with Tape() as tape:
            step()
        return tape.replay


@contextlib.contextmanager
def recording_on_a_cpu():
    """Within this block a CPU is as a device whose work can be recorded."""
    own = GenerationMixin._valid_auto_compile_criteria

    def criteria(model, model_kwargs, config):
        asks = config.compile_config is not None or config.disable_compile
        cache = cache_among(model_kwargs)
        return own(model, model_kwargs, config) if asks else cache.is_compileable

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(step_graph.RECORDERS, "cpu", TapeRecorder)
        patch.setattr(GenerationMixin, "_valid_auto_compile_criteria", criteria)
        yield
