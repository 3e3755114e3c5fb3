"""Every step attends to what is stored and to the evicted pages that its query chooses."""

import sys

import pytest
import torch
from transformers import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from snapkv import (
    H2O,
    AdaKV,
    CompressedCache,
    Document,
    InvalidArgumentError,
    InvalidTypeError,
    PageRecall,
    SnapKV,
    UnsupportedModelError,
)
from snapkv.decoding import CandidateTree, Medusa
from tests.decoding.heads import random_heads
from tests.families import CLOSE, ONCE, call, random_ids, tiny_model
from tests.oracle import unwrapped
from tests.pairs import pairs

PROMPT, BUDGET, WINDOW, STEPS = 90, 30, 8, 4
POLICY = SnapKV(BUDGET, window_size=WINDOW, kernel_size=5)
ALL = PageRecall(1000)
LATENT = ("deepseek_v3",)
FULL_ONLY = [case for case in ONCE if case[0] not in LATENT]


# The reference: a full cache whose attention hides what is neither kept nor in a chosen page.

_step: dict[str, object] = {}


def _chosen(query, keys, kept, first):
    """The columns of the chosen pages of one head: (G, D) queries, (T, D) keys, its first column.

    The bound of a page is the sum over the channels of the larger of two products, and a group's
    bound the mean of its query heads'.
    """
    rule, prompt = _step["rule"], _step["prompt"]
    evicted = [column for column in range(first, prompt) if column not in kept]
    size = rule.page_tokens
    pages = [evicted[at : at + size] for at in range(0, len(evicted), size)]
    bounds = []
    for page in pages:
        least, highest = keys[page].amin(0), keys[page].amax(0)
        bounds.append(torch.maximum(query * least, query * highest).sum(-1).mean().item())
    best = sorted(range(len(pages)), key=lambda page: -bounds[page])[: rule.pages]
    return {column for page in best for column in pages[page]}


