"""What cannot be served is refused by name before the first request."""

import os
import sys
from types import SimpleNamespace

import pytest

from snapkv.errors import InvalidArgumentError, MissingDependencyError, UnsupportedModelError
from snapkv_vllm import Limits, ServingSettings, engine_args, versions
from snapkv_vllm.agents.held import Sessions
from snapkv_vllm.documents.sharing import Sharing
from snapkv_vllm.refusals import (
    compressed_managers,
    compressible_layers,
    require_heads_apart,
    require_no_promise,
    require_one_position,
    require_supported,
)
from snapkv_vllm.server import serve


def configured(folder, **options):
    from vllm.engine.arg_utils import EngineArgs

    own = {"policy": options.pop("policy", "snapkv"), "budget": 64}
    common = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True}
    return EngineArgs(folder, **engine_args(**own, **common, **options)).create_engine_config()


@pytest.fixture(scope="module")
def config(folder):
    return configured(folder)


def changed(config, **parts):
    """The configuration with some attributes of some of its parts replaced."""
    copy = SimpleNamespace(**{name: getattr(config, name) for name in vars(config)})
    copy.use_v2_model_runner = config.use_v2_model_runner
    for name, values in parts.items():
        if isinstance(values, dict) and name != "additional_config":
            part = getattr(config, name)
            values = type(
                "Changed",
                (),
                values | {"__getattr__": lambda _, key, part=part: getattr(part, key)},
            )()
        setattr(copy, name, values)
    return copy


TENSOR = {"parallel_config": {"tensor_parallel_size": 3}}
LATENT = {"model_config": {"use_mla": True}}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"speculative_config": {"method": "eagle3"}}, 'drafts .* to "ngram"'),
        ({"parallel_config": {"decode_context_parallel_size": 2}}, "decode context parallel"),
        ({"parallel_config": {"prefill_context_parallel_size": 2}}, "prefill context parallel"),
        ({"parallel_config": {"use_ubatching": True}}, "--enable-dbo"),
        ({"kv_transfer_config": {"kv_role": "kv_both"}}, "KV connector: .* --kv-transfer-config"),
        ({"parallel_config": {"tensor_parallel_size": 6}}, "--tensor-parallel-size 3"),
        (LATENT | TENSOR, "all heads vote on one latent"),
        ({"model_config": {"is_attention_free": True}}, "without attention"),
        ({"model_config": {"is_encoder_decoder": True}}, "encoder-decoder"),
        ({"model_config": {"runner_type": "pooling"}}, "pooling model"),
        (
            {"cache_config": {"cache_dtype": "nvfp4"}},
            "in the format nvfp4: only fp8, fp8_e4m3, fp8_",
        ),
        (LATENT | {"cache_config": {"cache_dtype": "fp8"}}, "latent .* the format fp8: .* out"),
    ],
    ids=str,
)
def test_each_is_named_with_what_to_do(config, parts, words):
    with pytest.raises(UnsupportedModelError, match=f"snapkv: cannot compress .*{words}"):
        require_supported(changed(config, **parts))


@pytest.mark.parametrize(
    ("mode", "fine"),
    [
        ("FULL", False),
        ("FULL_AND_PIECEWISE", True),
        ("NONE", True),
    ],
)
def test_graphs_must_leave_prompts_out(config, mode, fine):
    from vllm.config.compilation import CUDAGraphMode

    graphs = changed(config, compilation_config={"cudagraph_mode": CUDAGraphMode[mode]})
    if fine:
        require_supported(graphs)
    else:
        with pytest.raises(UnsupportedModelError, match="FULL_AND_PIECEWISE"):
            require_supported(graphs)


BOUNDED = ServingSettings(budget=64, limits=Limits(decode_budget=256))
BY_TOVA = ServingSettings(budget=64, limits=Limits(decode_budget=256, decode_policy="tova"))
TOVA, ADAKV = (ServingSettings(policy=policy, budget=64) for policy in ("tova", "adakv"))
SHARED = ServingSettings(budget=64, sharing=Sharing())
SHARED_APART = ServingSettings(policy="adakv", budget=64, sharing=Sharing())
SESSIONS = ServingSettings(budget=64, sessions=Sessions())
KEPT = ServingSettings(budget=64, sharing=Sharing(library="/kept"))


