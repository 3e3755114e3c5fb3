"""Bits that the end of a prompt chooses, against a plain reference that tries every candidate."""

import math
from dataclasses import replace

import pytest
import torch

from snapkv import (
    H2O,
    AdaKV,
    AutoBudget,
    AutoCodes,
    CompressedCache,
    CriticalKV,
    DraftVotes,
    FullCache,
    InvalidArgumentError,
    KeyDiff,
    KVCodes,
    PyramidKV,
    SnapKV,
    default_policy,
)
from snapkv.ops import ScoreOptions, window_output
from tests.families import KINDS, call, random_ids, small_model, tiny_model
from tests.pairs import pairs

CANDIDATES = (
    None,
    *(KVCodes(*bits, recent_tokens=4, sink_tokens=2) for bits in ((8, 8), (8, 4), (4, 4), (2, 2))),
)
AUTO = AutoCodes(CANDIDATES, most_error=0.02)
TOKENS = 150


def test_what_a_window_gets_on_paper():
    """Two tokens of three are held: slots 0 and 2. The first of two queries stands at slot 1."""
    queries = torch.tensor([[[[0.0], [math.log(3.0)]]]])
    keys, values = torch.tensor([[[[5.0], [1.0]]]]), torch.tensor([[[[4.0], [8.0]]]])
    keys[0, 0, 0] = 0.0
    slots, options = torch.tensor([[[0, 2]]]), ScoreOptions(scaling=1.0)
    output = window_output(queries, keys, values, slots, 3, options)
    # The first sees slot 0 alone; of the second's weights one is 1/4, the other 3/4.
    torch.testing.assert_close(output, torch.tensor([[[[4.0], [7.0]]]]))
    none = window_output(queries, keys, values, torch.tensor([[[-1, -1]]]), 3, options)
    assert not none.any()


class Shown(FullCache):
    """Notes every layer with its last queries."""

    def __init__(self):
        object.__setattr__(self, "layers", [])

    query_tokens = 16

    def select(self, layer):
        self.layers.append(layer)