def _attend_to_pages(module, query, key, value, attention_mask, **options):
    """Eager attention of one token to what is kept, what came since, and the chosen pages."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    kept = _step.get("kept", {}).get(module.layer_idx)
    if kept is None:
        return eager(module, query, key, value, attention_mask, **options)
    B, Hq, _, _ = query.shape
    heads, prompt = kept.shape[1], _step["prompt"]
    hidden = torch.zeros(B, Hq, 1, key.shape[2])
    for row in range(B):
        pads = int(_step["pads"][row])
        for head in range(heads):
            own = {column + pads for column in kept[row, head].tolist() if column >= 0}
            members = slice(head * Hq // heads, (head + 1) * Hq // heads)
            keys = key[row, head * key.shape[1] // heads]
            seen = own | _chosen(query[row, members, 0], keys, own, pads)
            gone = [column for column in range(prompt) if column not in seen]
            hidden[row, members, :, gone] = torch.finfo(query.dtype).min
    return eager(module, query, key, value, torch.minimum(attention_mask, hidden), **options)


AttentionInterface.register("pages_oracle", _attend_to_pages)
AttentionMaskInterface.register("pages_oracle", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


@torch.no_grad()
def reference_logits(model, cache, rule, ids, tokens, mask=None):
    """(B, N, V): what a full cache says after every token, under the reference's mask."""
    reference = unwrapped(model, "eager")
    reference.set_attn_implementation("pages_oracle")
    mask = torch.ones_like(ids) if mask is None else mask
    full = DynamicCache(config=reference.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    reference(ids, past_key_values=full, attention_mask=mask, position_ids=positions)
    kept = {layer: cache.kept_positions(layer) for layer in cache.compressed_layers}
    pads, logits = (mask == 0).sum(-1), []
    _step.update(rule=rule, kept=kept, prompt=ids.shape[1], pads=pads)
    try:
        for token in tokens.split(1, dim=1):
            mask = torch.cat([mask, torch.ones_like(token)], dim=1)
            position = (mask.sum(-1) - 1)[:, None]
            options = {"attention_mask": mask, "position_ids": position}
            logits.append(reference(token, past_key_values=full, **options).logits)
    finally:
        _step.clear()
    return torch.cat(logits, dim=1)


def paged(model, rule, ids, policy=POLICY, **options):
    """A cache that has read a prompt."""
    cache = CompressedCache(model, policy, recall=rule, **options)
    call(model, cache, ids)
    return cache


def step_logits(model, cache, tokens, mask=None):
    """(B, N, V), the tokens fed one by one."""
    logits = []
    for token in tokens.split(1, dim=1):
        options = {}
        if mask is not None:
            mask = torch.cat([mask, torch.ones_like(token)], dim=1)
            options = {"attention_mask": mask, "position_ids": (mask.sum(-1) - 1)[:, None]}
        logits.append(call(model, cache, token, **options))
    return torch.cat(logits, dim=1)


def prompt(batch=1):
    return random_ids(batch, PROMPT)


def continuation(batch=1, tokens=STEPS):
    return random_ids(batch, tokens, seed=5)


@pytest.mark.parametrize(("family", "implementation"), FULL_ONLY)
def test_every_family_attends_to_the_pages_of_the_reference(family, implementation):
    """With pages for everything that is the full cache."""
    model, rule = tiny_model(family, implementation), PageRecall(2, page_tokens=6)
    cache = paged(model, rule, prompt(2))
    expected = reference_logits(model, cache, rule, prompt(2), continuation(2))
    plain = paged(model, "host", prompt(2))
    got = step_logits(model, cache, continuation(2))
    torch.testing.assert_close(got, expected, **CLOSE)
    assert not torch.allclose(got, step_logits(model, plain, continuation(2)), atol=1e-3)
    reference = unwrapped(model, implementation)
    full = DynamicCache(config=reference.config)
    call(reference, full, prompt(2))
    expected = step_logits(reference, full, continuation(2))
    got = step_logits(model, paged(model, ALL, prompt(2)), continuation(2))
    torch.testing.assert_close(got, expected, **CLOSE)


@pairs(
    policy={
        "snapkv": POLICY,
        "per query head": SnapKV(BUDGET, window_size=WINDOW, group_reduce="none"),
        "ratio": SnapKV(keep_ratio=0.3, window_size=WINDOW),
        "adakv": AdaKV(POLICY),
    },
    padded=[False, True],
    page_tokens=[1, 7],
    pages=[1, 1000],
)
def test_pages_of_any_number_and_size(policy, padded, page_tokens, pages):
    """Rows with pads: one evicts less than a page, one fits the budget, one has none."""
    model, rule = tiny_model("llama"), PageRecall(pages, page_tokens=page_tokens)
    ids = prompt(3)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :55], mask[1, :70] = 0, 0
        ids = ids.masked_fill(mask == 0, 0)
    cache = CompressedCache(model, policy, recall=rule)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    call(model, cache, ids, attention_mask=mask, position_ids=positions)
    expected = reference_logits(model, cache, rule, ids, continuation(3), mask)
    got = step_logits(model, cache, continuation(3), mask)
    torch.testing.assert_close(got, expected, **CLOSE)


# What goes on.


def generated(model, cache, ids, **options):
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=6,
        do_sample=False,
        **options,
    )


RULE = PageRecall(2, page_tokens=5)


@pytest.mark.parametrize("drafts", ["lookup", "tree"])
def test_drafts_are_verified_as_plain_decoding_says(drafts):
    model = tiny_model("llama")
    plain = generated(model, CompressedCache(model, POLICY, recall=RULE), prompt())
    options = {"prompt_lookup_num_tokens": 3}
    if drafts == "tree":
        tree = CandidateTree.likeliest([(0.3, 0.3)] * 3, 12)
        options = {"custom_generate": Medusa(random_heads(model), tree)}
    cache = CompressedCache(model, POLICY, recall=RULE)
    assert torch.equal(generated(model, cache, prompt(), **options), plain)


def test_beams_keep_their_pages():
    model = tiny_model("llama")
    beams = CompressedCache(model, POLICY, recall=RULE)
    assert generated(model, beams, prompt(), num_beams=3).shape == (1, PROMPT + 6)


def test_a_prompt_read_in_inference_mode_goes_on_with_gradients():
    model = tiny_model("llama")
    expected = step_logits(model, paged(model, RULE, prompt()), continuation(tokens=2))
    with torch.inference_mode():
        cache = paged(model, RULE, prompt())
        call(model, cache, continuation(tokens=2)[:, :1])
    logits = model(continuation(tokens=2)[:, 1:], past_key_values=cache).logits
    assert logits.requires_grad
    torch.testing.assert_close(logits, expected[:, 1:], **CLOSE)


