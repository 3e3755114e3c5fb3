"""Caches that are made from one recorded prompt."""

from functools import partial

import pytest
import torch

from snapkv import CompressedCache, FullCache, SnapKV, default_policy
from snapkv.errors import UnsupportedModelError
from snapkv.hf.cache_argument import passed
from snapkv.prefill.shared import SharedReading
from snapkv_app.observing import RecordingPolicy, record_prompt
from tests.families import KINDS, small_model

POLICIES = (FullCache(), SnapKV(24, window_size=8))
RECORDER = partial(RecordingPolicy, recorded_queries=8, recorded_parts=frozenset())
LATENT = [kind for kind in KINDS if "latent" in kind]


def tokens(count):
    return torch.randint(3, 60, (1, count), generator=torch.Generator().manual_seed(2))


def logits_behind(model, cache, ids):
    """(N, V) behind tokens that follow what a cache has read."""
    cache.expect_tokens(ids)
    with torch.no_grad():
        return model(ids, **passed(cache)).logits[0]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in LATENT])
def test_cache_of_a_recorded_prompt_continues_like_one_that_read_it(kind):
    model, prompt, behind = small_model(kind), tokens(60), tokens(1)
    recorded = record_prompt(model, prompt, RECORDER())
    for policy in POLICIES:
        cache = CompressedCache(model, policy)
        torch.testing.assert_close(
            logits_behind(model, cache, prompt)[-1:], recorded.last_logits[0]
        )
        expected = logits_behind(model, cache, behind)
        found = logits_behind(model, recorded.compressed(policy), behind)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("policy", [default_policy("40%"), SnapKV("40%", group_reduce="none")])
def test_budget_counts_token_bytes_of_the_filled_cache(policy):
    """The bytes of a token in the recorded cache do not matter."""
    model, prompt = small_model("llama"), tokens(160)
    cache = CompressedCache(model, policy, quantize="K8V4")
    logits_behind(model, cache, prompt)
    found = record_prompt(model, prompt, RECORDER(recorded_queries=32)).compressed(
        policy, quantize="K8V4"
    )
    assert found.report() == cache.report()


@pytest.mark.parametrize("kind", LATENT)
def test_latent_attention_is_not_recorded(kind):
    with pytest.raises(UnsupportedModelError, match="latent attention"):
        record_prompt(small_model(kind), tokens(60), RECORDER())


def test_layer_with_both_states_and_tokens_is_refused_for_recording():
    with pytest.raises(UnsupportedModelError, match=r"model: .* but only 0 of 3 in \w+ do\. Read"):
        SharedReading(small_model("hybrid"), tokens(60))
