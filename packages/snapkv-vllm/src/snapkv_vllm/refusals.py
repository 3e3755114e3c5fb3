"""What cannot be served with compressed prompts, by name, before the first request."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from snapkv.errors import InvalidArgumentError, UnsupportedModelError
from snapkv.policies import TOVA, AdaKV
from snapkv_vllm.documents.keepable import IN_A_FOLDER
from snapkv_vllm.documents.words import Errand
from snapkv_vllm.layouts import LAYOUTS
from snapkv_vllm.limits import Limits
from snapkv_vllm.names import wrong
from snapkv_vllm.plans import Plan
from snapkv_vllm.settings import ServingSettings

_Rule = tuple[str, Callable[[Any], Any], str]

ONE_SERVER = "each would have documents of its own; leave --api-server-count or --share out"
"""What is said where several processes would answer requests, and documents are shared."""


def _settings(vllm_config: Any) -> ServingSettings:
    return ServingSettings.from_config(vllm_config.additional_config)


def _shares(vllm_config: Any) -> bool:
    return _settings(vllm_config).sharing is not None


def _evicts_by(vllm_config: Any, policy: str) -> bool:
    limits = _settings(vllm_config).limits
    return bool(limits.decode_budget) and limits.decode_policy == policy


def _shortest_step(vllm_config: Any) -> int:
    """The most tokens of one request that a step may be given."""
    scheduler = vllm_config.scheduler_config
    steps = (scheduler.max_num_batched_tokens, scheduler.long_prefill_token_threshold)
    return min(int(tokens) for tokens in steps if tokens)


def _graphs_of_prompts(vllm_config: Any) -> bool:
    from vllm.config.compilation import CUDAGraphMode

    mode = vllm_config.compilation_config.cudagraph_mode
    return bool(mode is not None and mode.mixed_mode() == CUDAGraphMode.FULL)


def _in_parallel(vllm_config: Any, policy: str | None = None) -> bool:
    """Whether heads are spread over processes, where this policy is served if one is given."""
    several = vllm_config.parallel_config.tensor_parallel_size > 1
    return several and policy in (None, _settings(vllm_config).policy)


def serves_heads_apart(vllm_config: Any) -> bool:
    """Whether heads of a layer may keep different numbers of tokens on this server."""
    return _settings(vllm_config).policy == AdaKV.name


# What is set, when, and what to do about it.
_RULES: tuple[_Rule, ...] = (
    (
        "drafts of another kind than n-grams",
        lambda c: c.speculative_config is not None and c.speculative_config.method != "ngram",
        "a model that drafts has a cache of its own, in which no window votes, and no other kind "
        'was tested; set "method" in --speculative-config to "ngram", or leave it out',
    ),
    (
        "drafts where answers are held to a budget",
        lambda c: c.speculative_config is not None and _settings(c).limits.decode_budget,
        "a rejected draft would have counted; leave --speculative-config or --decode-budget out",
    ),
    (
        "steps of fewer tokens than the window and one",
        lambda c: _settings(c).limits.cap and _shortest_step(c) <= _settings(c).window_tokens,
        "where prompts are held to a cap, the window is read with the end of every chunk; raise "
        "--max-num-batched-tokens and --long-prefill-token-threshold, or lower --max-window-size",
    ),
    (
        "r-kv while generating and latent attention (MLA)",
        lambda c: _evicts_by(c, "r-kv") and c.model_config.use_mla,
        "a latent is no key that could be compared; pass --decode-policy tova",
    ),
    (
        "tova while generating and tensor parallelism",
        lambda c: _evicts_by(c, "tova") and _in_parallel(c),
        "it averages over heads of other processes; pass --decode-policy r-kv",
    ),
    (
        "shared documents and speculative decoding",
        lambda c: _shares(c) and c.speculative_config is not None,
        "drafts behind a document were not tested; leave --share or --speculative-config out",
    ),
    (
        "shared documents and adapters (LoRA)",
        lambda c: _shares(c) and c.lora_config is not None,
        "a document would have to be read with each of them; leave --share or --enable-lora out",
    ),
    (
        "shared documents and latent attention (MLA)",
        lambda c: _shares(c) and c.model_config.use_mla,
        "reading a text again was not tested with latents; leave --share out",
    ),
    (
        "shared documents and sleep mode",
        lambda c: _shares(c) and c.model_config.enable_sleep_mode,
        "an engine that sleeps forgets its cache; leave --share or --enable-sleep-mode out",
    ),
    (
        "shared documents in several API servers",
        lambda c: _shares(c) and c.parallel_config._api_process_count > 1,
        ONE_SERVER,
    ),
    (
        "shared documents and data parallelism",
        lambda c: _shares(c) and c.parallel_config.data_parallel_size > 1,
        "a request may reach an engine that has not read its document; leave --share out",
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
        "latent attention (MLA) in several tensor parallel processes",
        lambda c: c.model_config.use_mla and _in_parallel(c),
        "all heads vote on one latent, and each process has some of them; use data parallelism",
    ),
    (
        "a model without attention",
        lambda c: c.model_config.is_attention_free,
        "its state has no positions to drop; serve the model with stock vLLM",
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
        "CUDA graphs of whole prompt steps",
        _graphs_of_prompts,
        "queries are put aside between graphs; set cudagraph_mode to FULL_AND_PIECEWISE",
    ),
    *IN_A_FOLDER,
    (
        "adakv and latent attention (MLA)",
        lambda c: serves_heads_apart(c) and c.model_config.use_mla,
        "all heads of a layer keep one set, so there is nothing to share out; use --policy snapkv",
    ),
    (
        "tova and tensor parallelism",
        lambda c: _in_parallel(c, TOVA.name),
        "it averages over heads of other processes; use --policy snapkv",
    ),
    (
        "adakv and tensor parallelism",
        lambda c: _in_parallel(c, AdaKV.name),
        "it shares a layer's budget out among heads of other processes too; use --policy snapkv",
    ),
)


def require_supported(vllm_config: Any) -> None:
    """Raise UnsupportedModelError where prompts cannot be compressed with this configuration."""
    for what, applies, remedy in _RULES:
        if applies(vllm_config):
            raise UnsupportedModelError(f"snapkv: cannot compress prompts with {what}: {remedy}")
    processes = vllm_config.parallel_config.tensor_parallel_size
    if processes > (kv_heads := vllm_config.model_config.get_total_num_kv_heads()):
        raise UnsupportedModelError(
            f"snapkv: cannot compress prompts with {processes} tensor parallel processes and "
            f"{kv_heads} KV heads: copies of a head would keep different tokens; use at most "
            f"--tensor-parallel-size {kv_heads}"
        )


def require_heads_apart(name: str, layer: Any) -> None:
    """Raise UnsupportedModelError unless a layer's heads can hold different numbers of tokens."""
    if getattr(layer.impl, "sinks", None) is not None:
        raise UnsupportedModelError(
            f"snapkv: cannot compress prompts with adakv: {name} has a sink for every query head, "
            "which the kernels look up by the head, while every head is a sequence of its own; use "
            "--policy snapkv"
        )


