"""What cannot be served with compressed prompts, by name, before the first request."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from snapkv.errors import UnsupportedModelError
from snapkv.serving.settings import ServingSettings

LAYOUTS = {
    "CPU_ATTN": "snapkv.serving.layouts.cpu",
    "FLASH_ATTN": "snapkv.serving.layouts.plain",
    "TRITON_ATTN": "snapkv.serving.layouts.plain",
}
"""Where the layout of each attention backend's cache is written down."""

_Rule = tuple[str, Callable[[Any], Any], str]

# What is set, when, and what to do about it.
_RULES: tuple[_Rule, ...] = (
    (
        "speculative decoding",
        lambda c: c.speculative_config is not None,
        "drafts are verified against positions that were dropped; leave --speculative-config out",
    ),
    (
        "decode context parallelism",
        lambda c: c.parallel_config.decode_context_parallel_size > 1,
        "a prompt's blocks are spread over processes; use tensor parallelism",
    ),
    (
        "prefill context parallelism",
        lambda c: getattr(c.parallel_config, "prefill_context_parallel_size", 1) > 1,
        "a prompt's queries are spread over processes; use tensor parallelism",
    ),
    (
        "two micro-batches in one step",
        lambda c: c.parallel_config.use_ubatching,
        "queries that vote are looked up in the whole batch; leave --enable-dbo out",
    ),
    (
        "a KV connector",
        lambda c: c.kv_transfer_config is not None,
        "it would send blocks that no longer hold what their hash says; leave it out",
    ),
    (
        "latent attention (MLA)",
        lambda c: c.model_config.use_mla,
        "its cache holds one latent for all heads; serve the model with stock vLLM",
    ),
    (
        "layers without full attention",
        lambda c: c.model_config.is_hybrid or c.model_config.is_attention_free,
        "their state has no positions to drop; serve the model with stock vLLM",
    ),
    (
        "an encoder-decoder",
        lambda c: c.model_config.is_encoder_decoder,
        "its prompt is not in the cache of the decoder; serve the model with stock vLLM",
    ),
    (
        "a pooling model",
        lambda c: c.model_config.runner_type == "pooling",
        "it generates nothing from its cache; serve the model with stock vLLM",
    ),
    (
        "positions in several dimensions (M-RoPE)",
        lambda c: c.model_config.uses_mrope,
        "this was never tested; serve the model with stock vLLM",
    ),
    (
        "a quantised KV cache",
        lambda c: c.cache_config.cache_dtype not in ("auto", "float16", "bfloat16", "float32"),
        "its rows cannot be moved bit for bit with their scales; leave --kv-cache-dtype out",
    ),
    (
        "vLLM's second model runner",
        lambda c: c.use_v2_model_runner,
        "it has no place to give the lengths of compressed requests; set "
        "VLLM_USE_V2_MODEL_RUNNER=0",
    ),
    (
        "CUDA graphs of whole prompt steps",
        lambda c: _graphs_of_prompts(c.compilation_config.cudagraph_mode),
        "queries are put aside between graphs; set cudagraph_mode to FULL_AND_PIECEWISE",
    ),
)


def require_supported(vllm_config: Any) -> None:
    """Raise where prompts cannot be compressed with this configuration.

    Raises:
        UnsupportedModelError: names what is in the way, and what to do.
    """
    for what, applies, remedy in _RULES:
        if applies(vllm_config):
            raise UnsupportedModelError(f"snapkv: cannot compress prompts with {what}: {remedy}")
    _require_whole_heads(vllm_config)


def _require_whole_heads(vllm_config: Any) -> None:
    """Each process must see all query heads that share the KV heads it stores."""
    tensor_parallel = vllm_config.parallel_config.tensor_parallel_size
    kv_heads = vllm_config.model_config.get_total_num_kv_heads()
    if tensor_parallel > kv_heads:
        raise UnsupportedModelError(
            f"snapkv: cannot compress prompts with {tensor_parallel} tensor parallel processes and "
            f"{kv_heads} KV heads: copies of a head would keep different tokens; use at most "
            f"--tensor-parallel-size {kv_heads}"
        )
    settings = ServingSettings.from_config(vllm_config.additional_config)
    if tensor_parallel > 1 and settings.policy == "tova":
        raise UnsupportedModelError(
            "snapkv: cannot compress prompts with tova and tensor parallelism: it averages over "
            "heads of other processes; use --policy snapkv"
        )


def _graphs_of_prompts(mode: Any) -> bool:
    from vllm.config.compilation import CUDAGraphMode

    return bool(mode is not None and mode.mixed_mode() == CUDAGraphMode.FULL)


def require_supported_layers(layers: dict[str, Any], specs: dict[str, Any]) -> None:
    """Raise unless all layers of the model store keys and values as this plugin can move them.

    Args:
        layers: vLLM's attention layers by name.
        specs: what each keeps in its cache.

    Raises:
        UnsupportedModelError: names the layer and what is in the way.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    for name, spec in specs.items():
        layer = layers.get(name)
        if layer is None or type(spec) is not FullAttentionSpec:
            _refuse(name, f"keeps a {type(spec).__name__}", "full attention")
        elif spec.sliding_window is not None or spec.attention_chunk_size is not None:
            _refuse(name, "has a sliding or chunked window", "full attention")
        elif getattr(layer.impl, "alibi_slopes", None) is not None:
            _refuse(name, "has ALiBi", "attention that does not look at distances in the cache")
        elif layer.get_attn_backend().get_name() not in LAYOUTS:
            backend = layer.get_attn_backend().get_name()
            _refuse(name, f"runs on {backend}", f"one of {', '.join(LAYOUTS)}")
    for name, layer in layers.items():
        if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            _refuse(name, "reads another layer's cache", "a cache for each layer")
    if not specs:
        _refuse("the model", "has no attention layers", "full attention")


def _refuse(layer: str, got: str, expected: str) -> None:
    raise UnsupportedModelError(
        f"snapkv: cannot compress prompts: {layer} {got}, expected {expected}; serve the model "
        "with stock vLLM"
    )


def require_supported_blocks(managers: Sequence[Any], kind: type) -> None:
    """Raise unless one manager of compressed blocks holds all layers.

    Raises:
        UnsupportedModelError: vLLM put the layers into other groups than the workers asked for.
    """
    kinds: Iterable[str] = (type(manager).__name__ for manager in managers)
    if len(managers) != 1 or not isinstance(managers[0], kind):
        raise UnsupportedModelError(
            f"snapkv: expected one group of blocks for all layers, got {', '.join(kinds)}; pass "
            "worker_cls and scheduler_cls together, as snapkv.serving.engine_args does"
        )
