"""What cannot be served with compressed prompts, by name, before the first request."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from snapkv.errors import UnsupportedModelError
from snapkv.policies import TOVA, AdaKV
from snapkv_vllm.documents.words import Errand
from snapkv_vllm.layouts import FP8, LAYOUTS
from snapkv_vllm.limits import Limits
from snapkv_vllm.names import DECODE_BUDGET, PREFIX, wrong
from snapkv_vllm.plans import Plan
from snapkv_vllm.settings import ServingSettings
from snapkv_vllm.spans import NAME

ONE_SERVER = "each would have documents of its own; leave --api-server-count or --share out"
"""What is said where several processes would answer requests, and documents are shared."""

_STOCK = "serve the model with stock vLLM"
_WEIGHTS = "their files say which weights have read them, by those in the model's folder; leave"
_PLAIN = ("auto", "float16", "bfloat16", "float32")
_MOVABLE = (*_PLAIN, *FP8)


def _settings(vllm_config: Any) -> ServingSettings:
    return ServingSettings.from_config(vllm_config.additional_config)


def serves_heads_apart(vllm_config: Any) -> bool:
    """Whether heads of a layer may keep different numbers of tokens on this server."""
    return _settings(vllm_config).policy == AdaKV.name


def _graphs_of_prompts(vllm_config: Any) -> bool:
    from vllm.config.compilation import CUDAGraphMode

    mode = vllm_config.compilation_config.cudagraph_mode
    return bool(mode is not None and mode.mixed_mode() == CUDAGraphMode.FULL)


def _in_parallel(vllm_config: Any) -> bool:
    return bool(vllm_config.parallel_config.tensor_parallel_size > 1)


def _in_contexts(vllm_config: Any) -> bool:
    prefill = getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1)
    return bool(prefill > 1)


def _other_than(names: Sequence[str], given: str) -> str:
    return "" if given in names else str(given)


_Rules = tuple[tuple[str, Callable[[Any], Any], str], ...]
"""What is set, whether it is in vLLM's configuration (by its name, if it may be one of several),
and why that is refused and what to do."""

_ALWAYS: _Rules = (
    (
        "drafts of another kind than n-grams",
        lambda c: c.speculative_config is not None and c.speculative_config.method != "ngram",
        "a model that drafts has a cache of its own, in which no window votes, and no other kind "
        'was tested; set "method" in --speculative-config to "ngram", or leave it out',
    ),
    (
        "decode context parallelism",
        lambda c: c.parallel_config.decode_context_parallel_size > 1,
        "a prompt's blocks are spread over processes; use tensor parallelism",
    ),
    (
        "prefill context parallelism",
        _in_contexts,
        "a prompt's queries are spread over processes; use tensor parallelism",
    ),
    (
        "two micro-batches in one step",
        lambda c: c.parallel_config.use_ubatching,
        "queries that vote are looked up in the whole batch; leave --enable-dbo out",
    ),
    (
        "latent attention (MLA) in several tensor parallel processes",
        lambda c: c.model_config.use_mla and _in_parallel(c),
        "all heads vote on one latent, and each process has some of them; use data parallelism",
    ),
    (
        "a KV connector",
        lambda c: c.kv_transfer_config is not None,
        "what a compressed request holds is no prefix that another server could load; leave "
        "--kv-transfer-config out",
    ),
    (
        "a model without attention",
        lambda c: c.model_config.is_attention_free,
        f"its state has no positions to drop; {_STOCK}",
    ),
    (
        "an encoder-decoder",
        lambda c: c.model_config.is_encoder_decoder,
        f"its prompt is not in the cache of the decoder; {_STOCK}",
    ),
    (
        "a pooling model",
        lambda c: c.model_config.runner_type == "pooling",
        f"it generates nothing from its cache; {_STOCK}",
    ),
    (
        "a KV cache in the format",
        lambda c: _other_than(_MOVABLE, c.cache_config.cache_dtype),
        f"only {', '.join(FP8)} have one scale for a layer; pass one of them to --kv-cache-dtype, "
        "or leave it out",
    ),
    (
        "latent attention (MLA) and a KV cache in the format",
        lambda c: c.model_config.use_mla and _other_than(_PLAIN, c.cache_config.cache_dtype),
        "this was never tested; leave --kv-cache-dtype out",
    ),
    (
        "CUDA graphs of whole prompt steps",
        _graphs_of_prompts,
        "queries are put aside between graphs; set cudagraph_mode to FULL_AND_PIECEWISE",
    ),
)
_HELD_ANSWERS: _Rules = (
    (
        "drafts where answers are held to a budget",
        lambda c: c.speculative_config is not None,
        "a rejected draft would have counted; leave --speculative-config or --decode-budget out",
    ),
    (
        "r-kv while generating and latent attention (MLA)",
        lambda c: _settings(c).limits.decode_policy == "r-kv" and c.model_config.use_mla,
        "a latent is no key that could be compared; pass --decode-policy tova",
    ),
    (
        "tova while generating and tensor parallelism",
        lambda c: _settings(c).limits.decode_policy == TOVA.name and _in_parallel(c),
        "it averages over heads of other processes; pass --decode-policy r-kv",
    ),
)
_SHARED: _Rules = (
    (
        "shared documents and speculative decoding",
        lambda c: c.speculative_config is not None,
        "drafts behind a document were not tested; leave --share or --speculative-config out",
    ),
    (
        "shared documents and adapters (LoRA)",
        lambda c: c.lora_config is not None,
        "a document would have to be read with each of them; leave --share or --enable-lora out",
    ),
    (
        "shared documents and latent attention (MLA)",
        lambda c: c.model_config.use_mla,
        "reading a text again was not tested with latents; leave --share out",
    ),
    (
        "shared documents and positions in several dimensions (M-RoPE)",
        lambda c: c.model_config.uses_mrope,
        "a text is read again by positions of one dimension; leave --share out",
    ),
    (
        "shared documents, adakv and tensor parallelism",
        lambda c: serves_heads_apart(c) and _in_parallel(c),
        "this was never tested; use --policy snapkv, or leave --share out",
    ),
    (
        "shared documents and sleep mode",
        lambda c: c.model_config.enable_sleep_mode,
        "an engine that sleeps forgets its cache; leave --share or --enable-sleep-mode out",
    ),
    (
        "shared documents in several API servers",
        lambda c: c.parallel_config._api_process_count > 1,
        ONE_SERVER,
    ),
    (
        "shared documents and data parallelism",
        lambda c: c.parallel_config.data_parallel_size > 1,
        "a request may reach an engine that has not read its document; leave --share out",
    ),
)
_SESSIONS: _Rules = (
    (
        "sessions and positions in several dimensions (M-RoPE)",
        lambda c: c.model_config.uses_mrope,
        "going on from a history was not tested with them; leave --sessions out",
    ),
    (
        "sessions and speculative decoding",
        lambda c: c.speculative_config is not None,
        "drafts behind a history were not tested; leave --sessions or --speculative-config out",
    ),
    (
        "sessions and latent attention (MLA)",
        lambda c: c.model_config.use_mla,
        "going on from a history was not tested with latents; leave --sessions out",
    ),
    (
        "sessions and sleep mode",
        lambda c: c.model_config.enable_sleep_mode,
        "an engine that sleeps forgets its cache; leave --sessions or --enable-sleep-mode out",
    ),
    (
        "sessions and pipeline parallelism",
        lambda c: c.parallel_config.pipeline_parallel_size > 1,
        "steps of one request in several places were not tested; leave --sessions out",
    ),
)
_OF_A_LIBRARY: _Rules = (
    (
        "documents of a library and a KV cache in the format",
        lambda c: _other_than(_PLAIN, c.cache_config.cache_dtype),
        "files hold numbers as the model has them; leave --kv-cache-dtype or --share-library out",
    ),
    (
        "documents of a library and tensor or pipeline parallelism",
        lambda c: c.parallel_config.world_size > 1,
        "each process has a part of every document; leave --share-library out",
    ),
    (
        "documents of a library and workers on Ray",
        lambda c: c.parallel_config.distributed_executor_backend == "ray",
        "they may run where the library is not; leave --share-library out",
    ),
    (
        "documents of a library and quantised weights",
        lambda c: c.model_config.quantization is not None,
        f"{_WEIGHTS} --quantization or --share-library out",
    ),
    (
        "documents of a library and a model that is changed (--hf-overrides)",
        lambda c: c.model_config.hf_overrides,
        f"{_WEIGHTS} --hf-overrides or --share-library out",
    ),
    (
        "documents of a library and made-up weights (--load-format dummy)",
        lambda c: c.load_config.load_format == "dummy",
        f"{_WEIGHTS} --load-format or --share-library out",
    ),
    (
        "documents of a library and a model that is not in one",
        lambda c: not Path(c.model_config.model).is_dir(),
        "their files say which weights have read them; pass the folder that the model was "
        "downloaded to, or leave --share-library out",
    ),
)
_ADAKV: _Rules = (
    (
        "adakv and latent attention (MLA)",
        lambda c: c.model_config.use_mla,
        "all heads of a layer keep one set, so there is nothing to share out; use --policy snapkv",
    ),
)
_TOVA: _Rules = (
    (
        "tova and tensor parallelism",
        _in_parallel,
        "it averages over heads of other processes; use --policy snapkv",
    ),
)

_TABLE: tuple[tuple[Callable[[ServingSettings], Any], _Rules], ...] = (
    (lambda s: True, _ALWAYS),
    (lambda s: s.limits.decode_budget, _HELD_ANSWERS),
    (lambda s: s.sharing is not None, _SHARED),
    (lambda s: s.sessions is not None, _SESSIONS),
    (lambda s: s.sharing is not None and s.sharing.library, _OF_A_LIBRARY),
    (lambda s: s.policy == AdaKV.name, _ADAKV),
    (lambda s: s.policy == TOVA.name, _TOVA),
)
"""For which servers what is refused."""


def require_supported(vllm_config: Any) -> None:
    """Raise UnsupportedModelError where prompts cannot be compressed with this configuration."""
    settings = _settings(vllm_config)
    for rules in (rules for concerns, rules in _TABLE if concerns(settings)):
        for what, applies, remedy in rules:
            if found := applies(vllm_config):
                got = f" {found}" if isinstance(found, str) else ""
                raise UnsupportedModelError(
                    f"snapkv: cannot compress prompts with {what}{got}: {remedy}"
                )
    processes = vllm_config.parallel_config.tensor_parallel_size
    if processes > (kv_heads := vllm_config.model_config.get_total_num_kv_heads()):
        raise UnsupportedModelError(
            f"snapkv: cannot compress prompts with {processes} tensor parallel processes and "
            f"{kv_heads} KV heads: copies of a head would keep different tokens; use at most "
            f"--tensor-parallel-size {kv_heads}"
        )


# What a request may not ask for.


def require_no_promise(limits: Limits) -> None:
    """Refuse a session where answers are promised to be held to a budget, which it cannot be."""
    if promised := limits.decode_budget:
        remedy = "send whole requests, or start the server without --decode-budget"
        none = "none for a session, whose prompt goes on after its end"
        raise wrong(DECODE_BUDGET, none, promised, remedy)


def require_no_spans(sampling_params: Any) -> None:
    """Refuse spans of a session, whose prompt is not all there."""
    if sampling_params is not None and NAME in (sampling_params.extra_args or {}):
        whole, got = "a prompt that is all there", "a session, whose prompt grows"
        raise wrong(NAME, whole, got, "send it as a request of its own")


def require_one_position(plan: Plan, request: Any, vllm_config: Any) -> None:
    """Refuse to compress images where they have positions in several dimensions (M-RoPE)."""
    is_compressed = plan.shared_tokens is not None
    if is_compressed and request.mm_features and vllm_config.model_config.uses_mrope:
        text = "text alone where positions have several dimensions (M-RoPE)"
        raise wrong("prompt", text, "images", f"send it with {PREFIX}budget 0")


def require_sharing(settings: ServingSettings, asked: Errand, sampling_params: Any) -> None:
    """Refuse a request about a document where the server or the request's settings forbid it."""
    if settings.sharing is None:
        none = "none on this server, which shares no documents"
        raise wrong(asked.verb, none, "one", "start it with --share")
    if (asked_for := sampling_params.prompt_logprobs) is not None:
        none = f"none beside {asked.verb}, since a document is not read with the request"
        raise wrong("prompt_logprobs", none, asked_for, "leave it out")


