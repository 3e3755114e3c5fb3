"""One property of all that compresses: it answers as a full cache does that hides what was dropped.

The judge is `tests.oracle`. Families, methods, storages and ways to read meet in pairs.
"""

import contextlib

import pytest
import torch
from transformers import DynamicCache

from snapkv import (
    AdaKV,
    CompressedCache,
    FullCache,
    KeyDiff,
    PyramidKV,
    SnapKV,
    UnsupportedModelError,
    default_policy,
)
from snapkv.prefill import layer_by_layer
from tests.families import ONCE, left_padded, random_ids, tiny_model
from tests.oracle import masked_decode_logits, unwrapped
from tests.pairs import pairs

PROMPT, BUDGET, NEW = 90, 40, 4
SNAPKV = SnapKV(BUDGET, window_size=8, kernel_size=5)
RATIO = SnapKV(keep_ratio=0.3, window_size=8)
CACHES = {
    "snapkv": (SNAPKV, {}),
    "ratio": (RATIO, {}),
    "adakv": (AdaKV(SNAPKV), {}),
    "default": (default_policy(BUDGET, window_size=8), {}),
    "pyramidkv": (PyramidKV(BUDGET, window_size=8), {}),
    "keydiff": (KeyDiff(BUDGET, window_size=8), {}),
    "recall": (SNAPKV, {"recall": "host"}),
}
# One kind of attention each; sequences and the matrix judge the other families in the same way.
FAMILIES = {
    family: (family, implementation)
    for family, implementation in ONCE
    if family in ("llama", "cohere2", "gemma2", "glm4", "deepseek_v3", "gpt_oss")
}
LENGTHS = {  # whole, shorter, below the budget, below the window
    "one row": (PROMPT,),
    "two rows": (PROMPT, PROMPT),
    "padded": (PROMPT, 61, 30, 5),
}


@torch.no_grad()
def feed(model, cache, ids, mask, sizes):
    """(B, number of pieces or tokens, V): the logits of each piece's tokens, at true positions."""
    logits, stop = [], 0
    for piece in ids.split(list(sizes), dim=1):
        start, stop = stop, stop + piece.shape[1]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:stop]
        out = model(
            piece, past_key_values=cache, attention_mask=mask[:, :stop], position_ids=positions
        )
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


def with_new(ids, mask):
    """The prompt and the tokens behind it."""
    new = random_ids(len(ids), NEW, seed=1)
    return torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new)], 1), new


@pairs(
    family=FAMILIES,
    cache={name: name for name in CACHES},
    lengths=LENGTHS,
    reading=("at once", "in pieces", "layer by layer"),
    size=(1, NEW),
)
def test_answers_are_those_of_a_full_cache_that_hides_what_was_dropped(
    family, cache, lengths, reading, size
):
    model, (policy, options) = tiny_model(*family), CACHES[cache]
    (ids, mask), full = left_padded(lengths), CompressedCache(model, FullCache())
    cache = CompressedCache(model, policy, **options)
    both, both_mask, new = with_new(ids, mask)
    by_layer = layer_by_layer(model, chunk_tokens=37)
    with by_layer if reading == "layer by layer" else contextlib.nullcontext():
        cache.expect_prompt(PROMPT)
        pieces = (37, 37, 16) if reading == "in pieces" else (PROMPT,)
        sizes = (*pieces, *[size] * (NEW // size))
        got = feed(model, cache, both, both_mask, sizes)
    whole = feed(model, full, both, both_mask, [PROMPT, NEW])
    last, close = got[:, PROMPT - 1], {"atol": 2e-4, "rtol": 2e-4}
    torch.testing.assert_close(last, whole[:, PROMPT - 1], **close)
    if reading == "at once":
        assert torch.equal(last, whole[:, PROMPT - 1]), "the first token is the full cache's"
    expected = masked_decode_logits(model, cache, ids, new, mask)
    torch.testing.assert_close(got[:, PROMPT:], expected, **close)
    assert (whole - got)[:, PROMPT:].abs().max() > 1e-3, "that something was dropped must matter"
    assert_exact_copies(cache, full, mask, exact=reading == "at once")


def assert_exact_copies(cache, full, mask, *, exact):
    """Rows of a dense store are those of the full cache, bit for bit."""
    close = {"atol": 0, "rtol": 0} if exact else {"atol": 1e-4, "rtol": 1e-4}
    for layer in cache.compressed_layers:
        store = cache.layers[layer].store
        if store.ragged is not None:
            continue
        kept = cache.kept_positions(layer)[..., :-NEW]
        index = (kept + (mask == 0).sum(-1)[:, None, None]).clamp(min=0)[..., None]
        for name in ("keys", "values"):
            whole, part = getattr(full.layers[layer], name), getattr(store, name)
            whole = whole.repeat_interleave(part.shape[1] // whole.shape[1], dim=1)
            there = whole.gather(2, index.expand(-1, -1, -1, whole.shape[-1]))[kept >= 0]
            torch.testing.assert_close(part[:, :, : kept.shape[-1]][kept >= 0], there, **close)


@pytest.mark.parametrize("family", ["llama", "cohere2"])
def test_dropping_a_different_set_is_noticed(family):
    """The judge can fail: some kept positions swapped for dropped ones change the logits."""
    model, (ids, mask) = tiny_model(family), left_padded([PROMPT])
    cache = CompressedCache(model, SNAPKV)
    both, both_mask, new = with_new(ids, mask)
    got = feed(model, cache, both, both_mask, [PROMPT, NEW])[:, PROMPT:]
    for layer_idx in cache.compressed_layers:
        kept = cache.layers[layer_idx].slots.kept
        kept[..., : BUDGET // 2] = torch.arange(BUDGET // 2, dtype=torch.int32)
    assert (masked_decode_logits(model, cache, ids, new) - got).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_changes_where_the_budget_covers_the_prompt(family):
    _, implementation = FAMILIES[family]
    model, (ids, mask) = tiny_model(family, implementation), left_padded([PROMPT] * 2)
    both, both_mask, _ = with_new(ids, mask)
    sizes, reference = [PROMPT, *[1] * NEW], unwrapped(model, implementation)
    plain = feed(reference, DynamicCache(config=reference.config), both, both_mask, sizes)
    policies = (FullCache(), SnapKV(PROMPT, window_size=8), SnapKV(keep_ratio=1.0))
    cache = CompressedCache(model, policies[list(FAMILIES).index(family) % 3])
    assert torch.equal(feed(model, cache, both, both_mask, sizes), plain)


OWN_MASKS = [{}, {"quantize": "int8"}, {"turns": "compress"}]


@pytest.mark.parametrize("options", OWN_MASKS, ids=str)
@torch.no_grad()
def test_a_4d_mask_of_ones_own_is_refused_behind_a_compressed_prompt(options):
    model, (ids, pads) = tiny_model("llama"), left_padded((PROMPT, 61))
    cache, places = CompressedCache(model, SNAPKV, **options), pads.sum(-1, keepdim=True)
    model(ids, past_key_values=cache, attention_mask=pads)
    own = torch.ones(2, 1, 1, PROMPT + 1, dtype=torch.bool)
    given = {"attention_mask": own, "position_ids": places, "past_key_values": cache}
    with pytest.raises(UnsupportedModelError, match="attention_mask: expected a 2-D mask"):
        model(random_ids(2, 1), **given)
    given["attention_mask"] = torch.cat([pads, pads.new_ones(2, 1)], dim=1)
    assert model(random_ids(2, 1), **given).logits.isfinite().all()
    assert cache.get_seq_length() == PROMPT + 1
