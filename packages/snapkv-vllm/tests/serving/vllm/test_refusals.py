"""Engines with options that cannot be served are refused before the first request."""

import copy
import re
from types import SimpleNamespace

import pytest

from snapkv.errors import InvalidArgumentError, UnsupportedModelError
from snapkv_vllm import Limits, ServingSettings, Sessions, engine_args
from snapkv_vllm.admission import compatibility as rules
from snapkv_vllm.admission.compatibility import require_compatible
from snapkv_vllm.refusals import compressible_layers, require_splittable_heads
from snapkv_vllm.server import parse_options


def configured(folder, **options):
    from vllm.engine.arg_utils import EngineArgs

    own = {"policy": options.pop("policy", "snapkv"), "budget": 64}
    common = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True}
    return EngineArgs(folder, **engine_args(**own, **common, **options)).create_engine_config()


@pytest.mark.parametrize(("name", "words"), [("no.yaml", "No such file"), ("no.txt", "yaml")])
def test_missing_or_foreign_file_of_options_is_refused_in_one_line(tmp_path, name, words):
    with pytest.raises(InvalidArgumentError, match=f"config: .*{words}"):
        parse_options("demo", ["--config", str(tmp_path / name)])


@pytest.fixture(scope="module")
def config(folder):
    return configured(folder)


def changed(config, **parts):
    """The configuration with some attributes of some of its parts replaced."""
    from vllm.config.compilation import CUDAGraphMode

    made = SimpleNamespace(**{name: getattr(config, name) for name in vars(config)})
    for name, values in parts.items():
        if name == "compilation_config":
            values = {"cudagraph_mode": CUDAGraphMode[values["cudagraph_mode"]]}
        if isinstance(values, dict):
            part = getattr(config, name)
            values = type(
                "Changed",
                (),
                values | {"__getattr__": lambda _, key, part=part: getattr(part, key)},
            )()
        setattr(made, name, values)
    return made


SCENES = {
    # Of vLLM's configuration, whose parts these attributes are put over.
    rules.MODEL_DRAFTS: {"speculative_config": {"method": "eagle3"}},
    rules.DRAFTS: {"speculative_config": {"method": "ngram"}},
    rules.DECODE_CONTEXTS: {"parallel_config": {"decode_context_parallel_size": 2}},
    rules.CONTEXTS: {"parallel_config": {"prefill_context_parallel_size": 2}},
    rules.TENSOR: {"parallel_config": {"tensor_parallel_size": 3}},
    rules.IN_PARALLEL: {"parallel_config": {"tensor_parallel_size": 3}},
    rules.TOO_PARALLEL: {"parallel_config": {"tensor_parallel_size": 6}},
    rules.PIPELINE: {"parallel_config": {"pipeline_parallel_size": 2}},
    rules.MICRO_BATCHES: {"parallel_config": {"use_ubatching": True}},
    rules.CONNECTOR: {"kv_transfer_config": {"kv_role": "kv_both"}},
    rules.LATENT: {"model_config": {"use_mla": True}},
    rules.WITH_LATENTS: {"model_config": {"use_mla": True}},
    rules.DIMENSIONS: {"model_config": {"uses_mrope": True}},
    rules.WITH_DIMENSIONS: {"model_config": {"uses_mrope": True}},
    rules.NO_ATTENTION: {"model_config": {"is_attention_free": True}},
    rules.ENCODER: {"model_config": {"is_encoder_decoder": True}},
    rules.POOLING: {"model_config": {"runner_type": "pooling"}},
    rules.SLEEP: {"model_config": {"enable_sleep_mode": True}},
    rules.NOT_MOVABLE: {"cache_config": {"cache_dtype": "nvfp4"}},
    rules.NOT_PLAIN: {"cache_config": {"cache_dtype": "fp8"}},
    rules.GRAPHS: {"compilation_config": {"cudagraph_mode": "FULL"}},
    # Of the server's settings.
    rules.ALWAYS: {},
    rules.WITHOUT_SESSIONS: {},
    rules.DECODE_LIMIT: {"limits": Limits(decode_budget=256)},
    rules.WITH_LIMIT: {"limits": Limits(decode_budget=256)},
    rules.RKV_EVICTS: {"limits": Limits(decode_budget=256)},
    rules.TOVA_EVICTS: {"limits": Limits(decode_budget=256, decode_policy="tova")},
    rules.WITH_TOVA: {"policy": "tova"},
    rules.WITH_RAGGED_HEADS: {"policy": "adakv"},
    rules.WITH_ACROSS: {"policy": "across-layers"},
    rules.PER_HEAD: {"policy": "adakv"},
    rules.WITH_SESSIONS: {"sessions": Sessions()},
    # Of requests.
    rules.IN_SESSION: {"snapkv_session": "a"},
    rules.NAMES_SPANS: {"snapkv_spans": []},
    rules.WITH_SPANS: {"snapkv_spans": []},
    rules.ANY_SETTING: {"snapkv_budget": 64},
    rules.WITH_BEAMS: {"use_beam_search": True},
    rules.IMAGES: {"mm_features": [1]},
    rules.STREAMING_INPUT: {"resumable": True},
}
ASKS = {"mm_features": [], "resumable": False}


