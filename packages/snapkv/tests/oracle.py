"""The judge of every family: a full cache whose attention is masked to the kept positions.

It shares nothing with the library but the kept positions: transformers' own DynamicCache holds
every token, and each layer's eager attention gets a bias that hides what the compressed cache has
dropped. Decoding on it must give the logits of decoding on the compressed cache.
"""

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from snapkv import uninstall

_hidden: dict[int, torch.Tensor] = {}
_handed_out: dict[int, tuple[int, torch.Tensor]] = {}
_updated: list[int] = []


def _layer_of(key: torch.Tensor) -> int | None:
    """Return the layer that returned these keys, or the layer that was updated last."""
    if key.data_ptr() in _handed_out:  # perhaps by another layer, where layers share them
        return _handed_out[key.data_ptr()][0]
    return _updated[-1] if _updated else None


@contextlib.contextmanager
def _watching(full):
    """Record which layer of a full cache was updated last within this block."""
    update = full.update

    def updating(key_states, value_states, layer_idx, *args, **options):
        keys, values = update(key_states, value_states, layer_idx, *args, **options)
        _handed_out[keys.data_ptr()] = (layer_idx, keys)  # which lives on, so its place is its own
        _updated.append(layer_idx)
        return keys, values

    for layer_idx, layer in enumerate(full.layers):  # an image's keys are not handed out again
        if (keys := getattr(layer, "keys", None)) is not None:
            _handed_out[keys.data_ptr()] = (layer_idx, keys)
    full.update = updating
    try:
        yield
    finally:
        del full.update
        _handed_out.clear()
        _updated.clear()


def _masked_eager(module, query, key, value, attention_mask, **options):
    """Compute eager attention that hides the evicted columns of this layer from later tokens."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    if options.get("scaling") is None:  # as sdpa takes it (the picture tower of Llama 4)
        options["scaling"] = query.shape[-1] ** -0.5
    layer_idx = _layer_of(key) if _updated else getattr(module, "layer_idx", None)
    hidden = _hidden.get(layer_idx)
    if hidden is not None and hidden.shape[-1] < key.shape[2]:
        hidden = hidden.repeat_interleave(query.shape[0] // hidden.shape[0], dim=0)
        heads = query.shape[1] // hidden.shape[1]
        bias = torch.zeros(
            query.shape[0], query.shape[1], query.shape[2], key.shape[2], dtype=query.dtype
        )
        columns = hidden.repeat_interleave(heads, dim=1)[:, :, None, :]
        bias[..., : hidden.shape[-1]].masked_fill_(columns, torch.finfo(query.dtype).min)
        attention_mask = torch.minimum(attention_mask, bias)
    return eager(module, query, key, value, attention_mask, **options)


AttentionInterface.register("masked_oracle", _masked_eager)
AttentionMaskInterface.register("masked_oracle", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def unwrapped(model: PreTrainedModel, implementation: str) -> PreTrainedModel:
    """Return a copy of the model that the library has not wrapped."""
    reference = copy.deepcopy(model)
    uninstall(reference)
    reference.set_attn_implementation(implementation)
    return reference


def masked_judge(model: PreTrainedModel) -> PreTrainedModel:
    """Return an `unwrapped` copy whose attention hides the columns that the caller sets."""
    reference = unwrapped(model, "eager")
    reference.set_attn_implementation("masked_oracle")
    return reference


def hidden_columns(cache, prompt_tokens: int, pads=None) -> dict[int, torch.Tensor]:
    """Return the prompt columns that the cache has evicted, (B, H, T) bool per compressed layer."""
    hidden = {}
    for layer_idx in cache.compressed_layers:
        kept = cache.kept_positions(layer_idx)
        columns = kept if pads is None else kept + pads[:, None, None]
        mask = torch.ones(*kept.shape[:2], prompt_tokens + 1, dtype=torch.bool)
        columns = columns.masked_fill((kept < 0) | (columns > prompt_tokens), prompt_tokens)
        hidden[layer_idx] = mask.scatter(2, columns, False)[..., :prompt_tokens]
    return hidden


@torch.no_grad()
def masked_decode_logits(
    model: PreTrainedModel, cache, ids: torch.Tensor, continuation: torch.Tensor, mask=None
) -> torch.Tensor:
    """Return the logits, (B, N, V), of reading `continuation` token by token after `ids`."""
    reference = masked_judge(model)
    full = DynamicCache(config=reference.config)
    mask, prompt = torch.ones_like(ids) if mask is None else mask, ids.shape[1]
    pads = (mask == 0).sum(-1)
    reference(ids, past_key_values=full, attention_mask=mask, position_ids=_positions(ids, mask))
    logits = []
    for token in continuation.split(1, dim=1):
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        hidden, positions = hidden_columns(cache, prompt, pads), _positions(token, mask)
        logits.append(masked_pass(reference, full, hidden, token, mask, positions)[:, -1])
    return torch.stack(logits, dim=1)


@torch.no_grad()
def masked_pass(reference: PreTrainedModel, full, hidden: dict, ids, mask, positions):
    """Return the logits, (B, N, V), of one pass over a full cache that hides earlier columns.

    `reference` is a `masked_judge`, `hidden` (B, H, seen) bool per layer.
    """
    _hidden.update(hidden)
    try:
        with _watching(full):
            return reference(
                ids, past_key_values=full, attention_mask=mask, position_ids=positions
            ).logits
    finally:
        _hidden.clear()


@contextlib.contextmanager
def hiding_by_step(full, hidden: list[dict]) -> Iterator[Callable[[], None]]:
    """Hide columns from the passes of a judge over a full cache; `hidden` has one entry per pass.

    The caller must call the yielded function after each pass.
    """
    steps = iter(hidden)

    def step() -> None:
        _hidden.clear()
        _hidden.update(next(steps, {}))

    step()
    try:
        with _watching(full):
            yield step
    finally:
        _hidden.clear()


def _positions(ids, mask):
    return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
