"""The parts of a model that policies need: how its keys turn, and its output projection.

Which rotary embedding a layer uses, and on which part of a head, differs by family and sometimes by
layer, so it is tried out: one token goes through the model at two positions. Alone in its cache it
attends to itself only, so its keys differ by the rotation and by nothing else.
"""

import contextlib
import inspect
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.pytorch_utils import Conv1D

from snapkv.errors import UnsupportedModelError
from snapkv.hf.cache_argument import passed
from snapkv.hf.placement import device_of, weight_of

_APPLY = "apply_rotary_pos_emb"
_PROJECTIONS = ("o_proj", "dense", "c_proj", "out_proj")
_FURTHER = 7
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_LOW_PRECISION_TOLERANCE = 0.05
_NO_ROTATION = "use StreamingLLM(positions='original') or another policy"

_known: weakref.WeakKeyDictionary[Any, dict[int, "Rotation"]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """How the keys of one layer turn with their position; made by `rotations_of`."""

    embedding: Any = None  # the model's rotary module; None where keys have no position
    apply: Callable[..., Any] | None = None  # the family's own `apply_rotary_pos_emb`
    layer_type: str | None = None  # what the module wants to know of the layer
    dims: int | None = None  # of a head's first dimensions `apply` gets so many; None for all
    factor: float = 1.0  # of the module's tables (YaRN's attention scaling); no part of a rotation

    def __call__(self, states: Tensor, positions: Tensor) -> Tensor:
        """(B, H, N, D) states turned on by (B or 1, N) positions, back where negative; float32."""
        states = states.float()
        if self.apply is None:
            return states
        cos, sin = (table / self.factor for table in self.tables(positions))
        part = states[..., : self.dims]
        _, turned = self.apply(part[:, :1], part, cos, sin)  # queries are not wanted
        return torch.cat([turned, states[..., part.shape[-1] :]], dim=-1)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The module's cosines and sines, float32."""
        options = {} if self.layer_type is None else {"layer_type": self.layer_type}
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        try:
            made = self.embedding(like, positions, **options)
        except IndexError:  # of text all axes of M-RoPE are alike; older releases want each
            made = self.embedding(like, positions.expand(3, *positions.shape), **options)
        cos, sin = (each[0] if each.ndim > 3 else each for each in made)
        return cos.to(positions.device), sin.to(positions.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Rotation":
        """Itself: the module belongs to the model."""
        return self


def rotations_of(
    model: PreTrainedModel, layers: Sequence[int], remedy: str = _NO_ROTATION
) -> dict[int, Rotation]:
    """The rotation of each of these layers; `remedy` says what else to do where there is none.

    A layer without rotary embedding (some layers of Cohere 2 or SmolLM3) gets one that changes
    nothing: its keys know no position, so they are right wherever they stand.
    """
    if model not in _known:
        _known[model] = _find_rotations(model, layers, remedy)
    return _known[model]


def shares_latent(model: PreTrainedModel) -> bool:
    """Whether its attention stores one latent for all heads, as DeepSeek's does."""
    config = model.config.get_text_config(decoder=True)
    return bool(getattr(config, "kv_lora_rank", None))


def has_images_positions(modules: Iterable[Any]) -> bool:
    """Whether one of a model's modules has noted an image after which positions count no tokens.

    Models with rotations of three axes do (Qwen2-VL, section 2.1).
    """
    noted = (getattr(module, "rope_deltas", None) for module in modules)
    return any(isinstance(deltas, Tensor) and bool(deltas.any()) for deltas in noted)


class States(Enum):
    """What becomes of recurrent states where several tokens come after others."""

    NONE = auto()  # there are none
    GO_ON = auto()
    BEGIN_ANEW = auto()  # as Jamba's do: what they stood for is forgotten


_states: weakref.WeakKeyDictionary[Any, States] = weakref.WeakKeyDictionary()


def states_of(model: PreTrainedModel) -> States:
    """Tried out, as rotations are: whether such tokens see a state that is no number."""
    if model not in _states:
        on_meta = device_of(model).type == "meta"
        _states[model] = States.GO_ON if on_meta else _find_states(model)
    return _states[model]


@torch.no_grad()
def _find_states(model: PreTrainedModel) -> States:
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    ids = torch.full((1, 2), config.vocab_size // 2, device=device_of(model))
    model(input_ids=ids, **passed(cache), use_cache=True)
    if (state := _first_state(cache)) is None:
        return States.NONE
    state.fill_(math.nan)
    output = model(input_ids=ids, **passed(cache), use_cache=True)
    return States.BEGIN_ANEW if bool(output.logits.isfinite().all()) else States.GO_ON


def _first_state(cache: DynamicCache) -> Tensor | None:
    """The recurrent state of the first layer that has one."""
    held = (getattr(layer, "recurrent_states", None) or {} for layer in cache.layers)
    return next((state for each in held for state in each.values() if state is not None), None)


def _find_rotations(
    model: PreTrainedModel, layers: Sequence[int], remedy: str
) -> dict[int, Rotation]:
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    if (kind := length_dependent_rope(config)) is not None:
        raise UnsupportedModelError(
            f"model: expected a rotary embedding that does not depend on the text's length, "
            f"got {name} with rope_type {kind!r}, whose stored keys cannot be moved to another "
            f"position; {remedy}"
        )
    if shares_latent(model):
        raise UnsupportedModelError(
            f"model: expected keys that are rotated as they are stored, got {name} with latent "
            f"attention, which stores a latent; {remedy}"
        )
    first, further = (_lone_keys(model, config, position) for position in (0, _FURTHER))
    return {
        index: _rotation_between(model, config, index, first[index], further[index], remedy)
        for index in layers
    }


def length_dependent_rope(config: Any) -> str | None:
    """The kind of rotary embedding whose keys depend on the text's length; None where none does."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    kinds = (str(part.get("rope_type", "default")) for part in nested or [parameters])
    return next((kind for kind in kinds if "dynamic" in kind or kind == "longrope"), None)


@torch.no_grad()
def _lone_keys(model: PreTrainedModel, config: Any, position: int) -> list[Any]:
    """The key each layer stores for a token that is alone at a position; None where none."""
    cache = DynamicCache(config=config)
    ids = torch.tensor([[config.vocab_size // 2]], device=device_of(model))
    positions = torch.full_like(ids, position)
    model(input_ids=ids, position_ids=positions, **passed(cache), use_cache=True)
    return [getattr(layer, "keys", None) for layer in cache.layers]


def _rotation_between(
    model: PreTrainedModel, config: Any, index: int, first: Tensor, further: Tensor, remedy: str
) -> Rotation:
    for rotation in (Rotation(), *_candidates(model, config, index, first)):
        steps = torch.tensor([[_FURTHER]], device=first.device)
        difference = (rotation(first, steps) - further.float()).norm() / further.float().norm()
        if bool(difference < _TOLERANCE.get(first.dtype, _LOW_PRECISION_TOLERANCE)):
            return rotation
    raise UnsupportedModelError(
        f"model: expected keys that its rotary embedding turns as a whole, got "
        f"{type(model).__name__}, whose keys in layer {index} change with the position in another "
        f"way; {remedy}"
    )


def _candidates(
    model: PreTrainedModel, config: Any, index: int, keys: Tensor
) -> Iterator[Rotation]:
    """The ways in which the family's own code may rotate this layer's keys."""
    start = torch.zeros(1, 1, dtype=torch.int64, device=keys.device)
    for module in _rotary_embeddings(model):
        apply = getattr(sys.modules[type(module).__module__], _APPLY, None)
        if apply is None:
            continue
        if list(inspect.signature(apply).parameters)[:4] != ["q", "k", "cos", "sin"]:
            continue
        wants = inspect.signature(module.forward).parameters
        kind = config.layer_types[index] if "layer_type" in wants else None
        cos, _ = Rotation(embedding=module, apply=apply, layer_type=kind).tables(start)
        for dims in (None, cos.shape[-1]):  # some families rotate a slice of the head
            rotation = Rotation(
                embedding=module, apply=apply, layer_type=kind, dims=dims, factor=float(cos.max())
            )
            with contextlib.suppress(RuntimeError):  # the tables do not fit heads of this size
                rotation(keys, start)
                yield rotation


def _rotary_embeddings(model: PreTrainedModel) -> list[Any]:
    """Those of the text decoder, not of what sees images; of all where another part is called so.

    As the head of ModernBERT's decoder is.
    """
    for part in (model.get_decoder(), model):
        named = [each for each in part.modules() if type(each).__name__.endswith("RotaryEmbedding")]
        if named:
            return named
    return []


_stored: weakref.WeakKeyDictionary[Any, tuple[set[Any], set[int]]] = weakref.WeakKeyDictionary()


def absent_layers(model: PreTrainedModel, layers: Sequence[int], counted: int) -> list[int]:
    """Return those of these layers that the configuration counts and the model does not have.

    Whoever prunes a model takes modules out of it, and the configuration often stays as it was. A
    layer is there if a module of the decoder has its index. If none has, one token is tried out: a
    model that loops over its layers stores keys under more indices than its modules have.

    Args:
        model: a model whose layers may have been taken out.
        layers: indices of the layers of attention, of which some may be absent.
        counted: how many layers of any kind the configuration counts.
    """
    present = {getattr(module, "layer_idx", None) for module in model.get_decoder().modules()}
    missing = [index for index in layers if index not in present]
    if not missing or present == {None} or device_of(model).type == "meta":
        return []
    if max(index for index in present if index is not None) >= counted:
        return []  # the cache has no layer for it, which its first keys will be refused for
    if model not in _stored or _stored[model][0] != present:  # it may be pruned between two caches
        keys = _lone_keys(model, model.config.get_text_config(decoder=True), 0)
        _stored[model] = present, {index for index, key in enumerate(keys) if key is not None}
    return [index for index in missing if index not in _stored[model][1]]


def attention_modules(model: PreTrainedModel, layers: Sequence[int]) -> dict[int, list[Any]]:
    """The modules of the decoder that are called attention, for each of these layers."""
    found: dict[int, list[Any]] = {index: [] for index in layers}
    for module in model.get_decoder().modules():
        if "Attention" in type(module).__name__ and getattr(module, "layer_idx", None) in found:
            found[module.layer_idx].append(module)
    return found


@contextlib.contextmanager
def noting_inputs(module: Any, note: Callable[[Tensor], object]) -> Iterator[None]:
    """Within this block `note` is given the states that enter a module in this thread."""
    thread = threading.get_ident()

    def pass_on(_: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if threading.get_ident() == thread:
            note(named["hidden_states"] if "hidden_states" in named else inputs[0])

    hook = module.register_forward_pre_hook(pass_on, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def output_projections(model: PreTrainedModel, layers: Sequence[int]) -> dict[int, Any]:
    """The module that maps the heads' outputs to the model's width, for each of these layers."""
    found: dict[int, Any] = {}
    for index, modules in attention_modules(model, layers).items():
        named = (getattr(module, name, None) for module in modules for name in _PROJECTIONS)
        parts = [part for part in named if part is not None]
        if len(parts) != 1 or not _is_projection(parts[0]):
            raise UnsupportedModelError(
                "model: expected attention with an output projection called "
                f"{', '.join(_PROJECTIONS[:-1])} or {_PROJECTIONS[-1]}, got {type(model).__name__} "
                f"with {', '.join(type(part).__name__ for part in parts) or 'none'} in layer "
                f"{index}; use a method that does not weigh values by it"
            )
        found[index] = parts[0]
    return found


@torch.no_grad()
def output_weight(projection: Any, dtype: torch.dtype) -> Tensor:
    """(hidden, Hq * Dv) in the states' dtype.

    What is no plain layer, such as one with adapters or with quantized weights, is tried out: it
    maps unit vectors to the columns.
    """
    if type(projection) is Conv1D:
        return weight_of(projection).to(device_of(projection)).T
    if type(projection) is nn.Linear and type(projection.weight) is nn.Parameter:
        return weight_of(projection).to(device_of(projection))
    units = torch.eye(projection.in_features, dtype=dtype, device=device_of(projection))
    moved: Tensor = projection(units) - projection(torch.zeros_like(units[:1]))  # without a bias
    return moved.T


def _is_projection(module: Any) -> bool:
    return isinstance(module, Conv1D) or hasattr(module, "in_features")


def max_positions(model: Any) -> int | None:
    """Return the positions for prompt and answer together; None without a limit."""
    text = model.config.get_text_config(decoder=True)
    names = ("model_max_length", "max_position_embeddings")
    return next((value for name in names if (value := getattr(text, name, None))), None)
