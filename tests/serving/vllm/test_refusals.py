"""What cannot be served is refused by name before the first request."""

from types import SimpleNamespace

import pytest

from snapkv.errors import InvalidArgumentError, UnsupportedModelError
from snapkv.serving import ServingSettings, engine_args
from snapkv.serving.refusals import (
    require_supported,
    require_supported_blocks,
    require_supported_layers,
)


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


def test_the_demo_is_supported(config):
    require_supported(config)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"speculative_config": object()}, "speculative decoding"),
        ({"parallel_config": {"decode_context_parallel_size": 2}}, "decode context parallel"),
        ({"parallel_config": {"prefill_context_parallel_size": 2}}, "prefill context parallel"),
        ({"parallel_config": {"use_ubatching": True}}, "--enable-dbo"),
        ({"parallel_config": {"tensor_parallel_size": 6}}, "--tensor-parallel-size 3"),
        ({"kv_transfer_config": object()}, "KV connector"),
        ({"model_config": {"use_mla": True}}, "MLA"),
        ({"model_config": {"is_hybrid": True}}, "without full attention"),
        ({"model_config": {"is_attention_free": True}}, "without full attention"),
        ({"model_config": {"is_encoder_decoder": True}}, "encoder-decoder"),
        ({"model_config": {"runner_type": "pooling"}}, "pooling model"),
        ({"model_config": {"uses_mrope": True}}, "M-RoPE"),
        ({"cache_config": {"cache_dtype": "fp8"}}, "quantised KV cache"),
        ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
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
        ("FULL_DECODE_ONLY", True),
        ("PIECEWISE", True),
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


def test_tova_averages_over_heads_that_other_processes_hold(config):
    settings = ServingSettings(policy="tova", budget=64).to_config()
    with pytest.raises(UnsupportedModelError, match="tova and tensor parallelism"):
        require_supported(
            changed(config, parallel_config={"tensor_parallel_size": 3}, additional_config=settings)
        )


def layer_and_spec(*, backend="FLASH_ATTN", alibi=None, kind=None, **spec):
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    sizes = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    layer = SimpleNamespace(
        impl=SimpleNamespace(alibi_slopes=alibi),
        get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend),
    )
    return {"model.layer": layer}, {"model.layer": (kind or FullAttentionSpec)(**sizes, **spec)}


def test_layers_of_another_kind_are_refused():
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowSpec

    require_supported_layers(*layer_and_spec())
    refused = {
        "sliding or chunked": layer_and_spec(sliding_window=64),
        "keeps a SlidingWindowSpec": layer_and_spec(kind=SlidingWindowSpec, sliding_window=64),
        "keeps a MLAAttentionSpec": layer_and_spec(kind=MLAAttentionSpec),
        "ALiBi": layer_and_spec(alibi=[0.5]),
        "FLASHINFER, expected one of CPU_ATTN": layer_and_spec(backend="FLASHINFER"),
        "no attention layers": ({}, {}),
    }
    for words, (layers, specs) in refused.items():
        with pytest.raises(UnsupportedModelError, match=words):
            require_supported_layers(layers, specs)
    layers, specs = layer_and_spec()
    layers["model.later"] = SimpleNamespace(kv_sharing_target_layer_name="model.layer")
    with pytest.raises(UnsupportedModelError, match=r"model.later reads another layer's cache"):
        require_supported_layers(layers, specs)


def test_a_scheduler_without_its_worker_is_refused():
    with pytest.raises(UnsupportedModelError, match="together"):
        require_supported_blocks([object()], dict)


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


def test_a_model_with_sliding_layers_does_not_start(tmp_path):
    from tests.families import tiny_model
    from tests.serving.vllm.engines import Engine

    tiny_model("gemma2", "eager").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"sliding|SlidingWindow"):
        Engine(str(tmp_path), budget=64, skip_tokenizer_init=True, max_model_len=256)
