"""What is kept, in few bits: how near it stays, what it saves, and that nothing adds up."""

import copy

import pytest
import torch

from snapkv import (
    H2O,
    AdaKV,
    CacheMismatchError,
    CompressedCache,
    FullCache,
    InvalidArgumentError,
    KeyDiff,
    SnapKV,
)
from snapkv.storage.codes import GROUP, quantise
from tests.families import ONCE, call, random_ids, tiny_model
from tests.pairs import pairs

BITS = ("int8", "int4", "fp8")
PROMPT, BUDGET = 90, 40
POLICY = SnapKV(BUDGET, window_size=8)


def read(model, policy=POLICY, batch=2, **options):
    cache = CompressedCache(model, policy, **options)
    call(model, cache, random_ids(batch, PROMPT))
    return cache


def test_four_numbers_by_hand():
    """Values 0, 1, 2, 15 in steps of one: exactly what four bits can say."""
    states = torch.zeros(1, 1, 1, 32)
    states[..., :4] = torch.tensor([0.0, 1.0, 2.0, 15.0])
    codes = quantise(states, "int4", along=-1)
    assert codes.scale.item() == 1.0
    assert codes.least.item() == 0.0
    assert codes.codes[0, 0, 0, :2].tolist() == [0 + 16 * 1, 2 + 16 * 15]
    assert torch.equal(codes.states(), states)


def per_number(of_groups, codes):
    """What is said of a group, for each of its numbers."""
    size = min(GROUP, codes.shape[codes.along])
    axis = 3 if codes.along == -1 else 2
    whole = of_groups.double().squeeze(4 if codes.along == -1 else 3)
    return whole.repeat_interleave(size, dim=axis).narrow(axis, 0, codes.shape[axis])


def range_of_groups(states, along):
    size = states.shape[along]
    groups = states.double().split(min(GROUP, size), dim=along)
    spans = [g.amax(along, keepdim=True) - g.amin(along, keepdim=True) for g in groups]
    spans = [span.expand_as(group) for span, group in zip(spans, groups, strict=True)]
    leasts = [g.amin(along, keepdim=True).expand_as(g) for g in groups]
    return torch.cat(spans, dim=along), torch.cat(leasts, dim=along)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RANGES = [  # centre, half of the range
    *((0.0, half) for half in (0.0, 1e-9, 1e-7, 1e-4, 1.0, 300.0, 65504.0)),
    *((0.3, half) for half in (0.0, 1e-7, 1e-3, 1.0)),
    *((300.0, half) for half in (0.0, 1.0, 300.0)),
    *((60000.0, half) for half in (0.0, 1.0, 5000.0, 70000.0)),
    *((1e30, half) for half in (0.0, 1e26, 1e30)),
]


@pairs(
    bits=BITS,
    along=[-1, -2],
    dtype=DTYPES,
    shape={"whole": (2, 2, 64, 32), "short": (1, 2, 45, 8), "one": (2, 1, 1, 40)},
)
def test_states_come_back_within_the_stated_bound(bits, along, dtype, shape):
    draw = torch.Generator().manual_seed(0)
    for centre, half in RANGES:
        states = centre + half * (torch.rand(shape, generator=draw) * 2 - 1)
        states[..., 1::3] *= -1
        ends = torch.finfo(dtype)
        states = states.clamp(ends.min, ends.max).to(dtype)
        codes = quantise(states, bits, along=along)
        back, exact = codes.states().double(), states.double()
        assert back.isfinite().all()
        smallest = ends.smallest_normal * ends.eps
        rounding = (exact.abs() + back.abs()) * (ends.eps / 2 + 2**-23) + smallest
        if bits == "fp8":
            bound = (exact.abs() / 16).maximum(codes.scale.double() / 1024)
            assert ((back - exact).abs() <= bound + rounding).all()
            continue
        step = per_number(codes.scale, codes)
        is_cut = exact + step / 2 > ends.max
        assert ((back - exact).abs() <= step * (is_cut + 1) / 2 + rounding).all()
        spans, leasts = range_of_groups(states, along)
        spacing = 2**-10 * leasts.abs().clamp(min=2**-14)
        ideal = (spans + spacing) / {"int8": 255, "int4": 15}[bits]
        assert (step <= (ideal * 1.001).maximum(ideal + 2**-24)).all()
        again = quantise(codes.states(), bits, along=along).states().double()
        assert ((again - back).abs() <= step * (is_cut + 1) / 2 + rounding).all()