@pytest.mark.parametrize(
    ("settings", "part", "given", "words"),
    [
        (BOUNDED, "speculative_config", {"method": "ngram"}, "drafts where answers are held"),
        (BOUNDED, "model_config", {"use_mla": True}, "--decode-policy tova"),
        (BY_TOVA, "parallel_config", {"tensor_parallel_size": 3}, "--decode-policy r-kv"),
        (TOVA, "parallel_config", {"tensor_parallel_size": 3}, "tova and tensor parallelism"),
        (ADAKV, "model_config", {"use_mla": True}, "nothing to share out"),
        (SHARED, "parallel_config", {"_api_process_count": 2}, "API servers: .*--api-server-coun"),
        (SHARED, "parallel_config", {"data_parallel_size": 2}, "data parallelism: .* --share out"),
        (SHARED, "model_config", {"enable_sleep_mode": True}, "sleep mode: .* --share "),
        (SHARED, "model_config", {"uses_mrope": True}, "documents and .*M-RoPE.* --share out"),
        (
            SHARED_APART,
            "parallel_config",
            {"tensor_parallel_size": 3},
            "documents, adakv and tensor",
        ),
        (SESSIONS, "model_config", {"uses_mrope": True}, "sessions and .*M-RoPE"),
        (SESSIONS, "model_config", {"use_mla": True}, "sessions and latent attention"),
        (SESSIONS, "model_config", {"enable_sleep_mode": True}, "sleep mode: .* --sessions or"),
        (SESSIONS, "speculative_config", {"method": "ngram"}, "sessions and speculative"),
        (SESSIONS, "parallel_config", {"pipeline_parallel_size": 2}, "sessions and pipeline"),
        (KEPT, "parallel_config", {"world_size": 2}, "tensor or pipeline parallelism"),
        (KEPT, "parallel_config", {"distributed_executor_backend": "ray"}, "workers on Ray"),
        (KEPT, "model_config", {"quantization": "gptq"}, "quantised weights"),
        (
            KEPT,
            "cache_config",
            {"cache_dtype": "fp8"},
            "of a library and a KV cache in the format fp8",
        ),
        (KEPT, "model_config", {"hf_overrides": {"rope_theta": 1.0}}, "hf-overrides"),
        (KEPT, "model_config", {"model": "someone/model"}, "pass the folder that the model"),
        (KEPT, "load_config", {"load_format": "dummy"}, "made-up weights"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_settings_and_options_that_go_well_alone_are_refused_together(
    config, settings, part, given, words
):
    own = {"additional_config": settings.to_config()}
    require_supported(changed(config, **own))
    if part != "additional_config":
        require_supported(changed(config, **{part: given}))
    if settings is KEPT:
        shared = {"additional_config": SHARED.to_config()}
        require_supported(changed(config, **shared | {part: given} | shared))
    with pytest.raises(UnsupportedModelError, match=words):
        require_supported(changed(config, **own | {part: given}))


def test_several_api_servers_are_refused_before_any_of_them_starts(folder):
    with pytest.raises(InvalidArgumentError, match=r"share: expected one API server, .*count 2: "):
        serve(folder, SHARED, ["--api-server-count", "2"])
    assert "PROMETHEUS_MULTIPROC_DIR" not in os.environ, "its folder is gone"


def test_heads_with_sinks_cannot_be_sequences_of_their_own():
    layer = SimpleNamespace(impl=SimpleNamespace(sinks=None))
    require_heads_apart("model.layer", layer)
    layer.impl.sinks = [0.0]
    with pytest.raises(UnsupportedModelError, match=r"model\.layer has a sink"):
        require_heads_apart("model.layer", layer)


def asked(**more):
    own = {"prompt_token_ids": [1], "mm_features": []}
    return SimpleNamespace(**own | more)


def test_images_are_compressed_only_where_positions_are_numbers(config):
    plan = TOVA.plan_for({}, prompt_tokens=100)
    whole = TOVA.plan_for({"snapkv_budget": 0}, prompt_tokens=100)
    turned, images = (
        changed(config, model_config={"uses_mrope": True}),
        asked(mm_features=[object()]),
    )
    for accepted in ((plan, images, config), (plan, asked(), turned), (whole, images, turned)):
        require_one_position(*accepted)
    with pytest.raises(
        InvalidArgumentError, match=r"prompt: expected text alone .* snapkv_budget 0"
    ):
        require_one_position(plan, images, turned)


def test_sessions_are_refused_where_requests_are_promised_to_be_held_to_limits():
    require_no_promise(Limits())
    with pytest.raises(InvalidArgumentError, match="decode_budget: expected none for a session"):
        require_no_promise(Limits(decode_budget=200))


def layer_and_spec(
    *, backend="FLASH_ATTN", alibi=None, sparse=False, kind=None, form="auto", scales=1, **spec
):
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    sizes = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    layer = SimpleNamespace(
        impl=SimpleNamespace(alibi_slopes=alibi),
        get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend),
        use_sparse=sparse,
        kv_cache_dtype=form,
        _k_scale=torch.ones(scales),
    )
    return {"model.layer": layer}, {"model.layer": (kind or FullAttentionSpec)(**sizes, **spec)}


def test_layers_of_another_kind_are_refused():
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, RSWASpec, SlidingWindowSpec

    latent = {"kind": MLAAttentionSpec, "backend": "CPU_MLA"}
    for accepted in (layer_and_spec(), layer_and_spec(**latent), layer_and_spec(form="fp8")):
        assert compressible_layers(*accepted) == {"model.layer"}
    refused = {
        "window in one group": layer_and_spec(sliding_window=64),
        "keeps SlidingWindowSpec": layer_and_spec(kind=SlidingWindowSpec, sliding_window=64),
        "keeps a RSWASpec": layer_and_spec(kind=RSWASpec, rswa_window=64),
        "chooses the tokens it attends to": layer_and_spec(**latent, sparse=True),
        "in the format int4_per_token_head, exp": layer_and_spec(form="int4_per_token_head"),
        "has a scale for every head, expected one": layer_and_spec(form="fp8", scales=4),
        "ALiBi": layer_and_spec(alibi=[0.5]),
        "FLASHINFER, expected one of CPU_ATTN": layer_and_spec(backend="FLASHINFER"),
        "AMX_MLA, expected one of": layer_and_spec(**latent | {"backend": "AMX_MLA"}),
        "keeps nothing": ({}, {}),
    }
    for words, (layers, specs) in refused.items():
        with pytest.raises(UnsupportedModelError, match=words):
            compressible_layers(layers, specs)
    layers, specs = layer_and_spec()
    layers["model.later"] = SimpleNamespace(kv_sharing_target_layer_name="model.layer")
    with pytest.raises(UnsupportedModelError, match=r"model.later reads another layer's cache"):
        compressible_layers(layers, specs)


def test_a_group_of_blocks_is_compressed_whole_or_not_at_all():
    """Without its manager for hybrid models vLLM puts layers with windows among the others."""
    from snapkv_vllm.blocks import compressed, is_compressed

    plain, windowed = (
        layer_and_spec(**own)[1]["model.layer"] for own in ({}, {"sliding_window": 64})
    )
    ours = compressed(plain)
    assert is_compressed(ours)
    assert not is_compressed(plain)
    assert is_compressed(SimpleNamespace(kv_cache_specs={"a": ours, "b": ours}))
    assert not is_compressed(SimpleNamespace(kv_cache_specs={"a": plain, "b": plain}))
    merged = type(ours).merge([ours, compressed(windowed)])
    apart = SimpleNamespace(kv_cache_specs={"a": ours, "b": plain})
    for mixed in (merged, windowed, apart):
        with pytest.raises(UnsupportedModelError, match="--disable-hybrid-kv-cache-manager"):
            is_compressed(mixed)


def test_a_scheduler_without_its_worker_is_refused():
    with pytest.raises(UnsupportedModelError, match="together"):
        compressed_managers([object()])


@pytest.mark.parametrize("left_out", [(), ("logits_processors",)], ids=["all", "the-first-two"])
def test_arguments_that_were_printed_for_another_vllm_start_no_engine(
    folder, monkeypatch, left_out
):
    from vllm import LLM

    given = engine_args(budget=64, dtype="float32", max_model_len=512, enforce_eager=True)
    given = {name: value for name, value in given.items() if name not in left_out}
    monkeypatch.setattr(versions, "installed", lambda: "0.30.1")
    for module in ("requests", "scheduler", "worker"):
        monkeypatch.delitem(sys.modules, f"snapkv_vllm.{module}", raising=False)
    with pytest.raises(MissingDependencyError, match=r"got 0\.30\.1; run pip install"):
        LLM(folder, **given)


@pytest.mark.parametrize("taken", ["worker_cls", "scheduler_cls"])
def test_another_plugins_worker_or_scheduler_is_not_overwritten(taken):
    with pytest.raises(InvalidArgumentError, match=f"{taken}: expected none"):
        engine_args(**{taken: "theirs.Worker"})


def test_other_options_are_passed_on():
    given = engine_args(
        budget=64, dtype="float32", additional_config={"mine": 1}, logits_processors=["a:B"]
    )
    assert given["dtype"] == "float32"
    assert given["additional_config"] == {"mine": 1, "snapkv": {"policy": "snapkv", "budget": 64}}
    assert given["logits_processors"][0] == "a:B"


def test_a_hybrid_model_in_one_group_of_blocks_does_not_start(tmp_path):
    from tests.serving.vllm.engines import small_engine
    from tests.serving.vllm.families import FamilyModel

    with pytest.raises(UnsupportedModelError, match="--disable-hybrid-kv-cache-manager"):
        small_engine(
            FamilyModel(tmp_path, "gemma3_text"), budget=64, disable_hybrid_kv_cache_manager=True
        )
