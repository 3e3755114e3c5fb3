"""One conversation a row: pads behind a row's first token are refused before anything changes."""

import copy

import pytest
import torch

from snapkv import (
    H2O,
    AdaKV,
    CompressedCache,
    FullCache,
    KeyDiff,
    SnapKV,
    UnsupportedModelError,
)
from tests.families import random_ids, tiny_model

CLOSE = {"atol": 2e-4, "rtol": 1e-4}
PICK = {"window_size": 8, "kernel_size": 5}
REFUSAL = r"attention_mask: expected no padding after a row's first token.*got {} of 2 rows"
CASES = {
    "full": (FullCache(), {}),
    "snapkv": (SnapKV(40, **PICK), {}),
    "adakv": (AdaKV(SnapKV(40, **PICK)), {}),
    "h2o": (H2O(40), {}),
    "static": (SnapKV(40, **PICK), {"storage": "static", "room_tokens": 96}),
    "int8": (KeyDiff(40, window_size=8), {"quantize": "int8"}),
    "compress": (SnapKV(40, **PICK), {"turns": "compress"}),
    "recall": (SnapKV(40, **PICK), {"recall": "host"}),
}
by_case = pytest.mark.parametrize(("policy", "options"), CASES.values(), ids=CASES)
later = random_ids(2, 9, 1)


def positions_of(mask):
    return (mask.cumsum(-1) - 1).clamp(min=0)


@torch.no_grad()
def read(model, cache, ids, mask):
    """The logits of the new tokens."""
    new = positions_of(mask)[:, -ids.shape[1] :]
    return model(ids, past_key_values=cache, attention_mask=mask, position_ids=new).logits


def announce(cache, tokens):
    cache.expect_prompt(cache.get_seq_length() + tokens)


def behind_a_prompt(policy, options):
    """A cache that has read 90 tokens, the first 13 of one row being pads, and the mask so far."""
    model, mask = tiny_model("llama"), torch.ones(2, 90, dtype=torch.int64)
    mask[0, :13] = 0
    cache = CompressedCache(model, policy, **options)
    read(model, cache, random_ids(2, 90), mask)
    return model, cache, mask


def with_a_turn(mask, *pads):
    turn = torch.ones(2, 9, dtype=torch.int64)
    for row, column in pads:
        turn[row, column] = 0
    return torch.cat([mask, turn], dim=1)


def seen_of(cache):
    return [cache.kept_positions(layer).tolist() for layer in cache.compressed_layers]


@by_case
@pytest.mark.parametrize(
    ("pads", "rows"),
    [([(1, 0)], 1), ([(0, 0), (1, 8)], 2), ([(0, 4), (0, 5)], 1)],
    ids=["in front of a turn", "in front and behind", "within"],
)
def test_pads_in_a_turn_are_refused_and_nothing_changes(policy, options, pads, rows):
    model, cache, mask = behind_a_prompt(policy, options)
    announce(cache, 9)
    before, other = seen_of(cache), copy.deepcopy(cache)
    with pytest.raises(UnsupportedModelError, match=REFUSAL.format(rows)):
        read(model, cache, later, with_a_turn(mask, *pads))
    assert seen_of(cache) == before
    whole = with_a_turn(mask)
    expected = read(model, other, later, whole)
    torch.testing.assert_close(read(model, cache, later, whole), expected, atol=0, rtol=0)
    assert seen_of(cache) == seen_of(other)


@by_case
def test_a_token_that_was_read_does_not_become_a_pad(policy, options):
    model, cache, mask = behind_a_prompt(policy, options)
    mask = mask.clone()
    mask[1, 3] = 0
    with pytest.raises(UnsupportedModelError, match=REFUSAL.format(1)):
        read(model, cache, later, with_a_turn(mask))


@by_case
def test_answers_that_ended_early_in_generate_are_refused_with_the_next_turn(policy, options):
    model, ids = tiny_model("llama"), random_ids(2, 60)
    cache, probe = (CompressedCache(model, policy, **options) for _ in range(2))
    said = {"do_sample": False, "no_repeat_ngram_size": 1, "max_new_tokens": 6, "pad_token_id": 0}
    answers = model.generate(ids, past_key_values=probe, **said)[:, 60:].tolist()
    end = next(token for token in answers[0] if token not in answers[1])
    first = model.generate(ids, past_key_values=cache, eos_token_id=end, **said)
    text = torch.cat([first, later], dim=1)
    mask = (text > 0).long()
    assert not bool(mask.all())
    before, other = seen_of(cache), copy.deepcopy(cache)
    with pytest.raises(UnsupportedModelError, match=REFUSAL.format(1)):
        model.generate(text, attention_mask=mask, past_key_values=cache, **said)
    assert seen_of(cache) == before
    said["attention_mask"] = torch.ones_like(text)
    both = (model.generate(text, past_key_values=each, **said) for each in (cache, other))
    assert torch.equal(*both)


@by_case
@pytest.mark.parametrize("given", ["without a mask", "all ones"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_leading_pad_stays_a_pad(policy, options, given, tokens):
    model, cache, mask = behind_a_prompt(policy, options)
    other = copy.deepcopy(cache)
    for token in random_ids(2, 6, 2).split(tokens, dim=1):
        mask = torch.cat([mask, torch.ones_like(token)], dim=1)
        expected = read(model, other, token, mask)
        ones = None if given == "without a mask" else torch.ones_like(mask)
        with torch.no_grad():
            found = model(
                token,
                past_key_values=cache,
                attention_mask=ones,
                position_ids=positions_of(mask)[:, -tokens:],
            )
        torch.testing.assert_close(found.logits, expected, **CLOSE)


def test_a_mask_that_is_too_short_is_refused_unless_it_hides_nothing():
    model, cache, mask = behind_a_prompt(*CASES["snapkv"])
    whole, token = with_a_turn(mask)[:, :91], later[:, :1]
    with pytest.raises(UnsupportedModelError, match="expected a column for each of 91 tokens"):
        model(token, past_key_values=cache, attention_mask=whole[:, :-1])
    expected = read(model, copy.deepcopy(cache), token, whole)
    ones, positions = torch.ones(2, 1, dtype=torch.int64), positions_of(whole)[:, -1:]
    with torch.no_grad():
        found = model(token, past_key_values=cache, attention_mask=ones, position_ids=positions)
    torch.testing.assert_close(found.logits, expected, **CLOSE)