def plainly(layer, keys, values, positions, row):
    """One row's outputs, query by query, in float64: (Hq, W, Dv); positions leave pads out."""
    pads = 0 if layer.pad_tokens is None else int(layer.pad_tokens[row])
    Hq, W = layer.queries.shape[1:3]
    length = layer.keys.shape[2] - pads
    output = torch.zeros(Hq, W, values.shape[-1], dtype=torch.float64)
    for head in range(Hq):
        own, held = (head * heads // Hq for heads in (positions.shape[1], keys.shape[1]))
        for place in range(W):
            at = length - W + place
            if at < 0:
                continue
            seen = (positions[row, own] >= 0) & (positions[row, own] <= at)
            products = keys[row, held][seen].double() @ layer.queries[row, head, place].double()
            scores = layer.score_options.scores(products)
            if layer.score_options.sink_logits is not None:
                sink = layer.score_options.sink_logits[head].double()
                scores = torch.cat([scores, sink[None]])
            weights = scores.softmax(0)[: int(seen.sum())]
            output[head, place] = weights @ values[row, held][seen].double()
    return output


def states(layer):
    """Keys and values of all heads that are stored, (B, H, slots, D) each."""
    return layer.store.padded() if layer.store.ragged is not None else (layer.keys, layer.values)


@torch.no_grad()
def errors(model, policy, ids, mask):
    """Of every candidate and layer the error, by the cache that has its bits in all layers."""
    shown = Shown()
    call(model, CompressedCache(model, shown), ids, attention_mask=mask)
    window = policy.query_tokens  # 8 or 16
    shown.layers[:] = [replace(each, queries=each.queries[:, :, -window:]) for each in shown.layers]
    rows = range(len(ids))
    found, caches, outputs = [], [], []
    for candidate in CANDIDATES:
        cache = CompressedCache(model, policy, quantize=candidate)
        for layer in cache.reading.layers:  # others may hold other bits: no byte goes from one on
            layer.storage = replace(layer.storage, alike=False)
        call(model, cache, ids, attention_mask=mask)
        caches.append(cache)
        held = [(layer, *states(layer)) for layer in cache.reading.layers]
        outputs.append(
            [
                [plainly(each, keys, values, layer.stored_positions(), row) for row in rows]
                for each, (layer, keys, values) in zip(shown.layers, held, strict=True)
            ]
        )
    for number in range(len(CANDIDATES)):
        of_layers = []
        for depth, each in enumerate(shown.layers):
            wanted = outputs[0][depth]
            if str(policy.describe()).count("'bytes'"):
                pads = 0 if each.pad_tokens is None else each.pad_tokens[:, None, None]
                every = torch.arange(each.keys.shape[2]).expand(*each.keys.shape[:2], -1) - pads
                wanted = [plainly(each, each.keys, each.values, every, row) for row in rows]
            lost = [
                (own - whole).square().sum((-1, -2)) / whole.square().sum((-1, -2))
                for own, whole in zip(outputs[number][depth], wanted, strict=True)
            ]
            of_layers.append(float(torch.stack(lost).mean()))
        found.append(of_layers)
    return found, caches


def expected(found, depth, *, by_bytes):
    """The place of the candidate that the rule says."""
    own = [each[depth] for each in found]
    if by_bytes:
        return own.index(min(own))
    good = [number for number, error in enumerate(own) if error <= AUTO.most_error]
    return good[-1]  # the last has the fewest bits


POLICIES = {
    "bytes": lambda: SnapKV("25%", window_size=8),
    "few bytes": lambda: default_policy("20%"),
    "tokens": lambda: SnapKV(60, window_size=8),
    "votes": lambda: default_policy(AutoBudget(lost_vote=0.02, least=8)),
    "by head, bytes": lambda: AdaKV(SnapKV("40%", window_size=8)),
    "by head": lambda: AdaKV(SnapKV(50, window_size=8)),
    "critical, bytes": lambda: CriticalKV(SnapKV("30%", window_size=8)),
    "own sets": lambda: SnapKV("40%", window_size=8, group_reduce="none"),
    "draft": lambda: DraftVotes(SnapKV(60, window_size=8), draft_tokens=4),
}


@pairs(
    name=[name for name in POLICIES if name != "draft"],
    kind=[kind for kind in KINDS if "latent" not in kind and "indexed" not in kind],
    pads=(None, (0, 0), (9, 0)),
)
def test_every_layer_takes_what_the_rule_says(name, kind, pads):
    model, policy = small_model(kind), POLICIES[name]()
    ids = random_ids(2 if pads else 1, TOKENS, seed=3) % 60
    mask = torch.ones_like(ids)
    for row, count in enumerate(pads or ()):
        mask[row, :count] = 0
    found, caches = errors(model, policy, ids, mask)
    auto = CompressedCache(model, policy, quantize=AUTO)
    call(model, auto, ids, attention_mask=mask)
    for depth, layer in enumerate(auto.reading.layers):
        number = expected(found, depth, by_bytes="bytes" in name or name == "own sets")
        other = caches[number].reading.layers[depth]
        assert layer.store.kind == other.store.kind
        assert getattr(layer.store, "how", None) == CANDIDATES[number]
        for own, theirs in zip(states(layer), states(other), strict=True):
            assert torch.equal(own, theirs)
        assert torch.equal(layer.stored_positions(), other.stored_positions())
        assert layer.held_bytes == other.held_bytes


@pytest.mark.parametrize(("far", "keys"), [(1.0, 4), (-300.0, 8)])
def test_keys_that_break_in_four_bits_get_more(far, keys):
    """One token in sixteen is far out in a channel, as no query asks for: its group has no steps
    for the others.
    """
    model, shown = tiny_model("llama"), Shown()
    call(model, CompressedCache(model, shown), random_ids(1, 200))
    states = [each.clone() for each in (shown.layers[0].keys, shown.layers[0].queries)]
    states[0][:, :, ::16, 0], states[1][..., 0] = far, 1.0
    cache = CompressedCache(model, SnapKV(100, window_size=8), quantize=AutoCodes(most_error=0.01))
    layer = cache.reading.layers[0]
    layer.update(states[0], shown.layers[0].values)
    seen = replace(shown.layers[0], keys=states[0], queries=states[1][:, :, -8:])
    assert layer.choose(seen).storage.codes.keys == keys


@pytest.mark.parametrize("budget", [100, "50%"])
def test_numbers_that_no_codes_hold_stay_as_they_came(budget):
    model, shown = tiny_model("llama"), Shown()
    call(model, CompressedCache(model, shown), random_ids(1, 200))
    keys, values = shown.layers[0].keys, torch.full_like(shown.layers[0].values, 3e38)
    for quantize, holds in (("auto", True), (AutoCodes((KVCodes(), KVCodes(8, 8))), False)):
        cache = CompressedCache(model, SnapKV(budget, window_size=8), quantize=quantize)
        layer = cache.reading.layers[0]
        layer.update(keys, values)
        seen = replace(shown.layers[0], values=values, queries=shown.layers[0].queries[:, :, -8:])
        if holds:
            assert layer.choose(seen).storage.codes is None
        else:
            with pytest.raises(InvalidArgumentError, match="keys and values of at most"):
                layer.choose(seen)


def test_a_budget_that_holds_all_changes_nothing():
    model, ids = tiny_model("llama"), random_ids(1, 90)
    for budget in ("100%", "2GiB", 90):
        ours = CompressedCache(model, SnapKV(budget, window_size=8), quantize="auto")
        full = CompressedCache(model, FullCache())
        for cache in (ours, full):
            call(model, cache, ids)
        assert torch.equal(call(model, ours, ids[:, :5]), call(model, full, ids[:, :5]))
        assert ours.report().held_bytes == full.report().held_bytes


def test_after_a_file_and_a_reset_it_chooses_again(tmp_path):
    model, ids = tiny_model("llama"), random_ids(1, 200)
    for quantize in ("auto", AUTO):
        cache = CompressedCache(model, SnapKV("20%", window_size=8), quantize=quantize)
        call(model, cache, ids)
        cache.save(tmp_path / "cache")
        loaded = CompressedCache.load(tmp_path / "cache", model)
        assert loaded.options == cache.options | {"quantize": loaded.options["quantize"]}
        assert torch.equal(call(model, loaded, ids[:, :9]), call(model, cache, ids[:, :9]))
        for each in (cache, loaded):
            each.reset()
        assert torch.equal(call(model, loaded, ids), call(model, cache, ids))
        assert loaded.report() == cache.report()


def test_a_draft_votes_before_bits_are_chosen():
    model, ids = tiny_model("llama"), random_ids(1, 200)
    cache = CompressedCache(model, POLICIES["draft"](), quantize="auto")
    text = model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert text.shape[1] == 206
    assert all(layer.store.kind == "coded" for layer in cache.reading.layers)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: CompressedCache(model, H2O(64), quantize="auto"), "only compresses prompts"),
        (lambda model: CompressedCache(model, KeyDiff(64), quantize="auto"), "last queries"),
        (
            lambda model: CompressedCache(model, PyramidKV("20%"), quantize="auto"),
            "as many bits",
        ),
        (
            lambda model: CompressedCache(model, SnapKV(64), quantize="auto", storage="static"),
            "storage='dynamic'",
        ),
        (lambda model: AutoCodes(()), "at least one"),
        (lambda model: AutoCodes((KVCodes(exact_layers=1),)), "exact_layers"),
        (lambda model: AutoCodes(most_error=2.0), "most_error"),
        (
            lambda model: call(
                model,
                CompressedCache(model, SnapKV("1%"), quantize="auto"),
                random_ids(1, 200),
            ),
            "expected at least",
        ),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make(tiny_model("llama"))


def test_a_shared_latent_is_refused():
    model = small_model("latent")
    with pytest.raises(InvalidArgumentError, match="quantize"):
        CompressedCache(model, SnapKV(40), quantize="auto")