def test_a_document_answers_with_pages():
    model, asked = tiny_model("llama"), [random_ids(1, n, seed=n)[0].tolist() for n in (9, 14)]
    document = Document(model, prompt(), POLICY, recall=RULE)
    inputs = document.inputs(asked)
    got = model.generate(**inputs, max_new_tokens=5, do_sample=False)[:, -5:]
    for row, question in enumerate(asked):
        whole = torch.cat([prompt(), torch.tensor([question])], dim=1)
        alone = generated(model, CompressedCache(model, POLICY, recall=RULE), whole)
        assert torch.equal(got[row], alone[0, whole.shape[1] : whole.shape[1] + 5])


@pytest.mark.parametrize("policy", [POLICY, AdaKV(POLICY)], ids=["even", "ragged"])
def test_a_saved_cache_goes_on_with_its_pages(policy, tmp_path):
    model = tiny_model("llama")
    cache = paged(model, PageRecall(2, page_tokens=5, where=tmp_path / "parked"), prompt(2), policy)
    step_logits(model, cache, random_ids(2, 2, seed=9))
    cache.save(tmp_path / "one")
    expected = step_logits(model, cache, continuation(2))
    for options in ({}, {"recall": RULE}, {"recall": str(tmp_path / "other")}):
        loaded = CompressedCache.load(tmp_path / "one", model, **options)
        got = step_logits(model, loaded, continuation(2))
        torch.testing.assert_close(got, expected, **CLOSE)
    paged(model, "host", prompt(2), policy).save(tmp_path / "host")
    loaded = CompressedCache.load(tmp_path / "host", model, recall=RULE)
    fresh = paged(model, RULE, prompt(2), policy)
    got = step_logits(model, loaded, continuation(2))
    torch.testing.assert_close(got, step_logits(model, fresh, continuation(2)), **CLOSE)


# What it costs, and where it ends.


def test_the_device_holds_the_budget_and_the_bounds(monkeypatch):
    model, fetched = tiny_model("llama"), []
    cache = paged(model, RULE, prompt())
    bare = paged(model, "host", prompt())
    for layer in cache.layers:
        fetch = layer.offloaded.fetch

        def noted(columns, fetch=fetch):
            fetched.append(fetch(columns).keys.shape[0])
            return fetch(columns)

        monkeypatch.setattr(layer.offloaded, "fetch", noted)
    step_logits(model, cache, continuation())
    step_logits(model, bare, continuation())
    assert fetched == [2 * 2 * 5] * 4 * STEPS  # heads, pages, tokens; layers and steps
    report, other = cache.report(), bare.report()
    assert report.held_bytes == other.held_bytes
    pages = (PROMPT - BUDGET) // 5
    per_page = 2 * 8 * 4 + 5 * 4  # two bounds of 8 channels, five columns, four bytes each
    added = report["index_bytes"] - other["index_bytes"]
    assert added == 4 * 2 * pages * per_page  # layers, heads


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"storage": "static"}, "storage: expected 'dynamic' with recall=PageRecall"),
        ({"policy": H2O(64)}, "policy: expected one that only compresses"),
        ({"recall": PageRecall(1, page_tokens=4, where="a\0b")}, "recall: expected 'host' or a fo"),
    ],
)
def test_what_does_not_go_with_it_is_said_when_the_cache_is_made(options, said):
    with pytest.raises(InvalidArgumentError, match=said):
        CompressedCache(tiny_model("llama"), **{"policy": POLICY, "recall": RULE, **options})
    with pytest.raises(InvalidArgumentError, match="pages: expected at least 1"):
        PageRecall(0)
    with pytest.raises(InvalidTypeError, match="page_tokens: expected"):
        PageRecall(1, page_tokens=1.5)


def test_latent_attention_is_refused_before_anything_is_dropped():
    model = tiny_model("deepseek_v3")
    cache = CompressedCache(model, POLICY, recall=RULE)
    with pytest.raises(UnsupportedModelError, match="recall: expected attention to the keys as"):
        call(model, cache, prompt())
    assert cache.layers[0].seen_tokens == 0


def test_a_mask_of_ones_own_is_refused():
    model = tiny_model("llama")
    cache = paged(model, RULE, prompt())
    mask = torch.ones(1, 1, 1, BUDGET + 1, dtype=torch.bool)
    with pytest.raises(UnsupportedModelError, match="attention_mask: expected a 2-D mask behind a"):
        call(model, cache, continuation(tokens=1), attention_mask=mask)
    assert cache.get_seq_length() == PROMPT
