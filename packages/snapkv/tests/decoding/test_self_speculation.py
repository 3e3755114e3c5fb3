"""Self-speculation: the full cache's text, whatever the compressed cache drafts."""

import pytest
import torch

from snapkv import (
    TOVA,
    CacheMismatchError,
    CompressedCache,
    FullCache,
    InvalidArgumentError,
    SnapKV,
)
from snapkv.decoding import SelfSpeculation
from tests.decoding.test_medusa import (
    COMBINED,
    NEW,
    OPTIONS,
    POLICY,
    PROMPT,
    STORAGES,
    generate,
    new_cache,
    stored,
)
from tests.families import random_ids, tiny_model
from tests.oracle import unwrapped


@pytest.mark.parametrize(("family", "implementation", "storage"), COMBINED)
def test_the_text_is_the_full_caches(family, implementation, storage):
    model, ids = tiny_model(family, implementation), random_ids(1, PROMPT)
    speculation = SelfSpeculation(3)
    cache = new_cache(model, storage)
    text = generate(model, ids, cache, custom_generate=speculation)
    assert torch.equal(text, unwrapped(model, implementation).generate(ids, **OPTIONS))
    assert cache.get_seq_length() == speculation.full_cache.get_seq_length() == PROMPT + NEW - 1


@pytest.mark.parametrize(
    ("storage", "draft_tokens"), [(name, (2, 7)[i % 2]) for i, name in enumerate(STORAGES)]
)
def test_both_caches_hold_the_same_text(storage, draft_tokens):
    model, ids = tiny_model("llama"), random_ids(1, PROMPT, seed=4)
    cache, speculation = new_cache(model, storage), SelfSpeculation(draft_tokens)
    generate(model, ids, cache, custom_generate=speculation)
    for index, (keys, values) in enumerate(stored(cache)):
        full = speculation.full_cache.layers[index]
        heads = keys.shape[1] // full.keys.shape[1]
        for ours, theirs in ((keys, full.keys), (values, full.values)):
            behind = theirs[..., 1 - NEW :, :].repeat_interleave(heads, dim=1)
            assert torch.equal(ours[..., 1 - NEW :, :], behind)


def test_a_cache_that_keeps_everything_drafts_what_is_accepted():
    model, ids = tiny_model("llama"), random_ids(1, PROMPT)
    speculation = SelfSpeculation(4)
    generate(model, ids, CompressedCache(model, FullCache()), custom_generate=speculation)
    tally = speculation.tally
    assert tally.new_tokens == NEW
    assert (tally.passes, tally.accepted, tally.draft_passes) == (3, 12, 12)
    assert tally.acceptance_length == (NEW - 1) / 3


@pytest.mark.slow
def test_sampling_draws_from_the_full_caches_distribution():
    """The second token's frequencies over many runs, against the model's own probabilities."""
    model, ids = tiny_model("llama"), random_ids(1, 40)
    options = {"do_sample": True, "temperature": 2.0, "top_k": 4, "max_new_tokens": 3}
    policy, runs = SnapKV(12, window_size=4, kernel_size=3), 300
    torch.manual_seed(0)

    def pairs(**more):
        drawn = {}
        for _ in range(runs):
            cache = CompressedCache(model, more.pop("policy", policy))
            text = generate(model, ids, cache, **options, **more)
            key = tuple(text[0, 40:42].tolist())
            drawn[key] = drawn.get(key, 0) + 1
        return drawn

    ours = pairs(custom_generate=SelfSpeculation(2))
    with torch.no_grad():
        plain = unwrapped(model, "sdpa")
        first = _top(plain(ids).logits[0, -1])
        for token, share in first.items():
            second = _top(plain(torch.cat([ids, torch.tensor([[token]])], 1)).logits[0, -1])
            for following, part in second.items():
                p = share * part
                seen = ours.pop((token, following), 0) / runs
                assert abs(seen - p) < 4 * (p * (1 - p) / runs) ** 0.5 + 2 / runs
    assert not ours


def _top(logits):
    best = logits.topk(4)
    return dict(zip(best.indices.tolist(), (best.values / 2).softmax(-1).tolist(), strict=True))


def test_what_cannot_draft_is_refused():
    model, ids = tiny_model("llama"), random_ids(1, PROMPT)
    with pytest.raises(InvalidArgumentError, match="only compresses the prompt"):
        generate(model, ids, CompressedCache(model, TOVA(36)), custom_generate=SelfSpeculation())
    used = CompressedCache(model, POLICY)
    text = generate(model, ids, used)
    with pytest.raises(CacheMismatchError, match="empty cache"):
        generate(model, text, used, custom_generate=SelfSpeculation())
    with pytest.raises(InvalidArgumentError, match="draft_tokens: expected"):
        SelfSpeculation(0)
    sliding = tiny_model("gemma3_text")
    with pytest.raises(InvalidArgumentError, match="draft_tokens: expected less than 23"):
        generate(
            sliding, ids, CompressedCache(sliding, POLICY), custom_generate=SelfSpeculation(23)
        )
