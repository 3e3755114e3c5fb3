"""Every family is judged by the same oracle, under every attention that transformers offers it."""

import pytest
import torch
from transformers import DynamicCache

from snapkv import CompressedCache, FullCache, SnapKV, UnsupportedModelError
from tests.families import CASES, FAMILIES, IMPLEMENTATIONS, ONCE, random_ids, tiny_model
from tests.oracle import masked_decode_logits, unwrapped

PROMPT = 90
BUDGET = 40
POLICY = SnapKV(BUDGET, window_size=8, kernel_size=5)

cases = pytest.mark.parametrize(("family", "implementation"), CASES)
once = pytest.mark.parametrize(("family", "implementation"), ONCE)


@torch.no_grad()
def feed(model, cache, ids, continuation, mask=None):
    """Logits of the prompt's last token and of every fed token, (B, 1 + N, V)."""
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)
    out = model(ids, past_key_values=cache, attention_mask=mask, position_ids=positions)
    logits = [out.logits[:, -1]]
    for step in range(continuation.shape[1]):
        token = continuation[:, step : step + 1]
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)
        positions = None if mask is None else mask.sum(-1, keepdim=True) - 1
        out = model(token, past_key_values=cache, attention_mask=mask, position_ids=positions)
        logits.append(out.logits[:, -1])
    return torch.stack(logits, dim=1)


def shares_one_latent(model):
    """Newer transformers cache the latent of multi-head latent attention, older its expansion."""
    plain = model(random_ids(1, 4), use_cache=True).past_key_values.layers[0].keys
    return plain.shape[1] == 1 and model.config.num_attention_heads > 1


def left_padded(lengths, tokens=PROMPT):
    ids, mask = random_ids(len(lengths), tokens), torch.ones(len(lengths), tokens, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, : tokens - length] = 0
        mask[row, : tokens - length] = 0
    return ids, mask


@cases
def test_decode_logits_equal_masked_full_attention(family, implementation):
    model, ids = tiny_model(family, implementation), random_ids(2, PROMPT)
    continuation = random_ids(2, 4, seed=1)
    cache = CompressedCache(model, POLICY)
    got = feed(model, cache, ids, continuation)[:, 1:]
    expected = masked_decode_logits(model, cache, ids, continuation)
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)
    full = feed(model, CompressedCache(model, FullCache()), ids, continuation)[:, 1:]
    assert (full - got).abs().max() > 1e-3, "compression must matter for this test to mean anything"


@once
def test_dropping_a_different_set_is_noticed(family, implementation):
    """The oracle can fail: one kept position swapped for a dropped one changes the logits."""
    model, ids = tiny_model(family, implementation), random_ids(1, PROMPT)
    continuation = random_ids(1, 2, seed=1)
    cache = CompressedCache(model, POLICY)
    got = feed(model, cache, ids, continuation)[:, 1:]
    for layer_idx in cache.compressed_layers:
        kept = cache.layers[layer_idx].slots.kept
        kept[..., : BUDGET // 2] = torch.arange(BUDGET // 2, dtype=torch.int32)
    expected = masked_decode_logits(model, cache, ids, continuation)
    assert (expected - got).abs().max() > 1e-3


@once
def test_tokens_and_logits_are_bit_identical_when_the_budget_covers_the_prompt(
    family, implementation
):
    model, ids = tiny_model(family, implementation), random_ids(2, PROMPT)
    continuation = random_ids(2, 4, seed=1)
    reference = unwrapped(model, implementation)
    plain = feed(reference, DynamicCache(config=reference.config), ids, continuation)
    for policy in (FullCache(), SnapKV(PROMPT, window_size=8), SnapKV(keep_ratio=1.0)):
        got = feed(model, CompressedCache(model, policy), ids, continuation)
        assert torch.equal(got, plain), policy


@once
def test_first_token_is_that_of_the_full_cache(family, implementation):
    model, ids = tiny_model(family, implementation), random_ids(2, PROMPT)
    nothing = ids[:, :0]
    full = feed(model, CompressedCache(model, FullCache()), ids, nothing)
    assert torch.equal(feed(model, CompressedCache(model, POLICY), ids, nothing), full)


@once
def test_stored_rows_are_exact_copies(family, implementation):
    model, ids = tiny_model(family, implementation), random_ids(2, PROMPT)
    full, small = CompressedCache(model, FullCache()), CompressedCache(model, POLICY)
    feed(model, full, ids, ids[:, :0])
    feed(model, small, ids, ids[:, :0])
    for layer_idx in small.compressed_layers:
        index = small.kept_positions(layer_idx).unsqueeze(-1)
        assert index.shape[2] == BUDGET
        for name in ("keys", "values"):
            whole = getattr(full.layers[layer_idx], name)
            part = getattr(small.layers[layer_idx], name)
            expected = whole.gather(2, index.expand(-1, -1, -1, whole.shape[-1]))
            assert torch.equal(part, expected)


@once
@pytest.mark.parametrize("policy", [POLICY, SnapKV(keep_ratio=0.3, window_size=8)], ids=str)
def test_left_padded_rows_decode_as_they_do_alone(family, implementation, policy):
    lengths = [PROMPT, 61, 30, 5]  # whole, shorter, below the budget, below the window
    model, (ids, mask) = tiny_model(family, implementation), left_padded(lengths)
    continuation = random_ids(len(lengths), 4, seed=1)
    cache = CompressedCache(model, policy)
    together = feed(model, cache, ids, continuation, mask)
    for row, length in enumerate(lengths):
        alone_cache = CompressedCache(model, policy)
        alone = feed(model, alone_cache, ids[row : row + 1, -length:], continuation[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, atol=1e-3, rtol=1e-3)
        for layer_idx in cache.compressed_layers:
            padded = cache.kept_positions(layer_idx)[row]
            for head, kept in enumerate(alone_cache.kept_positions(layer_idx)[0]):
                assert padded[head][padded[head] >= 0].tolist() == kept.tolist()


@once
def test_per_query_head_selection_equals_its_masked_oracle(family, implementation):
    model, ids = tiny_model(family, implementation), random_ids(1, PROMPT)
    continuation = random_ids(1, 3, seed=1)
    policy = SnapKV(BUDGET, window_size=8, kernel_size=5, group_reduce="none")
    cache = CompressedCache(model, policy)
    if shares_one_latent(model):
        with pytest.raises(UnsupportedModelError, match="the latent attention of"):
            feed(model, cache, ids, continuation)
        return
    got = feed(model, cache, ids, continuation)[:, 1:]
    heads = model.config.num_attention_heads
    assert cache.kept_positions(cache.compressed_layers[0]).shape[1] == heads
    expected = masked_decode_logits(model, cache, ids, continuation)
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", [f for f in FAMILIES if len(IMPLEMENTATIONS[f]) > 1])
def test_eager_and_sdpa_keep_the_same(family):
    ids = random_ids(1, PROMPT)
    kept = []
    for implementation in IMPLEMENTATIONS[family]:
        model = tiny_model(family, implementation)
        cache = CompressedCache(model, POLICY)
        feed(model, cache, ids, ids[:, :0])
        kept.append(cache.kept_positions(cache.compressed_layers[-1]))
    assert torch.equal(*kept)
