"""A stand-in for a CUDA graph on a CPU: it replays operations on the tensors they were recorded on.

As with a CUDA graph, numbers that Python has read keep their recorded values, and a replay runs
only tensor operations, no Python code.
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
    """Records every tensor operation; `replay` runs them again in order."""

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
    """Records on a CPU. As on a GPU, a recorded operation has no effect until it is replayed."""

    side_stream = staticmethod(contextlib.nullcontext)

    def record(self, step):
        with Tape() as tape:
            step()
        return tape.replay


@contextlib.contextmanager
def recording_on_a_cpu():
    """Let decode steps be captured on a CPU within this block."""
    own = GenerationMixin._valid_auto_compile_criteria

    def criteria(model, model_kwargs, config):
        asks = config.compile_config is not None or config.disable_compile
        cache = cache_among(model_kwargs)
        return own(model, model_kwargs, config) if asks else cache.is_compileable

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(step_graph.RECORDERS, "cpu", TapeRecorder)
        patch.setattr(GenerationMixin, "_valid_auto_compile_criteria", criteria)
        yield
