"""The layer that was found for a model: kept from run to run, and never taken for another's."""

import copy
import json
import logging

import pytest
import torch

from snapkv import CompressedCache, InvalidArgumentError, OutputError, SnapKV
from snapkv.prefill import selective
from snapkv.prefill.early_layer import default_early_layer, known_early_layer, remember_early_layer
from tests.families import random_ids, tiny_model

LAYERS = 4  # of every tiny model


@pytest.fixture
def model():
    return copy.deepcopy(tiny_model("llama"))


def test_half_the_depth_until_a_layer_is_remembered(model, early_layers):
    assert known_early_layer(model) is None
    assert default_early_layer(model) == LAYERS // 2
    path = remember_early_layer(model, 3, {"loss": 0.01})
    assert known_early_layer(model) == default_early_layer(model) == 3
    assert remember_early_layer(model, 1) == path, "a later search replaces it"
    assert known_early_layer(model) == 1
    assert [file.name for file in early_layers.iterdir()] == [path.name]
    assert json.loads(path.read_text())["measured"] == {}


def test_a_model_is_the_same_in_another_dtype_and_with_caches_but_not_with_other_weights(model):
    remember_early_layer(model, 3)
    cache = CompressedCache(model, SnapKV(20, window_size=8))
    assert known_early_layer(model) == 3
    del cache
    assert known_early_layer(model.to(torch.bfloat16)) == 3
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert known_early_layer(model) is None


def test_it_is_where_reading_selectively_begins(model):
    """The tokens that go on, by how many layers have read all of them."""

    def kept(**options):
        cache = CompressedCache(model, SnapKV(30, window_size=8))
        with torch.inference_mode(), selective(model, keep_ratio=0.3, least_tokens=0, **options):
            model(random_ids(1, 120), past_key_values=cache, logits_to_keep=1)
        return [cache.kept_positions(layer).tolist() for layer in range(LAYERS)]

    assert kept() == kept(layer=LAYERS // 2)
    remember_early_layer(model, 3)
    assert kept() == kept(layer=3) != kept(layer=LAYERS // 2)


CONTENTS = (b"", b"\xff\x00", b"[]", b'{"layer": 3, "model": {"class": "Other"}}', 0, 4, 2.0, True)


@pytest.mark.parametrize("content", CONTENTS)
def test_what_does_not_say_it_is_no_knowledge_and_named_once(model, content, caplog):
    path = remember_early_layer(model, 3)
    if not isinstance(content, bytes):  # no layer, beside the right model
        content = json.dumps(json.loads(path.read_text()) | {"layer": content}).encode()
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "snapkv.prefill"):
        assert [known_early_layer(model) for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    remember_early_layer(model, 3)
    assert known_early_layer(model) == 3


def test_no_layer_of_the_model_and_no_folder_are_refused(model, early_layers):
    for layer in (0, LAYERS):
        with pytest.raises(InvalidArgumentError, match="layer: expected"):
            remember_early_layer(model, layer)
    assert not early_layers.exists()
    early_layers.write_text("in the way")
    with pytest.raises(OutputError, match="early-layers-"):
        remember_early_layer(model, 3)


def test_what_was_found_of_the_demo_model_comes_with_the_package(demo):
    assert known_early_layer(demo.model) == 18
