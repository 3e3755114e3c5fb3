"""Which layers of a model can be compressed; others are refused by name, before any request."""

import itertools
from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from snapkv.errors import UnsupportedModelError
from snapkv_vllm.admission.compatibility import MOVABLE, STOCK
from snapkv_vllm.layouts import FP8, LAYOUTS


def compressible_layers(layers: dict[str, Any], specs: dict[str, Any]) -> set[str]:
    """Which layers of the model are compressed: all with full attention.

    Layers with a sliding window or a recurrent state hold little, and stay as they are.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    found = {name for name, spec in specs.items() if isinstance(spec, FullAttentionSpec)}
    for name in specs:
        if name in found:
            _require_compressible(name, layers.get(name), specs[name])
    for name, layer in layers.items():
        if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            _raise_unsupported(name, "reads another layer's cache", "a cache for each layer")
    if not found:
        kinds = ", ".join(sorted({type(spec).__name__ for spec in specs.values()})) or "nothing"
        _raise_unsupported("the model", f"keeps {kinds}", "layers with full attention")
    return found


def _require_compressible(name: str, layer: Any, spec: Any) -> None:
    from snapkv_vllm.blocks import COUNTERPARTS

    if layer is None or type(spec) not in COUNTERPARTS:
        _raise_unsupported(name, f"keeps a {type(spec).__name__}", "full attention")
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        _raise_unsupported(
            name, "has a window in one group with full attention", "a group of its own"
        )
    if getattr(layer.impl, "alibi_slopes", None) is not None:
        _raise_unsupported(
            name, "has ALiBi", "attention that does not look at distances in the cache"
        )
    backend = layer.get_attn_backend().get_name()
    if backend not in LAYOUTS:
        _raise_unsupported(name, f"runs on {backend}", f"one of {', '.join(LAYOUTS)}")
    if (form := getattr(layer, "kv_cache_dtype", "auto")) not in MOVABLE:
        _raise_unsupported(
            name, f"has a cache in the format {form}", f"one of {', '.join(MOVABLE)}"
        )
    if form in FP8 and layer._k_scale.numel() > 1:
        _raise_unsupported(name, "has a scale for every head", "one scale for a layer")
    if getattr(layer, "use_sparse", False):
        _raise_unsupported(name, "chooses the tokens it attends to", "attention to all of them")


def _raise_unsupported(layer: str, got: str, expected: str) -> NoReturn:
    raise UnsupportedModelError(
        f"snapkv: cannot compress prompts: {layer} {got}, expected {expected}; {STOCK}"
    )


def require_splittable_heads(name: str, layer: Any) -> None:
    """Raise UnsupportedModelError unless a layer's heads can hold different numbers of tokens."""
    if getattr(layer.impl, "sinks", None) is not None:
        raise UnsupportedModelError(
            f"snapkv: cannot let heads differ in length: {name} has a sink for every query head, "
            "which the kernels look up by the head, while every head is a sequence of its own; use "
            "--policy snapkv"
        )


def require_shared_pages(caches: Sequence[Tensor], layers: int) -> None:
    """Raise UnsupportedModelError unless a page of one layer can hold tokens of another.

    `caches` are those of layers that are prepared together, of so many layers in all.
    """
    starts = [cache.storage_offset() for cache in caches]
    steps = {end - start for start, end in itertools.pairwise(starts)}
    kinds = {
        (cache.untyped_storage().data_ptr(), cache.shape, cache.stride(), cache.dtype)
        for cache in caches
    }
    if len(caches) != layers or len(kinds) > 1 or len(steps) > 1 or min(steps, default=1) <= 0:
        raise UnsupportedModelError(
            "snapkv: cannot compress prompts with across-layers: expected full attention in layers "
            "that are alike, whose caches are one tensor, layer by layer, got others; "
            "use --policy adakv"
        )
