"""What is kept, in few bits: how near it stays, what it saves, and that nothing adds up."""

import pytest
import torch

from snapkv import H2O, AdaKV, CompressedCache, FullCache, InvalidArgumentError, SnapKV
from snapkv.storage.codes import quantise
from tests.families import CASES, call, random_ids, tiny_model

PROMPT, BUDGET = 90, 40
POLICY = SnapKV(BUDGET, window_size=8)
# Half a step of the largest range in a group, and the rounding of scale and least value to fp16.
WORST = {"int8": 0.004, "int4": 0.036, "fp8": 0.07}


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


@pytest.mark.parametrize("bits", WORST)
@pytest.mark.parametrize("along", [-1, -2])
@pytest.mark.parametrize("shape", [(2, 3, 64, 32), (1, 2, 45, 8), (2, 1, 1, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_come_back_within_half_a_step(bits, along, shape, dtype):
    torch.manual_seed(0)
    states = (torch.randn(shape) * torch.rand(shape[-1]) * 10).to(dtype)
    codes = quantise(states, bits, along=along)
    back = codes.states()
    assert (back.shape, back.dtype) == (states.shape, dtype)
    widest = states.float().amax() - states.float().amin()
    slack = widest * 2**-8 if dtype == torch.bfloat16 else 0
    assert (back.float() - states.float()).abs().max() <= widest * WORST[bits] + slack
    again = quantise(back, bits, along=along).states()
    assert (again.float() - back.float()).abs().max() <= widest * WORST[bits] / 2 + slack


@pytest.mark.parametrize(("family", "implementation"), CASES)
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


def test_fewer_bits_are_fewer_bytes_and_the_same_codes_all_along(demo):
    ids = demo.tokenizer("The key is under the blue stone. " * 30, return_tensors="pt").input_ids
    held = {}
    for bits in (None, "int8", "fp8", "int4"):
        cache = CompressedCache(demo.model, SnapKV(96), quantize=bits)
        call(demo.model, cache, ids)
        held[bits] = cache.report().held_bytes
        if bits:
            before = cache.layers[3].store.codes[0].codes.clone()
            for token in ids[:, :5].split(1, dim=1):
                call(demo.model, cache, token)
            assert torch.equal(cache.layers[3].store.codes[0].codes, before)
            assert cache.layers[3].keys.shape[2] == 5
    assert held["int4"] < 0.16 * held[None]  # float32: 4 bits, and a byte of scales for eight
    assert held["int8"] < 0.29 * held[None]
    assert held["fp8"] < 0.29 * held[None]


def test_alone_it_holds_the_whole_prompt_in_few_bits():
    model = tiny_model("llama")
    cache = read(model, FullCache(), quantize="int8")
    report = cache.report()
    assert report.kept_tokens == PROMPT
    assert report.held_bytes < 0.5 * report.full_bytes


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


def test_what_cannot_be_packed_is_refused():
    model = tiny_model("llama")
    for options, said in (
        ({"quantize": "int3"}, "quantize: expected one of int8, int4, fp8"),
        ({"quantize": "int8", "storage": "static"}, "quantize: expected a policy that only"),
        ({"quantize": "int8", "policy": H2O(40)}, "quantize: expected a policy that only"),
    ):
        with pytest.raises(InvalidArgumentError, match=said):
            CompressedCache(model, **{"policy": POLICY, **options})
    with pytest.raises(InvalidArgumentError, match="quantize: expected a policy that keeps as"):
        read(model, AdaKV(POLICY), quantize="int8")
    cache = CompressedCache(model, POLICY, quantize="int8")
    with pytest.raises(InvalidArgumentError, match="quantize: expected none where drafts"):
        model.generate(
            random_ids(1, PROMPT),
            past_key_values=cache,
            max_new_tokens=4,
            prompt_lookup_num_tokens=2,
        )
