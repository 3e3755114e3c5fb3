"""Reading in pieces under a cap: the cap holds at every piece, and nothing else changes."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from snapkv import (
    H2O,
    AdaKV,
    CompressedCache,
    FullCache,
    InvalidArgumentError,
    SnapKV,
    UnsupportedModelError,
    plan,
)
from snapkv.errors import OutOfMemoryError
from snapkv.plan.advice import chunked_bytes, layerwise_bytes
from snapkv.plan.footprint import footprint_of_loaded
from snapkv.policies import ExpectedAttention, KeyDiff, LagKV, PyramidKV
from snapkv.prefill import chunked, layer_by_layer
from tests.families import ONCE, random_ids, tiny_config, tiny_model

CAP, WINDOW = 56, 8
POLICY = SnapKV(40, window_size=WINDOW)


class Watched(CompressedCache):
    """Notes what every layer stores before a piece is read, and the most while one is."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.between, self.most, self.whole = [], 0, 0

    def update(self, keys, values, layer_idx, *args, **kwargs):
        layers = [self.layers[index] for index in self.compressed_layers]
        if layer_idx == self.compressed_layers[0]:
            self.between.append([layer.store.slots for layer in layers])
        states = super().update(keys, values, layer_idx, *args, **kwargs)
        stored = [layer.store.slots for layer in layers]
        self.most = max(self.most, *stored)
        self.whole = max(self.whole, sum(tokens > CAP + WINDOW for tokens in stored))
        return states


def one_layer(num_key_value_heads):
    torch.manual_seed(0)
    config = tiny_config("llama", num_hidden_layers=1, num_key_value_heads=num_key_value_heads)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def generated(model, cache, ids, **options):
    mask = torch.ones_like(ids)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask, **options}
    return model.generate(ids, past_key_values=cache, **options)


@pytest.mark.parametrize(
    ("family", "implementation", "chunk_tokens"),
    [("llama", "sdpa", 2), *((*case, (12, 24, 37)[i % 3]) for i, case in enumerate(ONCE[::2]))],
)
def test_no_layer_holds_more_than_the_cap_between_pieces(family, implementation, chunk_tokens):
    model, ids = tiny_model(family, implementation), random_ids(2, 90 if chunk_tokens < 5 else 150)
    cache = Watched(model, POLICY)
    with torch.no_grad(), chunked(model, cap_tokens=CAP, chunk_tokens=chunk_tokens):
        model(ids, past_key_values=cache)
    # no piece ends within the tokens that vote: a rest so short is read with the last piece
    assert len(cache.between) == 1 + (ids.shape[1] - WINDOW - 1) // chunk_tokens
    assert max(map(max, cache.between)) == CAP
    assert cache.most <= CAP + chunk_tokens + WINDOW
    assert cache.whole == 1, "one layer at a time"
    for layer in cache.compressed_layers:
        positions = cache.kept_positions(layer)
        assert positions.shape[-1] == cache.layers[layer].store.slots == 40
        assert (positions.diff(dim=-1) > 0).all()
        assert (positions[..., -8:] == torch.arange(ids.shape[1] - 8, ids.shape[1])).all()


def test_a_piece_attends_to_what_is_held_and_to_itself():
    """One layer with one KV head: a mask over the whole prompt says the same to transformers."""
    model = one_layer(num_key_value_heads=1)
    ids, cache = random_ids(1, 140), CompressedCache(model, POLICY)
    cache.expect_prompt(141)
    with torch.no_grad(), chunked(model, cap_tokens=CAP, chunk_tokens=20):
        model(ids[:, :120], past_key_values=cache)
        held = cache.kept_positions(0)[0, 0]
        logits = model(ids[:, 120:], past_key_values=cache).logits
    assert len(held) == CAP
    seen = torch.ones(140, 140, dtype=torch.bool).tril()
    dropped = torch.ones(140, dtype=torch.bool)
    dropped[held] = dropped[120:] = False
    seen[120:, dropped] = False
    with torch.no_grad():
        expected = model(ids, attention_mask=seen[None, None]).logits[:, 120:]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("chunk_tokens", "cap_tokens"), [(3, 24), (7, 40), (30, 24)])
