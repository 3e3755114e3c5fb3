"""What the library assumes about transformers. These tests fail first with a new release.

`make test-newest` runs them and the model tests against the newest release.
"""

import copy
import inspect
import pkgutil
from operator import attrgetter

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from snapkv import CompressedCache, SnapKV
from snapkv.hf.cache_argument import cache_among, passed, with_cache
from snapkv.hf.generate import _AROUND
from tests.families import tiny_config, tiny_model

CACHE = "cache_utils.Cache"
LAYER = "cache_utils.DynamicLayer"
SLIDING = "cache_utils.DynamicSlidingWindowLayer"
STATES = "cache_utils.LinearAttentionLayer"

PARAMETERS = {  # by name, that code passes or overrides; others may stand among them
    f"{CACHE}:__init__": "layers",
    f"{CACHE}:update": "key_states value_states layer_idx",
    f"{CACHE}:get_mask_sizes": "query_length layer_idx",
    f"{CACHE}:get_seq_length": "layer_idx",
    f"{CACHE}:get_query_offset": "layer_idx",
    f"{CACHE}:crop": "tokens_to_remove",
    f"{CACHE}:reorder_cache": "beam_idx",
    f"{CACHE}:batch_repeat_interleave": "repeats",
    f"{CACHE}:batch_select_indices": "indices",
    f"{CACHE}:activate_past_recording": "",
    f"{LAYER}:update": "key_states value_states",
    f"{LAYER}:get_mask_sizes": "query_length",
    f"{LAYER}:lazy_initialization": "key_states value_states",
    f"{LAYER}:crop": "tokens_to_remove",
    f"{SLIDING}:__init__": "sliding_window",
    f"{STATES}:lazy_initialization": "conv_states recurrent_states",
    f"{STATES}:reorder_cache": "beam_idx",
    f"{STATES}:crop": "tokens_to_remove",
    "modeling_utils.AttentionInterface:register": "key value",
    "masking_utils.AttentionMaskInterface:register": "key value",
    "masking_utils.create_causal_mask": "config inputs_embeds attention_mask position_ids",
    "generation.GenerationMixin:_prefill": "input_ids generation_config model_kwargs",
    "modeling_utils.PreTrainedModel:_can_set_attn_implementation": "",
    "modeling_utils.PreTrainedModel:get_decoder": "",
    "configuration_utils.PreTrainedConfig:get_text_config": "decoder",
    **{f"models.llama.modeling_llama.LlamaForCausalLM:{name}": "" for name in _AROUND},
}
"""Methods that are called or overridden, and their parameters."""

ATTRIBUTES = {
    f"{SLIDING}:1": "keys values sliding_window cumulative_length record_past",
    f"{STATES}:": "conv_states recurrent_states is_conv_states_initialized has_previous_state "
    "is_recurrent_states_initialized conv_kernel_size record_past device dtype",
}
"""What a new layer has, behind ``:`` what it is made with."""

KNOWN_KINDS = {
    "DynamicLayer": "compressed",
    "LinearAttentionAndFullAttentionLayer": "compressed",
    "DynamicSlidingWindowLayer": "kept as it is",
    "LinearAttentionLayer": "kept as it is",
    "LinearAttentionAndSlidingWindowAttentionLayer": "kept as it is",
    "DummyLayer": "kept as it is",
    "DynamicIndexedLayer": "refused",
}
"""Of the cache's own layers; those that a model's file adds are refused."""


def part(name):
    owner, _, inner = name.partition(":")
    found = pkgutil.resolve_name(f"transformers.{owner}")
    return attrgetter(inner)(found) if inner else found


@pytest.mark.parametrize("name", PARAMETERS)
def test_transformers_method_accepts_the_parameters_that_snapkv_passes(name):
    assert {*PARAMETERS[name].split()} <= {*inspect.signature(part(name)).parameters}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_transformers_layer_has_the_attributes_that_snapkv_uses(name):
    owner, _, given = name.partition(":")
    made = part(owner)(*map(int, given))
    assert {*ATTRIBUTES[name].split()} <= {*vars(made)}


def test_every_transformers_cache_layer_class_is_known():
    """A new class is refused until support for it has been considered."""
    kinds = {kind for kind in DYNAMIC_LAYER_TYPE_MAPPING.values()}
    own = {kind.__name__ for kind in kinds if kind.__module__ == "transformers.cache_utils"}
    assert own <= {*KNOWN_KINDS}


def test_dynamic_cache_derives_layer_classes_from_config():
    layers = DynamicCache(config=tiny_config("gemma3_text")).layers
    assert [type(layer).__name__ for layer in layers] == [
        "DynamicSlidingWindowLayer",
        "DynamicLayer",
    ] * 2


@torch.no_grad()
def test_attention_is_called_with_states_returned_by_cache_layer(monkeypatch):
    """The call follows the update of the layer and has queries of every head."""
    model, calls = tiny_model("llama"), []
    cache = CompressedCache(model, SnapKV(24, window_size=8))
    name = model.config._attn_implementation
    own = ALL_ATTENTION_FUNCTIONS[name]

    def watched(module, query, key, value, attention_mask, **options):
        calls.append((module.layer_idx, query.shape, key.shape, {"scaling"} <= {*options}))
        return own(module, query, key, value, attention_mask, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, watched)
    model(torch.arange(3, 43)[None], **passed(cache))
    assert calls == [(index, (1, 8, 40, 8), (1, 2, 40, 8), True) for index in range(4)]


@pytest.mark.parametrize("model", ["llama", "gemma3_text", "deepseek_v3"])
@torch.no_grad()
def test_cache_is_passed_under_a_known_name_everywhere(model):
    """This covers the model, its decoder, every layer and the output of `generate`."""
    model, found = copy.deepcopy(tiny_model(model)), []
    cache = CompressedCache(model, SnapKV(24, window_size=8))
    for part in (model, model.get_decoder(), *model.get_decoder().layers):
        part.register_forward_pre_hook(
            lambda _, args, named: found.append(cache_among(named)), with_kwargs=True
        )
    options = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    output = model.generate(
        torch.arange(3, 43)[None], **passed(cache), **options, return_dict_in_generate=True
    )
    assert found == [cache] * 12
    assert cache_among(vars(output)) is cache
    assert cache.prompt_state.prompt_end == 40


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_cache_is_found_and_replaced_under_either_argument_name(name):
    """Users may still pass the old name, and a model then passes on the new one."""
    assert cache_among({name: "cache", "use_cache": True}) == "cache"
    assert with_cache({name: "other", "use_cache": True}, "new") == {
        "use_cache": True,
        **passed("new"),
    }
