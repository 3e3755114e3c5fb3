"""Flex attention on a CPU.

It needs a C++ compiler, and transformers does not support sinks there.
"""

import copy
import shutil

import pytest
import torch

from snapkv import CompressedCache, SnapKV
from tests.families import random_ids, tiny_model

PROMPT = 80
POLICY = SnapKV(36, window_size=8, kernel_size=5)

pytestmark = [
    pytest.mark.slow,  # compiles for ten seconds; its masks are in tests/hf/test_masks.py
    pytest.mark.skipif(shutil.which("g++") is None, reason="flex on a CPU compiles C++: no g++"),
    pytest.mark.filterwarnings("ignore"),  # torch's compiler warns about itself
]


@pytest.fixture(params=["llama", "gemma3_text"])
def models(request):
    """Return the same model with eager and with flex attention."""
    torch._dynamo.reset()
    eager = tiny_model(request.param, "eager")
    flex = copy.deepcopy(eager)
    flex.set_attn_implementation("flex_attention")
    return eager, flex


def tokens(model, ids, policy=POLICY, **options):
    cache = CompressedCache(model, policy)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(ids, past_key_values=cache, **options), cache


@pytest.mark.parametrize("policy", [POLICY, SnapKV(keep_ratio=0.3, window_size=8)], ids=str)
@pytest.mark.parametrize("pads", [0, 60])
def test_flex_attention_gives_same_tokens_and_positions_as_eager(models, policy, pads):
    mask = torch.ones(2, PROMPT, dtype=torch.long)
    mask[1, :pads] = 0
    found = [tokens(model, random_ids(2, PROMPT), policy, attention_mask=mask) for model in models]
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(*(cache.kept_positions(1) for _, cache in found))


def test_prompt_lookup_with_flex_attention_gives_same_tokens_as_greedy(models):
    ids = random_ids(1, PROMPT) % 9 + 3
    lookup = {"prompt_lookup_num_tokens": 6, "max_matching_ngram_size": 1}
    looked, _ = tokens(models[1], ids, **lookup)
    assert torch.equal(looked, tokens(models[0], ids)[0])
    mask = torch.ones_like(ids)
    mask[:, :20] = 0
    looked, _ = tokens(models[1], ids, attention_mask=mask, **lookup)
    assert torch.equal(looked, tokens(models[0], ids, attention_mask=mask)[0])