def test_where_one_query_votes_nothing_is_lost_to_the_cap(chunk_tokens, cap_tokens):
    """One layer with a KV head per query head: the last query ranks tokens alike at any time."""
    model = one_layer(num_key_value_heads=8)
    policy, ids = SnapKV(24, window_size=1, kernel_size=1), random_ids(2, 150)
    cache, exact = CompressedCache(model, policy), CompressedCache(model, policy)
    with torch.no_grad():
        model(ids, past_key_values=exact)
        with chunked(model, cap_tokens=cap_tokens, chunk_tokens=chunk_tokens):
            model(ids, past_key_values=cache)
    assert torch.equal(cache.kept_positions(0), exact.kept_positions(0))
    torch.testing.assert_close(cache.layers[0].keys, exact.layers[0].keys, atol=1e-5, rtol=1e-5)


class Asked(SnapKV):
    """Notes the queries that vote at the end of the prompt."""

    def select(self, layer):
        asked.append(layer.queries)
        return super().select(layer)


asked = []


@pytest.mark.parametrize("chunk_tokens", [7, 74])
def test_the_window_that_votes_in_the_end_is_the_prompts_own(chunk_tokens):
    """Also where it begins in a piece behind which the last tokens were read and forgotten."""
    asked.clear()
    model, ids = tiny_model("llama"), random_ids(2, 150)
    for cap_tokens in (150, CAP):
        cache = CompressedCache(model, Asked(40, window_size=8))
        with torch.no_grad(), chunked(model, cap_tokens=cap_tokens, chunk_tokens=chunk_tokens):
            model(ids, past_key_values=cache)
    first, under_cap = asked[0], asked[len(cache.layers)]
    assert first.shape[2] == 8
    torch.testing.assert_close(under_cap, first, atol=1e-5, rtol=1e-5)


HELD = {
    "per query head": SnapKV(40, window_size=8, group_reduce="none"),
    "adakv": AdaKV(POLICY),
    "pyramidkv": PyramidKV(24, window_size=8),
    "keydiff": KeyDiff(40, window_size=8),
    "lagkv": LagKV(40, window_size=8, lag_size=9),
}


@pytest.mark.parametrize("policy", HELD.values(), ids=HELD)
def test_every_policy_that_holds_ends_at_its_budget_and_generates(policy):
    model, ids = tiny_model("qwen3"), random_ids(2, 150)
    cache, at_once = CompressedCache(model, policy), CompressedCache(model, policy)
    with chunked(model, cap_tokens=CAP, chunk_tokens=24):
        tokens = generated(model, cache, ids)
    generated(model, at_once, ids)
    assert tokens.shape == (2, 156)
    assert cache.get_seq_length() == at_once.get_seq_length() == 155
    assert cache.report().held_bytes == at_once.report().held_bytes


@pytest.mark.parametrize(("family", "implementation"), ONCE[1::3])
def test_a_prompt_within_the_cap_is_read_as_ever(family, implementation):
    model, ids = tiny_model(family, implementation), random_ids(2, 100)
    expected, cache = CompressedCache(model, POLICY), CompressedCache(model, POLICY)
    with torch.no_grad():
        expected.expect_prompt(100)
        for start in range(0, 100, 30):
            logits = model(ids[:, start : start + 30], past_key_values=expected).logits
        with chunked(model, cap_tokens=100, chunk_tokens=30):
            read = model(ids, past_key_values=cache).logits
    assert torch.equal(read, logits)
    for layer in cache.compressed_layers:
        assert torch.equal(cache.kept_positions(layer), expected.kept_positions(layer))
        assert torch.equal(cache.layers[layer].keys, expected.layers[layer].keys)


def test_static_storage_drafts_beams_and_a_second_prompt():
    model, ids = tiny_model("llama"), random_ids(1, 150) % 9 + 3
    with chunked(model, cap_tokens=CAP, chunk_tokens=24):
        expected = generated(model, CompressedCache(model, POLICY), ids)
        static = CompressedCache(model, POLICY, storage="static", room_tokens=16)
        assert torch.equal(generated(model, static, ids), expected)
        static.reset()
        assert torch.equal(generated(model, static, ids), expected)
        looked = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1}
        assert torch.equal(
            generated(model, CompressedCache(model, POLICY), ids, **looked), expected
        )
        beams = generated(model, CompressedCache(model, POLICY), ids, num_beams=3)
        assert beams.shape == expected.shape