def parts_of(config, row, *facts):
    """The parts of a row, in which these facts hold and nothing else that matters."""
    made = {}
    for part in row.parts:
        own = {}
        for fact in facts:
            own |= SCENES[fact] if fact.part == part else {}
        made[part] = own
        if part == "engine":
            made[part] = changed(config, **own)
        elif part == "settings":
            made[part] = SimpleNamespace(**vars(ServingSettings(budget=64)) | own)
        elif part == "request":
            made[part] = SimpleNamespace(**ASKS | own)
    return made


@pytest.mark.parametrize(
    "row", rules.ROWS, ids=lambda row: f"{row.option.name or 'any'} {row.case.words}"
)
def test_every_conflict_is_refused_by_name_with_a_remedy(config, row):
    option, case = row.option, row.case
    assert row.parts <= rules.Parts.__annotations__.keys()
    require_compatible(**parts_of(config, row, case))
    if SCENES[case]:
        require_compatible(**parts_of(config, row, option))
    parts = parts_of(config, row, option, case)
    before = {name: copy.copy(part) for name, part in parts.items()}
    of_engine = "engine" in row.parts and "request" not in row.parts
    error = UnsupportedModelError if of_engine else InvalidArgumentError
    with pytest.raises(error) as refused:
        require_compatible(**parts)
    name = option.name or next(iter(SCENES[option]))
    words = re.escape(case.words)
    line = rf"{name}: .+ is not supported {words}(, because {re.escape(row.why)})?\. [A-Z][^.]+\."
    assert re.fullmatch(line, str(refused.value))
    assert parts == before, "nothing has changed"


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
def test_graphs_without_prompts_are_accepted(config, mode):
    graphs = changed(config, compilation_config={"cudagraph_mode": mode})
    require_compatible(settings=ServingSettings(budget=64), engine=graphs)


def test_heads_with_sinks_are_refused_for_different_counts():
    layer = SimpleNamespace(impl=SimpleNamespace(sinks=None))
    require_splittable_heads("model.layer", layer)
    layer.impl.sinks = [0.0]
    with pytest.raises(UnsupportedModelError, match=r"model\.layer uses attention sinks"):
        require_splittable_heads("model.layer", layer)


def test_images_are_refused_with_mrope_only(config):
    from snapkv_vllm.scheduler import _CompressingScheduler

    turned = changed(config, model_config={"uses_mrope": True})

    def plan_of(engine, **given):
        params = SimpleNamespace(extra_args=given, prompt_logprobs=None)
        request = SimpleNamespace(**ASKS | {"mm_features": [1], "num_prompt_tokens": 100})
        request.sampling_params = params
        parts = {"_settings": ServingSettings(policy="tova", budget=64), "vllm_config": engine}
        scheduler = SimpleNamespace(**parts, sessions=None)
        return _CompressingScheduler._make_plan(scheduler, request)

    assert plan_of(config).shareable_tokens == 100
    assert plan_of(turned, snapkv_budget=0).shareable_tokens is None
    with pytest.raises(InvalidArgumentError, match=r"^prompt: a prompt with images .*budget 0"):
        plan_of(turned)


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


