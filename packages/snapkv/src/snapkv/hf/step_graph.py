"""Decode steps that are captured once per `generate` call and replayed for every later token.

An eager decode step of a large model keeps a GPU waiting for Python, which launches some 1,500
kernels one by one. A CUDA graph launches all of them at once. A graph contains addresses and not
tensors. So the weights and the buffers of the cache must not move, which is why the cache uses
append buffers of fixed size, and the inputs of a step are copied to their addresses at the time of
the capture. A step that reads a number from the device cannot be captured. Then all steps run
eagerly, and the report of the cache says why.
"""

import contextlib
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from snapkv.hf import forward_context
from snapkv.hf.append_buffers import AppendBuffers
from snapkv.hf.cache_argument import cache_among, with_cache
from snapkv.validation import first_line

_log = logging.getLogger("snapkv")

_COLLECTING = "transformers.utils.output_capturing"  # the hooks of this module can be captured


class Recorder(Protocol):
    """An object that captures the work of a decode step on one kind of device."""

    def side_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Run this block on the stream of the capture, so that it can warm the step up."""

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Capture `step` without running its work.

        Returns:
            A function that runs the captured work on the same tensors.
        """


class CudaRecorder:
    """A recorder that captures CUDA graphs, on one side stream per device."""

    _streams: ClassVar[dict[int, torch.cuda.Stream]] = {}

    def __init__(self) -> None:
        device = torch.cuda.current_device()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream = self._streams[device]

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        try:
            replay: Callable[[], None] = self._captured(step).replay
        except RuntimeError:
            self._captured(lambda: None)  # ends the capture state of the random number generator
            raise
        return replay

    def _captured(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            # With "thread_local", other threads may use the device during the capture.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                step()
        return graph


RECORDERS: dict[str, Callable[[], Recorder]] = {"cuda": CudaRecorder}
"""The recorder for each type of device on which decode steps can be captured."""


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's
    """A mode that detects operations which bring a number, or a shape made from one, to Python.

    Such an operation makes a GPU wait, and its result would be frozen in a captured step.
    """

    _ASKING = frozenset(
        ("item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select")
    )

    def on_read(self, name: str) -> None:
        """Handle an operation that has read a number from the device; here, stop the step.

        Args:
            name: the name of the operation.

        Raises:
            _HostReadError: always.
        """
        raise _HostReadError(f"reads a number from the device ({name})")

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: Any = None
    ) -> Any:
        del types
        name = function.overloadpacket.__name__
        by_mask = name == "index" and any(
            index is not None and index.dtype == torch.bool for index in arguments[1]
        )
        made = function(*arguments, **options or {})
        if name in self._ASKING or by_mask or _to_host(arguments, made):
            self.on_read(name)
        return made


def _to_host(arguments: tuple[Any, ...], made: Any) -> bool:
    """Return whether an operation has copied a tensor from a device to the host."""
    devices = (part.device.type for part in tree_leaves(arguments) if isinstance(part, Tensor))
    return (
        isinstance(made, Tensor) and made.device.type == "cpu" and any(d != "cpu" for d in devices)
    )


class _HostReadError(Exception):
    """A decode step has read a number from the device."""


class StepGraph:
    """The captured decode step of one `generate` call, which is called like the model.

    It is used for one call only, because weights, hooks, settings and the buffers of the cache
    could change between two calls. The cache has fixed append buffers for the same time.

    Args:
        model: the model whose decode steps are captured.
        cache: the `CompressedCache` that the steps read and write.
        buffers: allocates and releases the append buffers of the cache.
    """

    def __init__(self, model: PreTrainedModel, cache: Any, buffers: AppendBuffers) -> None:
        self._model, self._cache, self._buffers = model, cache, buffers
        self._obstacle: str | None = None
        self._given: Any = None  # shapes, dtypes and other constants of a step's inputs
        self._held: list[Tensor] = []  # input tensors at the addresses that the graph reads
        self._output: Any = None
        self._replay: Callable[[], None] | None = None
        _running[cache] = weakref.ref(self)
        weakref.finalize(self, buffers.release).atexit = False

    def expect(self, new_tokens: int) -> None:
        """Make sure that the append buffers can hold the next step, before its mask is made.

        If the step cannot be captured, the buffers are released and it will run eagerly.
        """
        if self._obstacle or self._buffers.has_slots(new_tokens):
            return
        obstacle = _obstacle(self._model) or self._buffers.obstacle
        if obstacle:
            self._run_eagerly(obstacle)
            self.close()
        else:
            self._buffers.allocate(new_tokens)
            self._given = None

    def close(self) -> None:
        """Release the append buffers and the graph, for instance when `generate` has ended."""
        self._buffers.release()
        self._given = self._replay = None

    def __call__(self, **given: Any) -> Any:
        leaves, spec = tree_flatten(given)
        kinds = spec, [_kind(leaf) for leaf in leaves]
        if kinds != self._given and not self._obstacle:
            self._given = kinds
            self._begin(leaves, spec)
        if self._replay is None:
            with forward_context.step():
                made = self._model(**given)
            self.close()
            return made
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for held, tensor in zip(self._held, tensors, strict=True):
            held.copy_(tensor)
        self._replay()
        return tree_map_only(Tensor, torch.clone, self._output)

    def _begin(self, leaves: list[Any], spec: Any) -> None:
        """Capture a step with these inputs; if that is impossible, log why and run eagerly."""
        if not _counts(self._cache):
            obstacle = "the cache has no append buffers for the step"
        else:
            obstacle = _obstacle(self._model) or self._record(leaves, spec)
        if obstacle:
            self._run_eagerly(obstacle)
        else:
            self._obstacle, _said[self._cache] = None, "one graph"

    def _run_eagerly(self, obstacle: str) -> None:
        self._obstacle, _said[self._cache] = obstacle, f"eager: {obstacle}"
        self._held, self._output, self._replay = [], None, None
        _log.info("decoding steps run eagerly: %s", obstacle)

    def _record(self, leaves: list[Any], spec: Any) -> str:
        """Capture a step with these inputs. The tokens in the cache are the same afterwards.

        Args:
            leaves: the inputs of the step, flattened.
            spec: the structure of the inputs.

        Returns:
            Why the step cannot be captured; an empty string if it was captured.
        """
        own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._held = [leaf for leaf in own if isinstance(leaf, Tensor)]
        given = tree_unflatten(own, spec)

        def step() -> None:
            self._output = self._model(**given)

        recorder = RECORDERS[self._model.device.type]()
        changed = _written_over(self._cache)
        before = [held.clone() for held in changed]
        try:
            with forward_context.step(is_recording=True):
                with recorder.side_stream(), HostReads():  # type: ignore[no-untyped-call] # torch's
                    step()
                self._replay = recorder.record(step)
        except (_HostReadError, RuntimeError) as error:
            return f"a step of {type(self._model).__name__} {first_line(error)}"
        finally:
            for held, states in zip(changed, before, strict=True):
                held.copy_(states)
        return ""