def test_other_caches_and_later_tokens_are_read_as_ever():
    model, ids = tiny_model("llama"), random_ids(1, 150)
    cache = CompressedCache(model, POLICY)
    with torch.no_grad(), chunked(model, cap_tokens=CAP, chunk_tokens=24):
        plain = model(ids).logits
        model(ids, past_key_values=cache)
        model(ids[:, :60], past_key_values=cache)
    assert cache.layers[0].store.slots == 40 + 60
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("policy", "cap", "match"),
    [
        (POLICY, 39, "cap_tokens: expected at least 40"),
        (PyramidKV(40, window_size=8), 56, "cap_tokens: expected at least 72"),
        (H2O(40), CAP, "policy: expected a method with a budget"),
        (ExpectedAttention(40, window_size=8), CAP, "policy: expected a method with a budget"),
        (SnapKV(keep_ratio=0.1), CAP, "policy: expected a method with a budget"),
        (FullCache(), CAP, "policy: expected a method with a budget"),
    ],
    ids=str,
)
def test_what_cannot_be_held_to_the_cap_is_refused(policy, cap, match):
    model, cache = tiny_model("llama"), CompressedCache(tiny_model("llama"), policy)
    with (
        pytest.raises(InvalidArgumentError, match=match),
        chunked(model, cap_tokens=cap, chunk_tokens=24),
    ):
        model(random_ids(1, 150), past_key_values=cache)
    assert "forward" not in vars(model)


def test_padding_other_arguments_and_bad_numbers_are_refused():
    model, ids = tiny_model("llama"), random_ids(2, 150)
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    with chunked(model, cap_tokens=CAP, chunk_tokens=24):
        with pytest.raises(InvalidArgumentError, match="attention_mask: expected rows without pad"):
            generated(model, CompressedCache(model, POLICY), ids, attention_mask=mask)
        with pytest.raises(InvalidArgumentError, match="labels: expected nothing but"):
            model(ids, labels=ids, past_key_values=CompressedCache(model, POLICY))
        with (
            pytest.raises(UnsupportedModelError, match="wrapped already"),
            chunked(model, cap_tokens=CAP),
        ):
            pass
    for bad in ({"cap_tokens": 0}, {"cap_tokens": CAP, "chunk_tokens": 0}):
        with pytest.raises(InvalidArgumentError, match=[*bad][-1]), chunked(model, **bad):
            pass


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        (lambda model: chunked(model, cap_tokens=CAP, chunk_tokens=24), "a cap of 56 to fit"),
        (lambda model: layer_by_layer(model, chunk_tokens=24), "150 tokens to fit"),
    ],
    ids=["chunked", "layer by layer"],
)
def test_out_of_memory_in_the_middle_leaves_model_and_cache_usable(pieces, said):
    model, ids = copy.deepcopy(tiny_model("llama")), random_ids(1, 150)
    mlp, calls = model.model.layers[2].mlp, []
    cache = CompressedCache(model, POLICY)

    def full(module, arguments):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pieces(model):
        expected = generated(model, CompressedCache(model, POLICY), ids)
    hook = mlp.register_forward_pre_hook(full)
    with pytest.raises(OutOfMemoryError, match=said), pieces(model):
        generated(model, cache, ids)
    hook.remove()
    assert cache.get_seq_length() == 0
    with pieces(model):
        assert torch.equal(generated(model, cache, ids), expected)


def test_the_advice_names_what_would_fit():
    model = tiny_model("llama")
    footprint = footprint_of_loaded(model)
    free = layerwise_bytes(footprint, 1000, 100) - layerwise_bytes(footprint, 500, 0)
    said = plan.layerwise_advice(model, 1000, 100, free)
    assert "; about 500 tokens would fit; lower chunk_tokens" in said
    assert "would fit" not in plan.layerwise_advice(model, 1000, 100, None)
    said = plan.chunked_advice(model, 100, 1000, chunked_bytes(footprint, 100, 400))
    assert "; a cap of about 400 tokens would fit; lower cap_tokens" in said
    assert "would fit" not in plan.chunked_advice(model, 100, 1000, 0)