# What a model may not have.


def compressible_layers(layers: dict[str, Any], specs: dict[str, Any]) -> set[str]:
    """Which layers of the model are compressed: all with full attention.

    Layers with a sliding window or a recurrent state hold little, and stay as they are.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    found = {name for name, spec in specs.items() if isinstance(spec, FullAttentionSpec)}
    for name in specs:
        if name in found:
            _require_movable(name, layers.get(name), specs[name])
    for name, layer in layers.items():
        if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            _refuse(name, "reads another layer's cache", "a cache for each layer")
    if not found:
        kinds = ", ".join(sorted({type(spec).__name__ for spec in specs.values()})) or "nothing"
        _refuse("the model", f"keeps {kinds}", "layers with full attention")
    return found


def _require_movable(name: str, layer: Any, spec: Any) -> None:
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
    if (form := getattr(layer, "kv_cache_dtype", "auto")) not in _MOVABLE:
        _refuse(name, f"has a cache in the format {form}", f"one of {', '.join(_MOVABLE)}")
    if form in FP8 and layer._k_scale.numel() > 1:
        _refuse(name, "has a scale for every head", "one scale for a layer")
    if getattr(layer, "use_sparse", False):
        _refuse(name, "chooses the tokens it attends to", "attention to all of them")


def _refuse(layer: str, got: str, expected: str) -> NoReturn:
    raise UnsupportedModelError(
        f"snapkv: cannot compress prompts: {layer} {got}, expected {expected}; {_STOCK}"
    )


def require_heads_apart(name: str, layer: Any) -> None:
    """Raise UnsupportedModelError unless a layer's heads can hold different numbers of tokens."""
    if getattr(layer.impl, "sinks", None) is not None:
        raise UnsupportedModelError(
            f"snapkv: cannot compress prompts with adakv: {name} has a sink for every query head, "
            "which the kernels look up by the head, while every head is a sequence of its own; use "
            "--policy snapkv"
        )


def compressed_managers(managers: Sequence[Any]) -> dict[int, Any]:
    """The managers of the KV cache groups that are compressed, by the group's index."""
    from snapkv_vllm.blocks import CompressedManager

    found = {group: one for group, one in enumerate(managers) if type(one) is CompressedManager}
    if not found:
        kinds = ", ".join(type(manager).__name__ for manager in managers)
        raise UnsupportedModelError(
            f"snapkv: expected a group of blocks that may be compressed, got {kinds}; pass "
            "worker_cls and scheduler_cls together, as snapkv_vllm.engine_args does"
        )
    return found
