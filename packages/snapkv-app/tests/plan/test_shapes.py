"""Published shapes against transformers' own classes, built from their configurations."""

import json
import time

import pytest
import torch

from snapkv.cache.report import tensor_bytes, token_bytes
from snapkv.errors import InvalidArgumentError, ModelNotFoundError, UnsupportedModelError
from snapkv.hf.build import grows
from snapkv.hf.model_parts import max_positions
from snapkv_app.footprints import find_footprint
from snapkv_app.models import load
from snapkv_app.plan import card_bytes, footprint_of
from snapkv_app.plan.advice import stored_bytes
from snapkv_app.plan.cards import CARDS
from snapkv_app.plan.footprint import FAMILIES as KNOWN
from snapkv_app.plan.shapes import SHAPES, described, shape_of
from tests.plan.outlines import config_of, layers_of_one_token, outline

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
def test_shape_has_the_parameters_of_its_model(name):
    model, footprint = outline(name), SHAPES[name].footprint()
    assert sum(p.numel() for p in model.parameters()) == SHAPES[name].parameters
    assert max_positions(model) == described(name)["positions"]
    stored = stored_bytes(model)
    if name in CHECKPOINT_BYTES:
        assert sum(stored.values()) == CHECKPOINT_BYTES[name] == footprint.weights_bytes
    assert footprint.weights_bytes == pytest.approx(sum(stored.values()), rel=1e-3)
    experts = sum(size for each, size in stored.items() if ".experts." in each)
    assert footprint.expert_bytes == pytest.approx(experts, rel=2e-3)
    without = {"dtype": "bfloat16", "model_type": SHAPES[name].family, **SHAPES[name].config}
    assert footprint_of(without).weights_bytes == pytest.approx(footprint.weights_bytes, rel=2e-3)


def test_shape_has_the_published_positions():
    for name, positions in POSITIONS.items():
        assert described(name)["positions"] == positions, name


FAMILIES = {shape.family: name for name, shape in reversed(SHAPES.items())}


@pytest.mark.parametrize("name", sorted(set(FAMILIES.values()) - {"deepseek-v3"}))
def test_description_of_a_shape_agrees_with_a_real_cache(name):
    model = outline(name)
    footprint, said, layers = SHAPES[name].footprint(), described(name), layers_of_one_token(model)
    full = [layer for layer in layers if grows(layer)]
    sliding = [layer for layer in layers if type(layer).__name__ == "DynamicSlidingWindowLayer"]
    others = [layer for layer in layers if layer not in full and layer not in sliding]
    assert footprint.token_bytes == said["kv_bytes_per_token"] == sum(map(token_bytes, full))
    assert footprint.layers == said["layers"] == len(layers)
    assert len(footprint.full_layers) == said["growing_layers"] == len(full)
    assert len(footprint.sliding_layers) == said["sliding_layers"] == len(sliding)
    assert [each.most_tokens + 1 for each in footprint.sliding_layers] == [
        layer.sliding_window for layer in sliding
    ]
    assert {each.token_bytes for each in footprint.sliding_layers} == set(
        map(tensor_bytes, sliding)
    )
    assert footprint.state_bytes == sum(map(tensor_bytes, others))
    for planned, layer in zip(footprint.full_layers, full, strict=True):
        assert (planned.heads, planned.key_width) == (layer.keys.shape[1], layer.keys.shape[-1])
        assert planned.value_width == layer.values.shape[-1]


def test_latent_attention_counts_the_states_that_transformers_stores():
    (layer, *_) = layers_of_one_token(outline("deepseek-v3", num_hidden_layers=4))
    assert token_bytes(layer) == (512 + 64) * 2
    assert described("deepseek-v3")["kv_bytes_per_token"] == 61 * 576 * 2


def test_fp8_weights_count_a_scale_for_every_block():
    model = outline("deepseek-v3", num_hidden_layers=4)
    sizes, prefix = stored_bytes(model), "model.layers.3"
    assert sizes[f"{prefix}.self_attn.o_proj.weight"] == 7168 * 16384 + 4 * 56 * 128
    assert sizes[f"{prefix}.mlp.experts.down_proj"] == 256 * (7168 * 2048 + 4 * 56 * 16)
    assert sizes["lm_head.weight"] == 2 * 129280 * 7168
    assert sizes[f"{prefix}.input_layernorm.weight"] == 2 * 7168


def test_unknown_dtype_is_refused_by_name():
    for name in ("int8", "auto"):
        with pytest.raises(InvalidArgumentError, match=f"dtype: .*but got '{name}'"):
            find_footprint("gpt-oss-20b", dtype=name)


def test_other_dtype_counts_quantized_weights_in_that_dtype():
    stored, widened = (find_footprint("gpt-oss-20b", dtype=dtype) for dtype in (None, "bfloat16"))
    assert stored.weights_bytes == CHECKPOINT_BYTES["gpt-oss-20b"]
    assert widened.weights_bytes == 2 * SHAPES["gpt-oss-20b"].parameters
    assert (stored.quantization, widened.quantization) == ("mxfp4", None)
    assert stored.token_bytes == widened.token_bytes
    assert stored.token_flops == widened.token_flops