# What a request may not ask for.


def require_no_promise(limits: Limits) -> None:
    """Raise where requests are promised to be held to limits, for one that cannot be: a session."""
    for name in ("cap", "decode_budget"):
        if promised := getattr(limits, name):
            remedy = f"send whole requests, or start the server without --{name.replace('_', '-')}"
            none = "none for a session, whose prompt goes on after its end"
            raise wrong(name, none, promised, remedy)


def require_capped_prompt(plan: Plan, request: Any, vllm_config: Any) -> None:
    """Raise where a request's prompt cannot be held to a cap while it is read.

    Args:
        plan: of the request.
        request: vLLM's.
        vllm_config: of the engine.

    Raises:
        InvalidArgumentError: says what is in the way.
    """
    cap, policy = plan.cap, plan.policy
    if cap is None or policy is None:
        return
    if request.prompt_token_ids is None or request.mm_features:
        raise _capped("prompt", "a prompt of tokens alone", "embeddings or images")
    if cap.looks_ahead and (step := _shortest_step(vllm_config)) <= policy.query_tokens:
        got = f"a window of {policy.query_tokens} in steps of {step}"
        raise _capped("window_size", "steps with room for the window and a token more", got)
    if vllm_config.cache_config.mamba_cache_mode == "align":
        states = "recurrent states that are not shared"
        raise _capped("cap", states, "--mamba-cache-mode align")


def require_no_prompt_logprobs(plan: Plan, sampling_params: Any) -> None:
    """Raise where a capped prompt's own probabilities are asked for, some of tokens read ahead."""
    if plan.cap is not None and sampling_params.prompt_logprobs is not None:
        raise _capped("prompt_logprobs", "none", str(sampling_params.prompt_logprobs))


def _capped(name: str, expected: str, got: str) -> InvalidArgumentError:
    without = "send the request to a server without --cap and without snapkv_cap"
    where = f"{expected} where a prompt is held to a cap"
    return wrong(name, where, got, f"leave it out, or {without}")


def require_sharing(settings: ServingSettings, asked: Errand, sampling_params: Any) -> None:
    """Raise where a request has to do with a document and the server or its settings forbid it."""
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

    Args:
        layers: vLLM's attention layers by name.
        specs: what each layer of the model keeps in its cache, by name.

    Raises:
        UnsupportedModelError: no layer has full attention, or one stores keys and values as this
            plugin cannot move them; names the layer and what is in the way.
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
    if getattr(layer, "use_sparse", False):
        _refuse(name, "chooses the tokens it attends to", "attention to all of them")


def _refuse(layer: str, got: str, expected: str) -> NoReturn:
    raise UnsupportedModelError(
        f"snapkv: cannot compress prompts: {layer} {got}, expected {expected}; serve the model "
        "with stock vLLM"
    )


def compressed_managers(managers: Sequence[Any]) -> dict[int, Any]:
    """The managers of the KV cache groups that are compressed, by the group's index.

    Raises:
        UnsupportedModelError: there is none, since the workers did not ask for one.
    """
    from snapkv_vllm.blocks import CompressedManager

    found = {group: one for group, one in enumerate(managers) if type(one) is CompressedManager}
    if not found:
        kinds = ", ".join(type(manager).__name__ for manager in managers)
        raise UnsupportedModelError(
            f"snapkv: expected a group of blocks that may be compressed, got {kinds}; pass "
            "worker_cls and scheduler_cls together, as snapkv_vllm.engine_args does"
        )
    return found