def test_channels_far_from_zero_are_as_near_as_their_range_allows():
    """300 and one to either side: float16 has a number every quarter, and 255 steps on 2.25."""
    states = torch.stack([torch.linspace(299.05, 300.95, 32), torch.full((32,), 299.9)], dim=-1)
    codes = quantise(states[None, None], "int8", along=-2)
    assert codes.least.flatten().tolist() == [299.0, 299.75]
    assert (codes.states() - states).abs().max() <= 1.95 / 255 / 2 * 1.01


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_what_float16_cannot_say_gets_wider_scales(dtype):
    states = torch.tensor([-3e5, 1e5, 2e5, 3e5], dtype=dtype).expand(1, 1, 32, 4)
    codes = quantise(states, "int4", along=-1)
    assert codes.scale.dtype == codes.least.dtype == torch.float32
    assert (codes.states().float() - states.float()).abs().max() <= 6e5 / 15 / 2 * 1.01
    assert quantise(states / 8, "int4", along=-1).scale.dtype == torch.float16


@pytest.mark.parametrize("bits", BITS)
def test_what_no_code_stands_for_is_refused(bits):
    for number in (float("nan"), float("inf"), float("-inf"), -3e38):
        states = torch.zeros(1, 1, 4, 4)
        states[0, 0, 2, 1] = number
        with pytest.raises(InvalidArgumentError, match="bits: expected keys and values of at mos"):
            quantise(states, bits, along=-1)


@pytest.mark.parametrize(("family", "implementation"), ONCE)
def test_every_family_goes_on_near_where_it_would(family, implementation):
    model, later = tiny_model(family, implementation), random_ids(2, 4, 1)
    exact, packed = read(model), read(model, quantize="int8")
    for layer in exact.compressed_layers:
        assert torch.equal(packed.kept_positions(layer), exact.kept_positions(layer))
    for token in later.split(1, dim=1):
        wanted, got = call(model, exact, token), call(model, packed, token)
        assert (got - wanted).abs().max() <= 0.25 * wanted.abs().max()
    assert packed.get_seq_length() == exact.get_seq_length()
    assert packed.report().kept_tokens == exact.report().kept_tokens


def test_fewer_bits_are_fewer_bytes_and_the_same_codes_all_along():
    model, held = tiny_model("qwen3"), {}
    for bits in (None, *BITS):
        cache = read(model, SnapKV(64, window_size=8), quantize=bits)
        held[bits] = cache.report().held_bytes
        if bits:
            keys = cache.layers[3].store.planes[0]
            before = keys.codes.codes.clone()
            for token in random_ids(2, 5, 1).split(1, dim=1):
                call(model, cache, token)
            assert torch.equal(keys.codes.codes, before)
            assert keys.states.shape[2] == 5
    assert held["int4"] == (0.5 + (2 + 2) * (1 / 32 + 1 / 16) / 2) / 4 * held[None]
    assert held["int8"] == (1 + (2 + 2) * (1 / 32 + 1 / 16) / 2) / 4 * held[None]
    assert held["fp8"] == (1 + 4 / 16) / 4 * held[None]
    whole = read(model, FullCache(), quantize="int8").report()  # alone, too
    assert whole.kept_tokens == PROMPT
    assert whole.held_bytes < 0.5 * whole.full_bytes


def test_turns_and_recall_choose_from_what_was_seen():
    model = tiny_model("llama")
    exact, packed = (read(model, recall="host", quantize=bits) for bits in (None, "int4"))
    for cache in (exact, packed):
        cache.expect_prompt(PROMPT + 20)
        call(model, cache, random_ids(2, 20, 1))
    for layer in range(4):
        assert torch.equal(packed.kept_positions(layer), exact.kept_positions(layer))
    turning = read(model, turns="compress", quantize="int8")
    turning.expect_prompt(PROMPT + 20)
    call(model, turning, random_ids(2, 20, 1))
    assert turning.report().kept_tokens == BUDGET


def after_a_turn(model, lengths, options):
    """What rows of these lengths hold and answer behind a second turn, in a batch and alone."""
    rows, longest, turn = len(lengths), max(lengths), random_ids(len(lengths), 60, 1)
    ids, mask = random_ids(rows, longest), torch.ones(rows, longest + 61, dtype=torch.int64)
    for row, tokens in enumerate(lengths):
        mask[row, : longest - tokens] = 0

    def talk(chosen, first):
        cache, seen, logits = CompressedCache(model, POLICY, **options), 0, []
        for piece in (ids[chosen, first:], turn[chosen], random_ids(rows, 1, 2)[chosen]):
            seen += piece.shape[1]
            if piece.shape[1] > 1:
                cache.expect_prompt(seen)
            shown = mask[chosen, first : first + seen]
            at = (shown.cumsum(-1) - 1).clamp(min=0)[:, -piece.shape[1] :]
            logits.append(call(model, cache, piece, attention_mask=shown, position_ids=at)[:, -1])
        return logits[-1], [cache.kept_positions(layer) for layer in range(4)], cache

    every = torch.arange(rows)
    return talk(every, 0), [talk(every[r : r + 1], longest - n) for r, n in enumerate(lengths)]


