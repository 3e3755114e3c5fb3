"""The parts of a model that policies need: the rotation of its keys, and its output projection.

Model families differ in which rotary embedding a layer uses and on which part of a head. So this
module finds it out by running the model on one token at two positions. A token that is alone in its
cache attends only to itself, so its keys at both positions differ only by the rotation.
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

from snapkv.errors import UnsupportedModelError, wrong
from snapkv.hf.cache_argument import passed
from snapkv.hf.placement import device_of, weight_of

_APPLY = "apply_rotary_pos_emb"
_PROJECTIONS = ("o_proj", "dense", "c_proj", "out_proj")
_FURTHER = 7
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_LOW_PRECISION_TOLERANCE = 0.05
_NO_ROTATION = "Use StreamingLLM(positions='original') or a different policy"

_known: weakref.WeakKeyDictionary[Any, dict[int, "Rotation"]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """The rotary embedding that a layer applies to its keys, as `rotations_of` has found it."""

    embedding: Any = None  # the model's rotary module; None if keys have no position
    apply: Callable[..., Any] | None = None  # the family's own `apply_rotary_pos_emb`
    layer_type: str | None = None  # an argument that some rotary modules take
    dims: int | None = None  # how many leading dimensions of a head are rotated; None for all
    factor: float = 1.0  # the scale of the module's tables (YaRN), which is removed from them

    def __call__(self, states: Tensor, positions: Tensor) -> Tensor:
        """Rotate states further by a number of positions.

        Args:
            states: (B, H, N, D), of any dtype.
            positions: (B or 1, N) int64, by how many positions to move each state; a negative
                number moves it back.

        Returns:
            (B, H, N, D) float32.
        """
        states = states.float()
        if self.apply is None:
            return states
        cos, sin = (table / self.factor for table in self.tables(positions))
        part = states[..., : self.dims]
        _, turned = self.apply(part[:, :1], part, cos, sin)  # its result for queries is not used
        return torch.cat([turned, states[..., part.shape[-1] :]], dim=-1)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the cosines and sines with which the rotary module rotates some positions.

        Args:
            positions: (B or 1, N) int64.

        Returns:
            Two (B or 1, N, dims) float32 tensors on the device of `positions`.
        """
        options = {} if self.layer_type is None else {"layer_type": self.layer_type}
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        try:
            made = self.embedding(like, positions, **options)
        except (
            IndexError
        ):  # M-RoPE in older releases needs all three axes, which are equal for text
            made = self.embedding(like, positions.expand(3, *positions.shape), **options)
        cos, sin = (each[0] if each.ndim > 3 else each for each in made)
        return cos.to(positions.device), sin.to(positions.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Rotation":
        """Return the same object, since its module belongs to the model, which is not copied."""
        return self


def rotations_of(
    model: PreTrainedModel, layers: Sequence[int], remedy: str = _NO_ROTATION
) -> dict[int, Rotation]:
    """Return the rotation of the keys of each layer, by its index.

    A layer without rotary embedding (some layers of Cohere 2 or SmolLM3) gets a rotation that
    changes nothing, because its keys do not depend on their position.

    Args:
        model: the model; the first call for it runs two forward passes over one token.
        layers: the indices of layers with full attention.
        remedy: the last sentence of the error message, without a full stop.

    Raises:
        UnsupportedModelError: the rotation depends on the length of the text, keys are stored as
            a latent, or no rotary embedding of the model explains the keys of a layer.
    """
    if model not in _known:
        _known[model] = _find_rotations(model, layers, remedy)
    return _known[model]


def shares_latent(model: PreTrainedModel) -> bool:
    """Return whether the model has latent attention, which stores one latent for all heads."""
    config = model.config.get_text_config(decoder=True)
    return bool(getattr(config, "kv_lora_rank", None))


def has_read_image(modules: Iterable[Any]) -> bool:
    """Return whether the model has read an image that has shifted the positions of later tokens.

    This holds for models with three position axes (Qwen2-VL, section 2.1), which store the shift
    of the positions in `rope_deltas`.

    Args:
        modules: the modules of the model.
    """
    shifts = (getattr(module, "rope_deltas", None) for module in modules)
    return any(isinstance(deltas, Tensor) and bool(deltas.any()) for deltas in shifts)


class States(Enum):
    """How a model handles its recurrent states when several tokens follow earlier ones."""

    NONE = auto()  # the model has no recurrent states
    GO_ON = auto()  # the states are updated
    BEGIN_ANEW = auto()  # the states are reset, so earlier tokens are forgotten, as in Jamba


_states: weakref.WeakKeyDictionary[Any, States] = weakref.WeakKeyDictionary()


def states_of(model: PreTrainedModel) -> States:
    """Return how the model handles its recurrent states; the first call runs the model.

    To find out, it fills a state with NaN and checks whether later tokens become NaN.
    """
    if model not in _states:
        on_meta = device_of(model).type == "meta"
        _states[model] = States.GO_ON if on_meta else _find_states(model)
    return _states[model]


@torch.no_grad()
def _find_states(model: PreTrainedModel) -> States:
    """Find out by running the model how it handles its recurrent states.

    The model reads two tokens, the first recurrent state is filled with NaN, and the model reads
    two more tokens. If their logits are finite, the model has reset its states. A model without
    such states gives `States.NONE`.
    """
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
    """Return the recurrent state of the first layer that has one, in its own shape and dtype.

    Returns:
        The tensor itself and no copy; None if no layer has a recurrent state.
    """
    held = (getattr(layer, "recurrent_states", None) or {} for layer in cache.layers)
    return next((state for each in held for state in each.values() if state is not None), None)


def _find_rotations(
    model: PreTrainedModel, layers: Sequence[int], remedy: str
) -> dict[int, Rotation]:
    """Compute what `rotations_of` returns, by running the model on one token at two positions.

    Raises:
        UnsupportedModelError: as in `rotations_of`.
    """
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    if (kind := length_dependent_rope(config)) is not None:
        raise wrong(
            "model",
            f"the rotary embedding of {name} depends on the length of the text (rope_type "
            f"{kind!r}), so stored keys cannot be moved to another position",
            remedy,
            UnsupportedModelError,
        )
    if shares_latent(model):
        raise wrong(
            "model",
            f"the model {name} uses latent attention, which stores a latent vector instead of "
            "rotated keys",
            remedy,
            UnsupportedModelError,
        )
    first, further = (_lone_keys(model, config, position) for position in (0, _FURTHER))
    return {
        index: _rotation_between(model, config, index, first[index], further[index], remedy)
        for index in layers
    }


def length_dependent_rope(config: Any) -> str | None:
    """Return the `rope_type` if keys depend on the length of the text, or None if they do not."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    kinds = (str(part.get("rope_type", "default")) for part in nested or [parameters])
    return next((kind for kind in kinds if "dynamic" in kind or kind == "longrope"), None)


@torch.no_grad()
def _lone_keys(model: PreTrainedModel, config: Any, position: int) -> list[Any]:
    """Run the model on a single token at `position`, and return the keys that are stored for it.

    Returns:
        For each layer a (1, Hkv, 1, D) tensor, or None if the layer stores no keys.
    """
    cache = DynamicCache(config=config)
    ids = torch.tensor([[config.vocab_size // 2]], device=device_of(model))
    positions = torch.full_like(ids, position)
    model(input_ids=ids, position_ids=positions, **passed(cache), use_cache=True)
    return [getattr(layer, "keys", None) for layer in cache.layers]


def _rotation_between(
    model: PreTrainedModel, config: Any, index: int, first: Tensor, further: Tensor, remedy: str
) -> Rotation:
    """Return the rotation that turns the key `first` of layer `index` into the key `further`.

    Raises:
        UnsupportedModelError: no candidate does.
    """
    for rotation in (Rotation(), *_candidates(model, config, index, first)):
        steps = torch.tensor([[_FURTHER]], device=first.device)
        difference = (rotation(first, steps) - further.float()).norm() / further.float().norm()
        if bool(difference < _TOLERANCE.get(first.dtype, _LOW_PRECISION_TOLERANCE)):
            return rotation
    raise wrong(
        "model",
        f"the keys of {type(model).__name__} in layer {index} depend on the position in another "
        "way than by its rotary embedding",
        remedy,
        UnsupportedModelError,
    )


def _candidates(
    model: PreTrainedModel, config: Any, index: int, keys: Tensor
) -> Iterator[Rotation]:
    """Yield every rotation that the code of the model may apply to the keys of a layer.

    Args:
        model: the model.
        config: the config of its text decoder.
        index: the index of the layer.
        keys: (1, Hkv, 1, D), a key of the layer; a rotation that does not fit its size is left out.
    """
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
            with contextlib.suppress(
                RuntimeError
            ):  # raised if the tables do not fit this head size
                rotation(keys, start)
                yield rotation


def _rotary_embeddings(model: PreTrainedModel) -> list[Any]:
    """Return the rotary modules of the text decoder, or of the whole model if it has none."""
    # `get_decoder` of ModernBERT's decoder returns its head, which has no rotary module.
    for part in (model.get_decoder(), model):
        named = [each for each in part.modules() if type(each).__name__.endswith("RotaryEmbedding")]
        if named:
            return named
    return []


_stored: weakref.WeakKeyDictionary[Any, tuple[set[Any], set[int]]] = weakref.WeakKeyDictionary()


def absent_layers(model: PreTrainedModel, layers: Sequence[int], counted: int) -> list[int]:
    """Return the layers that the configuration names but that were pruned from the model.

    Pruning removes modules from a model, and the configuration is often left unchanged. A layer
    exists if a module of the decoder has its index. For the other layers, the model is run on one
    token, because a model that loops over its layers stores keys under more indices than its
    modules have.

    Args:
        model: a model from which layers may have been removed.
        layers: indices of the attention layers to check.
        counted: how many layers of any kind the configuration names.
    """
    present = {getattr(module, "layer_idx", None) for module in model.get_decoder().modules()}
    missing = [index for index in layers if index not in present]
    if not missing or present == {None} or device_of(model).type == "meta":
        return []
    if max(index for index in present if index is not None) >= counted:
        return []  # more layers than the configuration says, which `update` will refuse
    # A model may be pruned after its first cache, so the result is kept for these modules only.
    if model not in _stored or _stored[model][0] != present:
        keys = _lone_keys(model, model.config.get_text_config(decoder=True), 0)
        _stored[model] = present, {index for index, key in enumerate(keys) if key is not None}
    return [index for index in missing if index not in _stored[model][1]]


def attention_modules(model: PreTrainedModel, layers: Sequence[int]) -> dict[int, list[Any]]:
    """Return the attention modules of each layer, by its index; an empty list if it has none."""
    by_layer: dict[int, list[Any]] = {index: [] for index in layers}
    for module in model.get_decoder().modules():
        if "Attention" in type(module).__name__ and getattr(module, "layer_idx", None) in by_layer:
            by_layer[module.layer_idx].append(module)
    return by_layer


@contextlib.contextmanager
def observing_inputs(module: Any, observe: Callable[[Tensor], object]) -> Iterator[None]:
    """Call a function with the inputs of a module during its forward passes within this block.

    Forward passes in other threads are ignored.

    Args:
        module: the module.
        observe: receives (B, N, hidden) states before each forward pass of the module.
    """
    thread = threading.get_ident()

    def pass_on(_: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if threading.get_ident() == thread:
            observe(named["hidden_states"] if "hidden_states" in named else inputs[0])

    hook = module.register_forward_pre_hook(pass_on, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def output_projections(model: PreTrainedModel, layers: Sequence[int]) -> dict[int, Any]:
    """Return the output projection of each layer's attention, by the layer's index.

    Raises:
        UnsupportedModelError: the attention of a layer does not have exactly one module with a
            known name (`o_proj`, `dense`, `c_proj` or `out_proj`).
    """
    projections: dict[int, Any] = {}
    for index, modules in attention_modules(model, layers).items():
        named = (getattr(module, name, None) for module in modules for name in _PROJECTIONS)
        parts = [part for part in named if part is not None]
        if len(parts) != 1 or not _is_projection(parts[0]):
            raise wrong(
                "model",
                "expected attention with an output projection called "
                f"{', '.join(_PROJECTIONS[:-1])} or {_PROJECTIONS[-1]}, but got "
                f"{type(model).__name__} with "
                f"{', '.join(type(part).__name__ for part in parts) or 'none'} in layer {index}",
                "Use a method that does not weight values by the output projection",
                UnsupportedModelError,
            )
        projections[index] = parts[0]
    return projections


@torch.no_grad()
def output_weight(projection: Any, dtype: torch.dtype) -> Tensor:
    """Return the weight matrix of an output projection, on the device where it computes.

    If the projection has adapters or quantized weights, it is applied to unit vectors, which gives
    the columns of the matrix.

    Args:
        projection: the module.
        dtype: the dtype of the states that it is applied to.

    Returns:
        (hidden, Hq * Dv).
    """
    if type(projection) is Conv1D:
        return weight_of(projection).to(device_of(projection)).T
    if type(projection) is nn.Linear and type(projection.weight) is nn.Parameter:
        return weight_of(projection).to(device_of(projection))
    units = torch.eye(projection.in_features, dtype=dtype, device=device_of(projection))
    moved: Tensor = projection(units) - projection(torch.zeros_like(units[:1]))  # removes the bias
    return moved.T


def _is_projection(module: Any) -> bool:
    return isinstance(module, Conv1D) or hasattr(module, "in_features")


def max_positions(model: Any) -> int | None:
    """Return how many positions the model has for prompt and answer; None without a limit."""
    text = model.config.get_text_config(decoder=True)
    names = ("model_max_length", "max_position_embeddings")
    return next((value for name in names if (value := getattr(text, name, None))), None)
