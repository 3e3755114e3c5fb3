"""Forward passes that are captured in a `generate` call and replayed for every later token.

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
from collections import Counter
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
from snapkv.hf.append_buffers import CAPTURED_TOKENS, AppendBuffers
from snapkv.hf.cache_argument import cache_among, with_cache
from snapkv.validation import first_line

_log = logging.getLogger("snapkv")

_COLLECTING = "transformers.utils.output_capturing"  # the hooks of this module can be captured


class Recorder(Protocol):
    """An object that captures the work of forward passes on one kind of device."""

    def side_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Run the operations of this block on the stream of the capture, to warm up a step."""

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
        # All graphs of a recorder share their memory. This is safe because they never run at the
        # same time, and because no graph reads what another has written into this memory: inputs
        # and buffers are outside of it, and outputs are copied after each replay.
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        try:
            replay: Callable[[], None] = self._captured(step, self._pool).replay
        except RuntimeError:
            # This ends the capture state of the random number generator. The shared memory may
            # still be reserved for the capture that failed.
            self._captured(lambda: None, None)
            raise
        return replay

    def _captured(self, step: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            # With "thread_local", other threads may use the device during the capture.
            options = {"pool": pool, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(graph, stream=self._stream, **options):
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
    """The captured passes of one `generate` call, which are called like the model.

    A decode step reads one token; a pass that verifies drafts reads several. Each number of tokens
    has a graph of its own.

    It is used for one call only, because weights, hooks, settings and the buffers of the cache
    could change between two calls. The cache has fixed append buffers for the same time.

    Args:
        model: the model whose passes are captured.
        cache: the `CompressedCache` that the passes read and write.
        buffers: allocates and releases the append buffers of the cache.

    Attributes:
        buffers: the argument.
    """

    def __init__(self, model: PreTrainedModel, cache: Any, buffers: AppendBuffers) -> None:
        self._model, self._cache, self.buffers = model, cache, buffers
        self._recorder: Any = None
        self._obstacle, self._new_tokens = "", 0
        self._captured: dict[int, _CapturedPass] = {}  # by their numbers of tokens
        self._times: Counter[int] = Counter()  # how often a pass has read each number of tokens
        _running[cache] = weakref.ref(self)
        weakref.finalize(self, buffers.release).atexit = False

    def expect(self, new_tokens: int) -> None:
        """Make room for the next pass in the append buffers, before its mask is made.

        If no pass can be captured, the buffers are released and the pass will run eagerly.

        Args:
            new_tokens: how many tokens the pass reads.
        """
        self._new_tokens = new_tokens
        if self._obstacle or self.buffers.have_room(new_tokens):
            return
        obstacle = _obstacle(self._model) or self.buffers.obstacle
        if obstacle:
            self._run_eagerly(obstacle)
            self.close()
        else:
            self._captured.clear()
            self.buffers.allocate(new_tokens)

    def close(self) -> None:
        """Release the append buffers and the captured graphs, for example after `generate`."""
        self.buffers.release()
        self._captured.clear()

    def __call__(self, **inputs: Any) -> Any:
        """Run a pass, by replaying the captured pass over as many tokens if there is one.

        Args:
            inputs: the keyword arguments of the model.

        Returns:
            The output of the model, with tensors that later passes do not overwrite.
        """
        leaves, spec = tree_flatten(inputs)
        with self.buffers.counting(self._new_tokens):
            if self._is_captured(leaves, spec):
                return self._captured[self._new_tokens](leaves)
            with forward_context.step():
                made = self._model(**inputs)
        if self._obstacle:
            self.close()
        return made

    def _is_captured(self, leaves: list[Any], spec: Any) -> bool:
        """Return whether the next pass can be replayed, after capturing it if that is worth it.

        If it cannot be captured, the reason is logged, and all passes run eagerly from now on.

        Args:
            leaves: the inputs of the pass, flattened.
            spec: the structure of the inputs.
        """
        tokens = self._new_tokens
        if self._obstacle or tokens > CAPTURED_TOKENS:
            return False
        # A capture takes about as long as two to three eager passes. A decode step reads one token
        # each time. With drafts, some numbers of tokens come only once, so a number is captured
        # when it comes again: most of those come often.
        least = 2 if self._cache.prompt_state.verifies_drafts else 1
        self._times[tokens] += 1
        if self._times[tokens] < least:
            return False
        if tokens in self._captured and self._captured[tokens].kinds == _kinds(leaves, spec):
            return True
        if not self.buffers.is_lent:
            obstacle = "the cache has no append buffers for the step"
        else:
            obstacle = _obstacle(self._model) or self._capture(leaves, spec)
        if obstacle:
            self._run_eagerly(obstacle)
        else:
            graphs = sum(times >= least for times in self._times.values())
            _said[self._cache] = "one graph" if graphs == 1 else f"{graphs} graphs"
        return not obstacle

    def _run_eagerly(self, obstacle: str) -> None:
        self._obstacle, _said[self._cache] = obstacle, f"eager: {obstacle}"
        self._captured.clear()
        _log.info("decoding steps run eagerly: %s", obstacle)

    def _capture(self, leaves: list[Any], spec: Any) -> str:
        """Capture a pass with these inputs. The tokens in the cache are the same afterwards.

        Args:
            leaves: the inputs of the pass, flattened.
            spec: the structure of the inputs.

        Returns:
            Why the pass cannot be captured; an empty string if it was captured.
        """
        queries = (layer.queries.held for layer in self._cache.prompt_state.layers)
        changed = [held for held in queries if held is not None]
        before = [held.clone() for held in changed]
        try:
            # torch captures what runs on the current GPU, which need not be the model's.
            with torch.cuda.device_of(next(self._model.parameters())):  # type: ignore[no-untyped-call]
                # Memory that no graph uses any more cannot be shared with a new one.
                if not self._captured:
                    self._recorder = RECORDERS[self._model.device.type]()
                captured = _CapturedPass(self._recorder, self._model, leaves, spec)
        except (_HostReadError, RuntimeError) as error:
            return f"a step of {type(self._model).__name__} {first_line(error)}"
        finally:
            for held, states in zip(changed, before, strict=True):
                held.copy_(states)
        self._captured[self._new_tokens] = captured
        return ""


class _CapturedPass:
    """A forward pass that was captured with some inputs, and is replayed with others of their kind.

    Args:
        recorder: captures the pass.
        model: the model.
        leaves: the inputs of the pass, flattened.
        spec: the structure of the inputs.

    Attributes:
        kinds: the structure, shapes, dtypes and constants of the inputs.

    Raises:
        _HostReadError: the pass reads a number from the device.
        RuntimeError: the pass cannot be captured for another reason.
    """

    def __init__(
        self, recorder: Recorder, model: PreTrainedModel, leaves: list[Any], spec: Any
    ) -> None:
        self.kinds = _kinds(leaves, spec)
        # The graph reads its inputs at the addresses of these copies.
        self._inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        inputs = tree_unflatten(self._inputs, spec)

        def step() -> None:
            self._output = model(**inputs)

        with forward_context.step(is_recording=True):
            with recorder.side_stream(), HostReads():  # type: ignore[no-untyped-call] # torch's
                step()
            self._replay = recorder.record(step)

    def __call__(self, leaves: list[Any]) -> Any:
        """Replay the pass with other inputs, and return a copy of its output."""
        for held, leaf in zip(self._inputs, leaves, strict=True):
            if isinstance(held, Tensor):
                held.copy_(leaf)
        self._replay()
        return tree_map_only(Tensor, torch.clone, self._output)


_said: "weakref.WeakKeyDictionary[Cache, str]" = weakref.WeakKeyDictionary()


def described(cache: Cache) -> str | None:
    """Describe for the report of a cache how its decode steps were run.

    Returns:
        "one graph", or for example "4 graphs" if passes over four numbers of tokens were captured,
        or "eager: " followed by the reason; None if no capture has been tried.
    """
    return _said.get(cache)


_running: "weakref.WeakKeyDictionary[Cache, weakref.ref[StepGraph]]" = weakref.WeakKeyDictionary()


def running(cache: Cache) -> StepGraph | None:
    """Return the step graph of the `generate` call that is using a cache, or None."""
    return graph() if (graph := _running.get(cache)) else None


def _kinds(leaves: list[Any], spec: Any) -> Any:
    """Return the properties of all inputs that must be equal for a pass to be replayed."""
    return spec, [
        (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]


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
    """Return whether `generate` should use compiled decode steps, and provide captured ones.

    It wraps `_valid_auto_compile_criteria`. If the cache is a compressed one, the device has a
    recorder and transformers would compile the steps of a cache of fixed size, it sets the
    `compile_config` of `generation_config`, which changes in place, to a new `StepGraph`.
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
