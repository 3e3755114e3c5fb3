"""Quantized caches: their accuracy, their bytes, and errors that do not accumulate."""

import copy

import pytest
import torch

from snapkv import (
    AdaKV,
    CacheMismatchError,
    CompressedCache,
    FullCache,
    InvalidArgumentError,
    KeyDiff,
    SnapKV,
)
from snapkv.storage.bits import KVCodes
from snapkv.storage.coded import CodedStates
from snapkv.storage.ragged import RaggedStates
from tests.families import call, random_ids, tiny_model
from tests.ops.coded_cases import encode

PROMPT, BUDGET = 90, 60
POLICY = SnapKV(BUDGET, window_size=8)


def read(model, policy=POLICY, batch=2, **options):
    cache = CompressedCache(model, policy, **options)
    call(model, cache, random_ids(batch, PROMPT))
    return cache


def test_report_has_the_bits_of_keys_and_values():
    model = tiny_model("llama")
    assert set(read(model, quantize=KVCodes(8, 4)).report()["bits"]) == {"8/4"}
    assert set(read(model).report()["bits"]) == {"32"}


def test_held_bytes_are_those_of_codes_and_scales():
    """60 tokens fill two blocks; a scale and a minimum take four bytes together."""
    store = read(tiny_model("llama"), batch=1, quantize="K8V4").layers[0].store
    H, D = store.keys.shape[1], store.keys.shape[3]
    keys, values = 64 * H * D + 2 * H * D * 4, 64 * H * D // 2 + 64 * H * 4
    assert store.held_bytes == keys + values


@pytest.mark.parametrize("policy", [POLICY, AdaKV(POLICY)], ids=["even", "uneven"])
def test_generated_tokens_are_encoded_in_blocks_and_can_be_cropped(policy):
    model, later = tiny_model("llama"), random_ids(2, 80, 1)
    caches = [read(model, policy, quantize=bits) for bits in (None, "int8")]
    outputs = [[call(model, each, one) for one in later.split(1, dim=1)] for each in caches]
    for wanted, got in zip(*outputs, strict=True):
        assert (got - wanted).abs().max() <= 0.1 * wanted.abs().max()
    exact, packed = caches
    states = packed.layers[0].store.ragged
    assert isinstance(states, CodedStates)
    assert sum(section[0][0] for section in states.sections[1:]) == 64
    for layer in range(4):
        assert torch.equal(packed.kept_positions(layer), exact.kept_positions(layer))
    for cache in caches:
        cache.crop(-70)
    wanted, got = (call(model, each, later[:, 10:11]) for each in caches)
    assert (got - wanted).abs().max() <= 0.1 * wanted.abs().max()
    for layer in range(4):
        assert torch.equal(packed.kept_positions(layer), exact.kept_positions(layer))


def test_drafts_after_a_prompt_attend_to_each_other_before_quantization():
    model, ids = tiny_model("llama"), random_ids(1, PROMPT)
    caches = [CompressedCache(model, POLICY, quantize="int8") for _ in range(2)]
    drafts = random_ids(1, 40, 1)
    call(model, caches[0], ids)
    wanted = torch.cat([call(model, caches[0], one) for one in drafts.split(1, dim=1)[:30]], dim=1)
    caches[1].activate_past_recording()
    caches[1].expect_prompt(PROMPT)
    call(model, caches[1], ids)
    got = call(model, caches[1], drafts)[:, :30]
    assert (got - wanted).abs().max() <= 1e-3 * wanted.abs().max()
    assert caches[1].layers[0].store.tail.tokens == 40


