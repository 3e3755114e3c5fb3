"""Which layers of a model can be compressed. Models with other layers are refused before the first
request.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from snapkv.errors import UnsupportedModelError, wrong
from snapkv_vllm.admission.compatibility import MOVABLE, STOCK
from snapkv_vllm.layouts import FP8, LAYOUTS


def compressible_layers(layers: dict[str, Any], specs: dict[str, Any]) -> set[str]:
    """Return the names of the layers that are compressed, which are all layers with full attention.

    Layers with a sliding window or a recurrent state store little and are not compressed.

    Args:
        layers: vLLM's attention layers, by name.
        specs: vLLM's specs of all layers that have a cache, by name.

    Raises:
        UnsupportedModelError: no layer has full attention, a layer of any kind reads the cache of
            another layer, or one with full attention cannot be compressed.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    found = {name for name, spec in specs.items() if isinstance(spec, FullAttentionSpec)}
    for name in specs:
        if name in found:
            _require_compressible(name, layers.get(name), specs[name])
    for name, layer in layers.items():
        if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            _refuse(name, "reads another layer's cache", "a cache for each layer")
    if not found:
        kinds = ", ".join(sorted({type(spec).__name__ for spec in specs.values()})) or "nothing"
        _refuse("the model", f"keeps {kinds}", "layers with full attention")
    return found


def _require_compressible(name: str, layer: Any, spec: Any) -> None:
    """Check that a layer with full attention can be compressed.

    Args:
        name: the name of the layer, for the error.
        layer: vLLM's attention layer; None if it is not one, which is refused.
        spec: vLLM's spec of its cache.

    Raises:
        UnsupportedModelError: the kind of attention, the backend or the cache format of the layer
            is not supported.
    """
    from snapkv_vllm.blocks import COUNTERPARTS

    if layer is None or type(spec) not in COUNTERPARTS:
        _refuse(name, f"keeps a {type(spec).__name__}", "full attention")
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        _refuse(name, "has a window in one group with full attention", "a group of its own")
    if getattr(layer.impl, "alibi_slopes", None) is not None:
        _refuse(name, "has ALiBi", "attention that does not look at distances in the cache")
    backend = layer.get_attn_backend().get_name()
    if backend not in LAYOUTS:
        _refuse(name, f"runs on {backend}", f"one of {', '.join(LAYOUTS)}")
    if (form := getattr(layer, "kv_cache_dtype", "auto")) not in MOVABLE:
        _refuse(name, f"has a cache in the format {form}", f"one of {', '.join(MOVABLE)}")
    if form in FP8 and layer._k_scale.numel() > 1:
        _refuse(name, "has a scale for every head", "one scale for a layer")
    if getattr(layer, "use_sparse", False):
        _refuse(name, "chooses the tokens it attends to", "attention to all of them")


def _refuse(layer: str, got: str, expected: str) -> NoReturn:
    """Raise the error that says which layer of the model cannot be compressed, and why.

    Args:
        layer: the name of the layer, or "the model".
        got: what it has or does, as a clause that follows the name.
        expected: what compressed prompts need instead, as a noun phrase.

    Raises:
        UnsupportedModelError: always.
    """
    problem = f"{layer} {got}, but compressed prompts need {expected}"
    raise wrong("snapkv", problem, STOCK, UnsupportedModelError)


def require_splittable_heads(name: str, layer: Any) -> None:
    """Check that the heads of a layer can store different numbers of tokens.

    Raises:
        UnsupportedModelError: the layer has attention sinks.
    """
    if getattr(layer.impl, "sinks", None) is not None:
        # Kernels look sinks up by the number of the head, and see each head as a sequence.
        problem = (
            f"heads cannot keep different numbers of tokens, because {name} uses attention sinks"
        )
        raise wrong("snapkv", problem, "Use --policy snapkv", UnsupportedModelError)


def require_shared_pages(caches: Sequence[Tensor], layers: int) -> None:
    """Check that a page of one layer can also store tokens of any other layer. A single layer is
    always accepted.

    Args:
        caches: the caches of the layers that are prepared together.
        layers: how many layers are compressed in total.

    Raises:
        UnsupportedModelError: these are not all layers, or their caches differ in shape, strides or
            dtype, or do not follow each other at equal distances in one tensor.
    """
    starts = [cache.storage_offset() for cache in caches]
    steps = {end - start for start, end in itertools.pairwise(starts)}
    kinds = {
        (cache.untyped_storage().data_ptr(), cache.shape, cache.stride(), cache.dtype)
        for cache in caches
    }
    if len(caches) != layers or len(kinds) > 1 or len(steps) > 1 or min(steps, default=1) <= 0:
        problem = "across-layers only works if all layers have the same size and share one tensor"
        raise wrong("snapkv", problem, "Use --policy adakv", UnsupportedModelError)