def test_folder_with_quantized_weights_counts_their_stored_bytes(tmp_path):
    config = config_of("gpt-oss-20b", num_hidden_layers=2)
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["quantization_config"]["quant_method"] == "mxfp4"
    stored = sum(stored_bytes(outline("gpt-oss-20b", num_hidden_layers=2)).values())
    assert find_footprint(str(tmp_path)).weights_bytes == pytest.approx(stored, rel=1e-3)
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 5000}}')
    assert find_footprint(str(tmp_path)).weights_bytes == 5000


@pytest.mark.parametrize("name", sorted(FAMILIES.values()))
def test_folder_of_every_family_equals_its_shape(name, tmp_path):
    """Folders are as transformers writes them, or lack settings that have defaults."""
    config = config_of(name)
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    expected = footprint_of({"dtype": "bfloat16", **written})
    assert expected.full_layers == SHAPES[name].footprint().full_layers
    assert expected.sliding_layers == SHAPES[name].footprint().sliding_layers
    assert find_footprint(str(tmp_path)) == expected
    if "layer_types" in written and SHAPES[name].family != "kimi_linear":
        del written["layer_types"]
        assert footprint_of(written) == expected
    del written["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert find_footprint(str(tmp_path)).full_layers == expected.full_layers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected a JSON object in"),
        ("[]", "expected a JSON object in"),
        ('{"model_type": "mamba"}', "the family 'mamba' are not known.* Load the model"),
        ('{"model_type": "llama", "dtype": "float8"}', "one of the dtypes .*got 'float8'. Set"),
    ],
)
def test_configuration_that_cannot_be_planned_is_refused(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises((InvalidArgumentError, UnsupportedModelError), match=message):
        find_footprint(str(tmp_path))


def test_shape_is_found_by_its_name_or_repository():
    for name in ("Qwen3-4B", "qwen/qwen3-4b"):
        assert shape_of(name) == "qwen3-4b"
    assert find_footprint("Qwen3-4B").max_positions == 40960
    assert {shape.family for shape in SHAPES.values()} <= KNOWN


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        *(("H100", 80), ("nvidia h100 80GB HBM3", 80), ("H100 NVL 94GB", 94), ("h200", 141)),
        *(("A100-40GB", 40), ("A100-SXM4-80GB", 80), ("a100 80gib", 80), ("L4", 24), ("L40S", 48)),
        *(("A10", 24), ("Tesla T4", 16), ("V100-32GB", 32), ("RTX 3090", 24), ("rtx4090", 24)),
        *(
            ("GeForce RTX 5090", 32),
            ("B200", 180),
            ("GH200-96GB", 96),
            ("AMD Instinct MI300X", 192),
        ),
        *(("80GB", None), ("24GiB", None), ("A1", None), ("", None), ("5 apples", None)),
    ],
)
def test_card_is_found_by_its_common_names(name, gigabytes):
    assert card_bytes(name) == (gigabytes and gigabytes * 10**9)


@pytest.mark.parametrize("card", CARDS)
def test_card_with_several_memory_sizes_needs_one_of_them(card):
    sizes = CARDS[card]
    assert [card_bytes(f"{card}-{size}GB") for size in sizes] == [size * 10**9 for size in sizes]
    with pytest.raises(InvalidArgumentError, match=f"expected {card}-{sizes[0]}GB"):
        card_bytes(f"{card}-1GB")
    if len(sizes) > 1 and card != "H100":
        with pytest.raises(InvalidArgumentError, match=f"{card}-{sizes[1]}GB, but got '{card}'"):
            card_bytes(card)


@pytest.fixture
def no_network(monkeypatch):
    """Whoever asks the hub fails the test."""

    def asked(*args, **options):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("snapkv_app.model_places.get_hf_file_metadata", asked)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.mark.parametrize("wrong", ["qwen3_8b", "nothing"])
def test_misspelt_shape_is_refused_without_a_download(no_network, wrong):
    begin = time.monotonic()
    with pytest.raises(ModelNotFoundError, match=f"got '{wrong}'") as raised:
        find_footprint(wrong)
    assert time.monotonic() - begin < 5
    assert ("Did you mean" in str(raised.value)) == (wrong != "nothing")


def test_shape_cannot_be_loaded_as_a_model(no_network):
    with pytest.raises(
        ModelNotFoundError, match="weights of a model with this shape are in meta-llama/"
    ):
        load("llama-3.1-8b")


@pytest.mark.parametrize("name", ["someone/some-model", "gpt2"])
def test_silent_hub_is_given_up_after_5_seconds(monkeypatch, name):
    waited = []

    def silent(url, *, timeout):
        waited.append(timeout)
        raise TimeoutError

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("snapkv_app.model_places.get_hf_file_metadata", silent)
    with pytest.raises(ModelNotFoundError, match="did not answer within 5 seconds"):
        load(name)
    assert waited == [5]


def test_cached_model_is_loaded_without_the_hub(monkeypatch):
    asked = {}

    def from_pretrained(place, **options):
        asked.update(options)
        raise OSError("stop here")

    monkeypatch.setattr(
        "snapkv_app.model_places.try_to_load_from_cache", lambda *a, **o: "/cache/config.json"
    )
    monkeypatch.setattr("snapkv_app.models.AutoConfig.from_pretrained", from_pretrained)
    with pytest.raises(ModelNotFoundError):
        load("someone/some-model")  # the tests are offline
    assert asked["local_files_only"] is True