@pytest.mark.parametrize("options", [{}, {"recall": "host"}, {"turns": "compress"}], ids=str)
def test_a_row_that_fitted_the_budget_beside_a_longer_one_chooses_as_alone(options):
    model = tiny_model("llama")
    (logits, kept, cache), alone = after_a_turn(model, (25, 90), {"quantize": "fp8", **options})
    for row, (own_logits, own_kept, _) in enumerate(alone):
        for layer in range(4):
            for found, own in zip(kept[layer][row], own_kept[layer][0], strict=True):
                assert found[found >= 0].tolist() == own[own >= 0].tolist()
        close = 0.05 if not options and row == 0 else 1e-3  # less of it is in few bits than alone
        assert (logits[row] - own_logits[0]).abs().max() <= close * own_logits.abs().max()
    assert cache.layers[0].store.planes[0].codes.shape[2] == BUDGET


def test_recall_brings_back_what_was_read_and_not_its_codes():
    """Also of a prompt that fits the budget, of which nothing was dropped."""
    model, held = tiny_model("llama"), {}
    for bits in (None, "int4"):
        held[bits] = after_a_turn(model, (30,), {"recall": "host", "quantize": bits})[1][0]
    for exact, coded in zip(held[None][1], held["int4"][1], strict=True):
        assert torch.equal(exact, coded)


def test_rows_crops_resets_and_files(tmp_path):
    model, token = tiny_model("llama"), random_ids(2, 1, 1)
    cache = read(model, quantize="int8")
    cache.reorder_cache(torch.tensor([1, 0]))
    call(model, cache, token)
    before = call(model, cache, token)
    cache.crop(-1)
    torch.testing.assert_close(call(model, cache, token), before)
    cache.save(tmp_path / "one")
    loaded = CompressedCache.load(tmp_path / "one", model)
    assert torch.equal(call(model, loaded, token), call(model, cache, token))
    cache.crop(-6)  # into the window
    assert cache.get_seq_length() == PROMPT - 3
    cache.reset()
    call(model, cache, random_ids(1, PROMPT))
    assert cache.report().kept_tokens == BUDGET
    beams = model.generate(
        random_ids(1, PROMPT),
        past_key_values=CompressedCache(model, POLICY, quantize="int4"),
        max_new_tokens=4,
        num_beams=3,
    )
    assert beams.shape == (1, PROMPT + 4)


@pytest.mark.parametrize(
    ("policy", "options", "layer"),
    [(KeyDiff(BUDGET, window_size=8), {}, 0), (FullCache(), {"recall": "host"}, 3)],
)
def test_where_a_layer_refuses_the_cache_says_to_reset_it(policy, options, layer, tmp_path):
    model = copy.deepcopy(tiny_model("llama"))
    weight = model.model.layers[layer].self_attn.v_proj.weight.data
    kept, weight[:] = weight.clone(), torch.inf
    cache = CompressedCache(model, policy, quantize="int8", **options)
    with pytest.raises(InvalidArgumentError, match="bits: expected keys and values of at most"):
        call(model, cache, random_ids(1, PROMPT))
    weight[:] = kept
    with pytest.raises(CacheMismatchError, match=r"call cache\.reset\(\)"):
        call(model, cache, random_ids(1, 1))
    with pytest.raises(CacheMismatchError, match=r"call cache\.reset\(\)"):
        cache.save(tmp_path / "half")
    cache.reset()
    fresh = CompressedCache(model, policy, quantize="int8", **options)
    assert torch.equal(*(call(model, each, random_ids(1, PROMPT)) for each in (cache, fresh)))


def test_what_cannot_be_packed_is_refused():
    model = tiny_model("llama")
    for options, said in (
        ({"quantize": "int3"}, "quantize: expected one of int8, int4, fp8"),
        ({"quantize": "int8", "storage": "static"}, "quantize: expected a policy that only"),
        ({"quantize": "int8", "policy": H2O(40)}, "quantize: expected a policy that only"),
        ({"quantize": "int8", "policy": AdaKV(POLICY)}, "keeps as many tokens in every head"),
    ):
        with pytest.raises(InvalidArgumentError, match=said):
            CompressedCache(model, **{"policy": POLICY, **options})
    with pytest.raises(InvalidArgumentError, match="quantize: expected none where drafts"):
        CompressedCache(model, POLICY, quantize="int8").require_drafts()
