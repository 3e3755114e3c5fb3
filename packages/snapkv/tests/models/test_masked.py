"""A budget that covers the prompt does not change the logits; 4-D masks of callers are refused."""

import pytest
import torch
from transformers import DynamicCache

from snapkv import CompressedCache, FullCache, SnapKV, UnsupportedModelError
from tests.families import IMPLEMENTATIONS, call, left_padded, random_ids, tiny_model
from tests.oracle import unwrapped

PROMPT = 90
COVERING = [
    ("llama", FullCache()),
    ("cohere2", SnapKV(PROMPT, window_size=8)),
    ("gemma2", SnapKV(keep_ratio=1.0)),
    ("deepseek_v3", FullCache()),
    ("gpt_oss", SnapKV(PROMPT, window_size=8)),
]


@pytest.mark.parametrize(("family", "policy"), COVERING)
def test_budget_that_covers_prompt_gives_same_logits_as_dynamic_cache(family, policy):
    implementation, ids = IMPLEMENTATIONS[family][0], random_ids(2, PROMPT + 2)
    model = tiny_model(family, implementation)
    reference = unwrapped(model, implementation)
    plain, cache = DynamicCache(config=reference.config), CompressedCache(model, policy)
    for piece in ids.split([PROMPT, 1, 1], dim=1):
        assert torch.equal(call(model, cache, piece), call(reference, plain, piece))


@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}, {"turns": "compress"}], ids=str)
@torch.no_grad()
def test_4d_mask_of_caller_is_refused_after_compressed_prompt(options):
    model, (ids, pads) = tiny_model("llama"), left_padded((PROMPT, 61))
    cache = CompressedCache(model, SnapKV(40, window_size=8), **options)
    model(ids, past_key_values=cache, attention_mask=pads)
    own = torch.ones(2, 1, 1, PROMPT + 1, dtype=torch.bool)
    given = {"position_ids": pads.sum(-1, keepdim=True), "past_key_values": cache}
    with pytest.raises(UnsupportedModelError, match="attention_mask: expected a 2-D mask"):
        model(random_ids(2, 1), attention_mask=own, **given)
    pads = torch.cat([pads, pads.new_ones(2, 1)], dim=1)
    assert model(random_ids(2, 1), attention_mask=pads, **given).logits.isfinite().all()
    assert cache.get_seq_length() == PROMPT + 1