@pytest.mark.parametrize(
    ("policy", "options", "layer"),
    [(KeyDiff(BUDGET, window_size=8), {}, 0), (FullCache(), {"recall": "host"}, 3)],
)
def test_cache_demands_a_reset_after_failed_quantization(policy, options, layer, tmp_path):
    model = copy.deepcopy(tiny_model("llama"))
    weight = model.model.layers[layer].self_attn.v_proj.weight.data
    kept, weight[:] = weight.clone(), torch.inf
    cache = CompressedCache(model, policy, quantize="int8", **options)
    with pytest.raises(InvalidArgumentError, match="quantize: the largest value for"):
        call(model, cache, random_ids(1, PROMPT))
    weight[:] = kept
    with pytest.raises(CacheMismatchError, match=r"Call cache\.reset\(\)"):
        call(model, cache, random_ids(1, 1))
    with pytest.raises(CacheMismatchError, match=r"Call cache\.reset\(\)"):
        cache.save(tmp_path / "half")
    cache.reset()
    fresh = CompressedCache(model, policy, quantize="int8", **options)
    assert torch.equal(*(call(model, each, random_ids(1, PROMPT)) for each in (cache, fresh)))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"keys": 2}, "keys: expected one of 4, 8"),
        ({"values": 4.0}, "values"),
        ({"group_size": 16}, "32"),
    ],
)
def test_invalid_parameters_of_codes_are_refused(wrong, said):
    with pytest.raises(InvalidArgumentError, match=said):
        KVCodes(**wrong)


# Files.


def by_hand(states, how, number, along):
    """Encode and decode (1, H, N, D) states block by block, the last block padded."""
    G, heads = how.group_size, []
    for head in states[0]:
        blocks = []
        for block in head.split(G):
            filled = torch.cat([block, block[-1:].expand(G - len(block), -1)])
            blocks.append(encode(filled[None], number, along=along).decoded()[0, : len(block)])
        heads.append(torch.cat(blocks))
    return torch.stack(heads)[None]


KEEPING = {
    "even": ("llama", POLICY, {}),
    "whole": ("llama", FullCache(), {}),
    "latents": ("deepseek_v3", POLICY, {}),
}


@pytest.mark.parametrize("kept", KEEPING)
def test_cache_saved_in_few_bits_loads_the_values_of_its_codes(kept, tmp_path):
    family, policy, options = KEEPING[kept]
    model, how = tiny_model(family), KVCodes(8, 4)
    cache = read(model, policy, batch=1, **options)
    cache.save(tmp_path / "one", bits=how)
    loaded = CompressedCache.load(tmp_path / "one", model)
    for own, other in zip(cache.layers, loaded.layers, strict=True):
        made = zip(own.store.padded(), ((8, "tokens"), (4, "channels")), strict=True)
        states = tuple(by_hand(part, how, *numbers) for part, numbers in made)
        assert all(map(torch.equal, other.store.padded(), states))
        assert torch.equal(other.stored_positions(), own.stored_positions())
    assert loaded.options["quantize"] is None


@pytest.mark.parametrize("recall", [None, "host"])
def test_ragged_heads_and_offloaded_tokens_are_saved_in_few_bits(recall, tmp_path):
    model, later = tiny_model("llama"), random_ids(2, 20, 1)
    cache = read(model, AdaKV(POLICY), recall=recall)
    for name, bits in (("whole", None), ("few", "int8")):
        cache.save(tmp_path / name, bits=bits)
    assert (tmp_path / "few").stat().st_size < 0.6 * (tmp_path / "whole").stat().st_size
    loaded = CompressedCache.load(tmp_path / "few", model)
    for each in (cache, loaded):
        each.expect_prompt(PROMPT + 20)
    wanted, got = (call(model, each, later) for each in (cache, loaded))
    assert not torch.equal(got, wanted)
    assert (got - wanted).abs().max() <= 0.02 * wanted.abs().max()


@pytest.mark.parametrize("largest", [1.0, 1e6])
def test_several_layers_are_encoded_together_as_each_alone(largest):
    """In one case, a layer has values beyond float16, whose scales take more bytes."""
    draw, how = torch.Generator().manual_seed(0), KVCodes(keys=8, values=4)
    several = []
    for counts in (((40, 33), (7, 70)), ((32, 0), (64, 1)), ((5, 5), (90, 9))):
        tokens = sum(map(sum, counts))
        keys, values = torch.randn(2, tokens, 16, generator=draw)
        several.append(RaggedStates(keys=keys, values=values, head_tokens=counts))
    several[1].keys[3, 2] = largest
    for together, alone in zip(CodedStates.of_each(several, how), several, strict=True):
        expected = CodedStates.of(alone, how)
        assert together.sections == expected.sections
        assert together.nbytes == expected.nbytes
        for got, wanted in zip(together.codes, expected.codes, strict=True):
            for part in ("packed", "scale", "least"):
                assert torch.equal(getattr(got, part), getattr(wanted, part))