_said: "weakref.WeakKeyDictionary[Cache, str]" = weakref.WeakKeyDictionary()


def described(cache: Cache) -> str | None:
    """Return a sentence for the report of a cache that says how its decode steps ran.

    Returns:
        The sentence, or None if no capture has been tried.
    """
    return _said.get(cache)


_running: "weakref.WeakKeyDictionary[Cache, weakref.ref[StepGraph]]" = weakref.WeakKeyDictionary()


def running(cache: Cache) -> StepGraph | None:
    """Return the step graph of the `generate` call that is using a cache, or None."""
    return graph() if (graph := _running.get(cache)) else None


def _counts(cache: Any) -> list[Tensor]:
    """Return the scalar tensors that count the used slots of each layer's append buffer."""
    counts = (layer.store.tail.count for layer in cache.prompt_state.layers)
    return [count for count in counts if count is not None]


def _written_over(cache: Any) -> list[Tensor]:
    """Return the tensors that a step changes in place, except free slots of the buffers."""
    queries = (layer.queries.last for layer in cache.prompt_state.layers)
    return [*_counts(cache), *(held for held in queries if held is not None)]


def _kind(leaf: Any) -> Any:
    """Return the properties of an input that must be equal for a captured step to be replayed."""
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf


def _obstacle(model: PreTrainedModel) -> str:
    """Return why no decode step of this model can be captured; an empty string if one can."""
    if model.training:
        return "the model is in training mode"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "the model is on several devices"
    if forward_context.current.hook is not None:
        return "a hook receives every attention call"
    if _global_forward_hooks or _global_forward_pre_hooks:
        return "all modules have hooks"
    for name, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not all(map(_is_known, hooks)) or "forward" in vars(module):
            return f"{name or type(model).__name__} has hooks, or a forward of its own"
    return ""


def _is_known(hook: Any) -> bool:
    """Return whether a hook may be skipped when a decode step is replayed."""
    return getattr(hook, "of_texts_only", False) or getattr(hook, "__module__", "") == _COLLECTING


@dataclass
class _Recorded(CompileConfig):
    """A compile config that makes `generate` call a captured step instead of compiled code."""

    forward: Any = None


_LENT = SimpleNamespace(is_compileable=True)
"""A stand-in for a cache of fixed size, since transformers compiles steps only for such caches."""


def compiles(own: Callable[..., Any], model: Any, model_kwargs: Any, generation_config: Any) -> Any:
    """Decide for `generate` whether to compile decode steps, and have them captured instead.

    It wraps `_valid_auto_compile_criteria`. If the cache is a compressed one and the device has a
    recorder, it puts a `StepGraph` into `generation_config`, which it changes in place.
    """
    cache = cache_among(model_kwargs)
    if not hasattr(cache, "prompt_state") or model.device.type not in RECORDERS:
        return own(model, model_kwargs, generation_config)
    if not own(model, with_cache(model_kwargs, _LENT), generation_config):
        return False
    if generation_config.compile_config is not None:
        _log.warning("compile_config: decode steps are captured, not compiled. Leave it out")
    buffers = _append_buffers_for(cache, model_kwargs, generation_config)
    generation_config.compile_config = _Recorded(forward=StepGraph(model, cache, buffers))
    return True


def _append_buffers_for(cache: Any, model_kwargs: Any, config: GenerationConfig) -> AppendBuffers:
    """Return an object that allocates append buffers for the length `generate` may reach."""
    last, embedded = config.max_length, model_kwargs.get("inputs_embeds")
    # The `max_length` of transformers does not count the tokens of an embedded prompt.
    if last is not None and embedded is not None:
        last += embedded.shape[1]
    return AppendBuffers(cache, last, returns_weights=bool(config.output_attentions))


def compiled(own: Callable[..., Any], model: Any, config: Any) -> Any:
    """Return the function that `generate` calls for each decode step; wraps `get_compiled_call`."""
    return config.forward if isinstance(config, _Recorded) else own(model, config)