def test_unsupported_layers_are_refused_by_name():
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, RSWASpec, SlidingWindowSpec

    latent = {"kind": MLAAttentionSpec, "backend": "CPU_MLA"}
    for accepted in (layer_and_spec(), layer_and_spec(**latent), layer_and_spec(form="fp8")):
        assert compressible_layers(*accepted) == {"model.layer"}
    refused = {
        "window in one group": layer_and_spec(sliding_window=64),
        "keeps SlidingWindowSpec": layer_and_spec(kind=SlidingWindowSpec, sliding_window=64),
        "keeps a RSWASpec": layer_and_spec(kind=RSWASpec, rswa_window=64),
        "chooses the tokens it attends to": layer_and_spec(**latent, sparse=True),
        "in the format int4_per_token_head, but": layer_and_spec(form="int4_per_token_head"),
        "has a scale for every head, but": layer_and_spec(form="fp8", scales=4),
        "ALiBi": layer_and_spec(alibi=[0.5]),
        "FLASHINFER, but .* need one of CPU_ATTN": layer_and_spec(backend="FLASHINFER"),
        "AMX_MLA, but .* need one of": layer_and_spec(**latent | {"backend": "AMX_MLA"}),
        "keeps nothing": ({}, {}),
    }
    for words, (layers, specs) in refused.items():
        with pytest.raises(UnsupportedModelError, match=words):
            compressible_layers(layers, specs)
    layers, specs = layer_and_spec()
    layers["model.later"] = SimpleNamespace(kv_sharing_target_layer_name="model.layer")
    with pytest.raises(UnsupportedModelError, match=r"model.later reads another layer's cache"):
        compressible_layers(layers, specs)


def test_group_with_mixed_layers_is_refused():
    """Without its manager for hybrid models, vLLM groups sliding-window layers with others."""
    from snapkv_vllm.blocks import compress_spec, is_compressed

    plain, windowed = (
        layer_and_spec(**own)[1]["model.layer"] for own in ({}, {"sliding_window": 64})
    )
    ours = compress_spec(plain)
    assert is_compressed(ours)
    assert not is_compressed(plain)
    assert is_compressed(SimpleNamespace(kv_cache_specs={"a": ours, "b": ours}))
    assert not is_compressed(SimpleNamespace(kv_cache_specs={"a": plain, "b": plain}))
    merged = type(ours).merge([ours, compress_spec(windowed)])
    apart = SimpleNamespace(kv_cache_specs={"a": ours, "b": plain})
    for mixed in (merged, windowed, apart):
        with pytest.raises(UnsupportedModelError, match="--disable-hybrid-kv-cache-manager"):
            is_compressed(mixed)


def test_scheduler_without_its_worker_is_refused():
    from snapkv_vllm.blocks import find_compressed_managers

    with pytest.raises(UnsupportedModelError, match="together"):
        find_compressed_managers([object()])


@pytest.mark.parametrize("taken", ["worker_cls", "scheduler_cls"])
def test_worker_or_scheduler_of_another_plugin_is_refused(taken):
    with pytest.raises(InvalidArgumentError, match=f"{taken}: this option is set by snapkv"):
        engine_args(**{taken: "theirs.Worker"})


def test_other_options_are_passed_on():
    given = engine_args(
        budget=64, dtype="float32", additional_config={"mine": 1}, logits_processors=["a:B"]
    )
    assert given["dtype"] == "float32"
    assert given["additional_config"] == {"mine": 1, "snapkv": {"policy": "default", "budget": 64}}
    assert given["logits_processors"][0] == "a:B"
