"""Padding after the first token of a row is refused, and the cache stays unchanged."""

import copy

import pytest
import torch

from snapkv import CompressedCache, SnapKV, UnsupportedModelError
from tests.families import call, generated, kept_of, random_ids, tiny_model
from tests.methods import CACHES

CLOSE = {"atol": 2e-4, "rtol": 1e-4}
POLICY = SnapKV(40, window_size=8, kernel_size=5)
REFUSAL = "attention_mask: {} of 2 rows have padding after their first token"
CASES = {name: CACHES[name] for name in ("adakv", "h2o", "int8", "recall")}
by_case = pytest.mark.parametrize(("policy", "options"), CASES.values(), ids=CASES)
later = random_ids(2, 9, 1)


def positions_of(mask, tokens):
    return (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens:]


def read(model, cache, ids, mask):
    """The logits of the new tokens."""
    positions = positions_of(mask, ids.shape[1])
    return call(model, cache, ids, attention_mask=mask, position_ids=positions)


def behind_a_prompt(policy, options):
    """Return a model, a cache that has read 90 tokens (13 of one row are padding), and its mask."""
    model, mask = tiny_model("llama"), torch.ones(2, 90, dtype=torch.int64)
    mask[0, :13] = 0
    cache = CompressedCache(model, policy, **options)
    read(model, cache, random_ids(2, 90), mask)
    return model, cache, mask


def with_a_turn(mask, *pads):
    whole = torch.cat([mask, torch.ones(2, 9, dtype=torch.int64)], dim=1)
    for row, column in pads:
        whole[row, column] = 0
    return whole


@by_case
def test_padding_after_the_first_token_is_refused_and_changes_nothing(policy, options):
    model, cache, mask = behind_a_prompt(policy, options)
    cache.expect_prompt(99)
    before, other = kept_of(cache), copy.deepcopy(cache)
    on_both_sides = (0, 90), (1, 98)
    for pads in ([(1, 90)], on_both_sides, [(0, 94)], [(1, 3)]):  # the last was read before
        with pytest.raises(UnsupportedModelError, match=REFUSAL.format(len(pads))):
            read(model, cache, later, with_a_turn(mask, *pads))
        assert kept_of(cache) == before
    whole = with_a_turn(mask)
    assert torch.equal(read(model, cache, later, whole), read(model, other, later, whole))
    assert kept_of(cache) == kept_of(other)


@by_case
def test_leading_padding_stays_masked_in_later_passes(policy, options):
    """Later passes have one or several tokens, and no mask or a mask of ones."""
    model, cache, mask = behind_a_prompt(policy, options)
    other = copy.deepcopy(cache)
    for number, token in enumerate(random_ids(2, 8, 2).split([1, 3, 1, 3], dim=1)):
        mask = torch.cat([mask, torch.ones_like(token)], dim=1)
        expected = read(model, other, token, mask)
        given = {"position_ids": positions_of(mask, token.shape[1])}
        if number % 2 == number // 2:
            given["attention_mask"] = torch.ones_like(mask)
        torch.testing.assert_close(call(model, cache, token, **given), expected, **CLOSE)


def test_too_short_mask_is_refused_unless_it_masks_nothing():
    model, cache, mask = behind_a_prompt(POLICY, {})
    whole, token = with_a_turn(mask)[:, :91], later[:, :1]
    with pytest.raises(
        UnsupportedModelError, match="expected one column for each of the 91 tokens"
    ):
        model(token, past_key_values=cache, attention_mask=whole[:, :-1])
    expected = read(model, copy.deepcopy(cache), token, whole)
    given = {"attention_mask": torch.ones(2, 1, dtype=torch.int64)}
    found = call(model, cache, token, position_ids=positions_of(whole, 1), **given)
    torch.testing.assert_close(found, expected, **CLOSE)


def test_pad_token_inside_the_text_requires_an_attention_mask():
    """Without a mask, `generate` treats every pad token as padding."""
    model, said = tiny_model("llama"), "or pass attention_mask if the text itself contains the pad"
    first, later = random_ids(1, 60), random_ids(1, 9, 1)
    first[0, 30] = later[0, 3] = model.config.pad_token_id
    cache = CompressedCache(model, POLICY)
    with pytest.raises(UnsupportedModelError, match=said):
        model.generate(first, past_key_values=cache, max_new_tokens=1)
    cache.reset()
    ids = generated(model, cache, first)
    with pytest.raises(UnsupportedModelError, match=said):
        model.generate(torch.cat([ids, later], dim=1), past_key_values=cache, max_new_tokens=1)
    generated(model, cache, torch.cat([ids, later], dim=1))
