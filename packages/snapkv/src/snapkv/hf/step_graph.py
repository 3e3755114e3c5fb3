"""A decoding step that is recorded once a `generate` and replayed for every token after it.

An eager step of a large model keeps a GPU waiting for Python, which launches some 1,500 kernels one
by one. A CUDA graph launches them all at once. It knows addresses, not tensors: the buffers of the
cache, which is lent room for it, and the model's weights must stay where they were, and what a step
is given is copied to where it was when the step was recorded. A step that asks the device for a
number cannot be recorded; it runs eagerly, and the report of the cache says why.
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
from snapkv.hf.cache_argument import cache_among, with_cache
from snapkv.hf.room import Room
from snapkv.validation import first_line

_log = logging.getLogger("snapkv")

_COLLECTING = "transformers.utils.output_capturing"  # whose hooks a recorded step may have


class Recorder(Protocol):
    """Records the work of a step on one kind of device."""

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        """Within this block a step is tried, where what it prepares is of use to the recording."""

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """What does the same again, on the same tensors; recording does not run the step."""


class CudaRecorder:
    """Records a CUDA graph, with memory of its own, on a stream that all of a device use."""

    _streams: ClassVar[dict[int, torch.cuda.Stream]] = {}

    def __init__(self) -> None:
        device = torch.cuda.current_device()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream = self._streams[device]

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        try:
            replay: Callable[[], None] = self._captured(step).replay
        except RuntimeError:
            self._captured(lambda: None)  # or random numbers would go on as if recorded
            raise
        return replay

    def _captured(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Other threads may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                step()
        return graph


RECORDERS: dict[str, Callable[[], Recorder]] = {"cuda": CudaRecorder}
"""By the type of the device."""


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's
    """Tells of every operation that brings a number, or a shape that depends on one, to Python."""

    _ASKING = frozenset(
        ("item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select")
    )

    def on_read(self, name: str) -> None:
        """An operation of that name was run."""
        raise _HostReadError(f"asks the device for a number ({name})")

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
    """Whether an operation has brought a tensor from a device to the host."""
    devices = (part.device.type for part in tree_leaves(arguments) if isinstance(part, Tensor))
    return (
        isinstance(made, Tensor) and made.device.type == "cpu" and any(d != "cpu" for d in devices)
    )


class _HostReadError(Exception):
    """A step asked the device for a number."""


class StepGraph:
    """The recorded step of one `generate` call; called as the model is.

    It lives no longer, so that nothing it takes for granted changes meanwhile: weights, hooks,
    settings, where the cache holds what. The cache has room for as long.
    """

    def __init__(self, model: PreTrainedModel, cache: Any, room: Room) -> None:
        self._model, self._cache, self._room = model, cache, room
        self._obstacle: str | None = None
        self._given: Any = None  # the kinds of what a step is given
        self._held: list[Tensor] = []  # that, where the graph reads it
        self._output: Any = None
        self._replay: Callable[[], None] | None = None
        _running[cache] = weakref.ref(self)
        weakref.finalize(self, room.leave).atexit = False

    def expect(self, new_tokens: int) -> None:
        """See that there is room for a step, before its mask is made."""
        if self._obstacle or self._room.has_slots(new_tokens):
            return
        obstacle = _obstacle(self._model) or self._room.obstacle
        if obstacle:
            self._run_eagerly(obstacle)
            self.close()
        else:
            self._room.take(new_tokens)
            self._given = None

    def close(self) -> None:
        """The call is over, or reads what is no step."""
        self._room.leave()
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
        """Record a step of this kind, or say why not."""
        if not _counts(self._cache):
            obstacle = "no room was taken for the step"
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
        """Record the step that was asked for; why it cannot be, or empty.

        The cache holds what it held before.
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
                with recorder.aside(), HostReads():  # type: ignore[no-untyped-call] # torch's
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
    """How its steps ran, for a report; None where none was to be recorded."""
    return _said.get(cache)


_running: "weakref.WeakKeyDictionary[Cache, weakref.ref[StepGraph]]" = weakref.WeakKeyDictionary()


def running(cache: Cache) -> StepGraph | None:
    """That of the `generate` which makes tokens into a cache, if any."""
    return graph() if (graph := _running.get(cache)) else None


def _counts(cache: Any) -> list[Tensor]:
    """How much of every layer's room is written, where any is lent."""
    counts = (layer.store.tail.count for layer in cache.prompt_state.layers)
    return [count for count in counts if count is not None]


def _written_over(cache: Any) -> list[Tensor]:
    """What a step changes besides slots that nobody reads before they are written."""
    queries = (layer.queries.last for layer in cache.prompt_state.layers)
    return [*_counts(cache), *(held for held in queries if held is not None)]


def _kind(leaf: Any) -> Any:
    """By which it is told whether a recorded step can be given this in the place of another."""
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf


def _obstacle(model: PreTrainedModel) -> str:
    """Why no step of this model can be recorded; empty where one can."""
    if model.training:
        return "the model is in training mode"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "the model is on several devices"
    if forward_context.current.hook is not None:
        return "something follows every attention call"
    if _global_forward_hooks or _global_forward_pre_hooks:
        return "all modules have hooks"
    for name, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not all(map(_is_known, hooks)) or "forward" in vars(module):
            return f"{name or type(model).__name__} has hooks, or a forward of its own"
    return ""


def _is_known(hook: Any) -> bool:
    """Whether a recorded step, of one token, may do without it."""
    return getattr(hook, "of_texts_only", False) or getattr(hook, "__module__", "") == _COLLECTING


@dataclass
class _Recorded(CompileConfig):
    """Asks for the replay of a recorded step in the place of compiled code."""

    forward: Any = None


_LENT = SimpleNamespace(is_compileable=True)
"""A cache as one is that grows once it is lent room."""


def compiles(own: Callable[..., Any], model: Any, model_kwargs: Any, generation_config: Any) -> Any:
    """Around `_valid_auto_compile_criteria`, by which `generate` decides to compile its steps.

    Those of a cache of this kind are recorded instead, where the device can.
    """
    cache = cache_among(model_kwargs)
    if not hasattr(cache, "prompt_state") or model.device.type not in RECORDERS:
        return own(model, model_kwargs, generation_config)
    if not own(model, with_cache(model_kwargs, _LENT), generation_config):
        return False
    if generation_config.compile_config is not None:
        _log.warning("compile_config: decoding steps are recorded, not compiled; leave it out")
    room = _room_for(cache, model_kwargs, generation_config)
    generation_config.compile_config = _Recorded(forward=StepGraph(model, cache, room))
    return True


def _room_for(cache: Any, model_kwargs: Any, config: GenerationConfig) -> Room:
    """For what `generate` was asked for; it counts no tokens of an embedded prompt."""
    last, embedded = config.max_length, model_kwargs.get("inputs_embeds")
    if last is not None and embedded is not None:
        last += embedded.shape[1]
    return Room(cache, last, asks_weights=bool(config.output_attentions))


def compiled(own: Callable[..., Any], model: Any, config: Any) -> Any:
    """Around `get_compiled_call`: what `generate` calls for a step that is to be compiled."""
    return config.forward if isinstance(config, _Recorded) else own(model, config)
