"""Flex attention on a CPU, where transformers itself can run it (no sinks, a C++ compiler)."""

import copy
import shutil

import pytest
import torch

from snapkv import CompressedCache, SnapKV, UnsupportedModelError
from tests.families import random_ids, tiny_model

PROMPT = 80
POLICY = SnapKV(36, window_size=8, kernel_size=5)
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="flex on a CPU compiles C++: no g++"),
    pytest.mark.filterwarnings("ignore"),  # torch's compiler warns about itself
]


@pytest.fixture(params=["llama", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def models(request):
    """The same model with eager and with flex attention."""
    torch._dynamo.reset()
    eager = tiny_model(request.param, "eager")
    flex = copy.deepcopy(eager)
    flex.set_attn_implementation("flex_attention")
    return eager, flex


def tokens(model, ids, policy=POLICY, **options):
    cache = CompressedCache(model, policy)
    return model.generate(ids, past_key_values=cache, **OPTIONS, **options), cache


def test_flex_equals_eager(models):
    ids = random_ids(1, PROMPT)
    (eager, eager_cache), (flex, flex_cache) = (tokens(model, ids) for model in models)
    assert torch.equal(flex, eager)
    assert torch.equal(flex_cache.kept_positions(1), eager_cache.kept_positions(1))


@pytest.mark.slow
@pytest.mark.parametrize("policy", [POLICY, SnapKV(keep_ratio=0.3, window_size=8)], ids=str)
def test_flex_equals_eager_in_a_padded_batch(models, policy):
    mask = torch.ones(2, PROMPT, dtype=torch.long)
    mask[1, :60] = 0
    ids = random_ids(2, PROMPT)
    (eager, _), (flex, _) = (tokens(model, ids, policy, attention_mask=mask) for model in models)
    assert torch.equal(flex, eager)


@pytest.mark.slow
def test_flex_prompt_lookup_equals_greedy(models):
    ids = random_ids(1, PROMPT) % 9 + 3
    lookup = {"prompt_lookup_num_tokens": 6, "max_matching_ngram_size": 1}
    looked, _ = tokens(models[1], ids, **lookup)
    assert torch.equal(looked, tokens(models[0], ids)[0])
    mask = torch.ones_like(ids)
    mask[:, :20] = 0
    with pytest.raises(UnsupportedModelError, match="no padding where drafts are verified"):
        tokens(models[1], ids, attention_mask=mask, **lookup)
