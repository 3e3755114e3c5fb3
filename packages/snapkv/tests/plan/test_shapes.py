"""Published shapes against transformers' own classes, built from their configurations."""

import json
import time

import pytest
import torch

from snapkv.app.models import load, load_outline
from snapkv.errors import InvalidArgumentError, ModelNotFoundError
from snapkv.plan import footprint_of, max_positions
from snapkv.plan.footprint import stored_bytes
from snapkv.plan.shapes import SHAPES, config_of, described, outline, shape_of

K = 1024

POSITIONS = {
    "llama-3.1-8b": 128 * K,
    "mistral-7b": 32 * K,
    "qwen3-30b-a3b": 40960,
    "gemma-2-9b": 8192,
    "gemma-3-12b": 128 * K,
    "gpt-oss-20b": 128 * K,
    "deepseek-v3": 163840,
    "command-r-35b": 128 * K,
    "qwen3-next-80b-a3b": 256 * K,
    "qwen3.5-35b-a3b": 256 * K,
    "llama-4-scout": 256 * K,
    "kimi-linear-48b-a3b": 1024 * K,
    "minimax-m2": 192 * K,
    "ministral-3-8b": 256 * K,
    "smollm3-3b": 64 * K,
}

CHECKPOINT_BYTES = {  # `total_size` in the index of the weights
    "gpt-oss-20b": 13_761_264_768,
    "gpt-oss-120b": 65_248_815_744,
    "llama-3.1-8b": 16_060_522_496,
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_parameters_of_the_model_it_is_named_after(name):
    model = outline(name, dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == SHAPES[name].parameters
    assert max_positions(model) == described(name)["positions"]
    if name in CHECKPOINT_BYTES:
        assert sum(stored_bytes(model).values()) == CHECKPOINT_BYTES[name]


def test_a_shape_has_the_positions_that_were_published():
    for name, positions in POSITIONS.items():
        assert described(name)["positions"] == positions, name


FAMILIES = {shape.family: name for name, shape in reversed(SHAPES.items())}


@pytest.mark.parametrize("name", sorted(set(FAMILIES.values()) - {"deepseek-v3"}))
def test_what_is_said_of_a_shape_is_what_a_cache_of_it_holds(name):
    footprint, said = footprint_of(outline(name, dtype=torch.bfloat16)), described(name)
    assert footprint.token_bytes == said["kv_bytes_per_token"]
    assert footprint.layers == said["layers"]
    assert len(footprint.full_layers) == said["growing_layers"]
    assert len(footprint.sliding_layers) == said["sliding_layers"]
    assert {layer.most_tokens + 1 for layer in footprint.sliding_layers} <= {said["sliding_window"]}
    assert footprint.weights_bytes == CHECKPOINT_BYTES.get(name, footprint.weights_bytes)


def test_latent_attention_counts_what_transformers_stores():
    model = outline("deepseek-v3", dtype=torch.bfloat16, layers=4)
    latent, per_head = 4 * (512 + 64) * 2, 4 * 128 * (192 + 128) * 2  # older releases expand it
    assert footprint_of(model).token_bytes in (latent, per_head)
    assert described("deepseek-v3")["kv_bytes_per_token"] == 61 * 576 * 2


def test_fp8_has_a_scale_for_every_block_and_leaves_the_rest():
    model = outline("deepseek-v3", dtype=torch.bfloat16, layers=4)
    sizes, prefix = stored_bytes(model), "model.layers.3"
    assert sizes[f"{prefix}.self_attn.o_proj.weight"] == 7168 * 16384 + 4 * 56 * 128
    assert sizes[f"{prefix}.mlp.experts.down_proj"] == 256 * (7168 * 2048 + 4 * 56 * 16)
    assert sizes["lm_head.weight"] == 2 * 129280 * 7168
    assert sizes[f"{prefix}.input_layernorm.weight"] == 2 * 7168


def test_another_dtype_counts_quantized_weights_in_it():
    stored, widened = (
        footprint_of(load_outline("gpt-oss-20b", dtype=d)) for d in ("auto", "bfloat16")
    )
    assert stored.weights_bytes == CHECKPOINT_BYTES["gpt-oss-20b"]
    assert widened.weights_bytes == 2 * SHAPES["gpt-oss-20b"].parameters
    assert (stored.quantization, widened.quantization) == ("mxfp4", None)
    assert stored.token_bytes == widened.token_bytes
    assert stored.token_flops == widened.token_flops


def test_a_folder_with_quantized_weights_counts_them(tmp_path):
    config = config_of("gpt-oss-20b", layers=2)
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["quantization_config"]["quant_method"] == "mxfp4"
    footprint = footprint_of(load_outline(str(tmp_path)))
    assert footprint == footprint_of(outline("gpt-oss-20b", dtype=torch.bfloat16, layers=2))


def test_a_shape_is_found_by_its_name_or_its_repository():
    for name in ("Qwen3-4B", "qwen/qwen3-4b"):
        assert shape_of(name) == "qwen3-4b"
    assert max_positions(load_outline("Qwen3-4B")) == 40960


@pytest.fixture
def no_network(monkeypatch):
    """Whoever asks the hub fails the test."""

    def asked(*args, **options):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("snapkv.app.models.get_hf_file_metadata", asked)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.mark.parametrize("wrong", ["qwen3_8b", "nothing"])
def test_a_misspelt_shape_is_refused_at_once(no_network, wrong):
    begin = time.monotonic()
    with pytest.raises(
        ModelNotFoundError, match=f"got '{wrong}', which is not one of them"
    ) as raised:
        load_outline(wrong)
    assert time.monotonic() - begin < 5
    assert ("did you mean" in str(raised.value)) == (wrong != "nothing")


def test_a_shape_has_no_weights_to_load(no_network):
    with pytest.raises(ModelNotFoundError, match="weights of that shape are in meta-llama/"):
        load("llama-3.1-8b")
    with pytest.raises(InvalidArgumentError, match=r"shape: expected one of .*mean qwen3-8b"):
        outline("qwen3-8", dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["someone/some-model", "gpt2"])
def test_a_hub_that_does_not_answer_costs_seconds(monkeypatch, name):
    waited = []

    def silent(url, *, timeout):
        waited.append(timeout)
        raise TimeoutError

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("snapkv.app.models.get_hf_file_metadata", silent)
    with pytest.raises(ModelNotFoundError, match="did not answer within 5 seconds"):
        load(name)
    assert waited == [5]


def test_a_cached_model_needs_no_hub_that_answers(monkeypatch):
    asked = {}

    def from_pretrained(place, **options):
        asked.update(options)
        raise OSError("stop here")

    monkeypatch.setattr(
        "snapkv.app.models.try_to_load_from_cache", lambda *a, **o: "/cache/config.json"
    )
    monkeypatch.setattr("snapkv.app.models.AutoConfig.from_pretrained", from_pretrained)
    with pytest.raises(ModelNotFoundError):
        load("someone/some-model")  # the tests are offline
    assert asked["local_files_only"] is True
