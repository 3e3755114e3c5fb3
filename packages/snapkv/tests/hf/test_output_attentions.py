"""`output_attentions` returns the weights over the stored tokens or raises an error."""

import copy

import pytest
import torch

from snapkv import AdaKV, CompressedCache, SnapKV, UnsupportedModelError
from tests.families import random_ids, tiny_model

PROMPT = 80
POLICY = SnapKV(36, window_size=8, kernel_size=5)

STORED = {
    "dense": (POLICY, {}),
    "heads of different length": (AdaKV(POLICY), {}),
    "codes": (POLICY, {"quantize": "int8"}),
}


@pytest.mark.parametrize("by", ["argument", "config"])
@pytest.mark.parametrize("stored", STORED)
def test_eager_returns_attention_weights_of_dense_storage_and_refuses_others(stored, by):
    model, (policy, options) = copy.deepcopy(tiny_model("llama", "eager")), STORED[stored]
    asked = {"output_attentions": True} if by == "argument" else {}
    model.config.output_attentions = by == "config"
    cache = CompressedCache(model, policy, **options)
    with torch.no_grad():
        prompt = model(random_ids(1, PROMPT), past_key_values=cache, **asked)
        assert [each.shape[-1] for each in prompt.attentions] == [PROMPT] * 4
        if stored == "dense":
            (*_, last) = model(random_ids(1, 1), past_key_values=cache, **asked).attentions
            assert last.shape == (1, 8, 1, 37)
            torch.testing.assert_close(last.sum(dim=-1), torch.ones(1, 8, 1))
            return
        with pytest.raises(
            UnsupportedModelError, match="output_attentions: attention weights cannot be returned"
        ):
            model(random_ids(1, 1), past_key_values=cache, **asked)
        model.config.output_attentions = False
        assert cache.get_seq_length() == PROMPT
        model(random_ids(1, 1), past_key_values=cache)


@pytest.mark.parametrize("stored", STORED)
def test_generate_returns_attention_weights_of_dense_storage_and_refuses_others(stored):
    model, (policy, options) = tiny_model("llama", "eager"), STORED[stored]
    asked = {"output_attentions": True, "return_dict_in_generate": True, "max_new_tokens": 3}

    def generate(**more):
        cache = CompressedCache(model, policy, **options)
        return model.generate(random_ids(1, PROMPT) % 9 + 3, past_key_values=cache, **asked, **more)

    if stored == "dense":
        widths = [[layer.shape[-1] for layer in step] for step in generate().attentions]
        assert widths == [[PROMPT] * 4, [37] * 4, [38] * 4]
    else:
        with pytest.raises(UnsupportedModelError, match="output_attentions"):
            generate()
    with pytest.raises(UnsupportedModelError, match="drafts"):
        generate(prompt_lookup_num_tokens=8, max_matching_ngram_size=1)
