"""Appending in place equals concatenation and never changes states that were returned earlier."""

import copy
import sys
import threading

import pytest
import torch
from torch.testing import assert_close

from snapkv import CompressedCache, SnapKV
from snapkv.storage.tail import ROOM_TOKENS, Tail
from tests.families import call, random_ids, tiny_model

B, H, D = 2, 3, 4


@pytest.fixture(autouse=True)
def no_grad(request):
    """Disable gradients as `generate` does, because with gradients no tail grows in place."""
    with torch.set_grad_enabled("gradients" in request.node.name):
        yield


def states(tokens, seed=0):
    return torch.randn(B, H, tokens, D, generator=torch.Generator().manual_seed(seed))


def holding(tokens):
    """Return a tail whose values are its negated keys."""
    return Tail(states(tokens), -states(tokens))


def grown(tail, tokens=1, seed=0):
    """Append `tokens` tokens and return all keys of the tail."""
    new = states(tokens, seed)
    keys, values = tail.append(new, -new)
    assert torch.equal(values, -keys)
    return keys


def test_tokens_are_appended_in_place_until_the_spare_slots_are_used():
    tail, expected, places = holding(5), states(5), []
    for number in range(ROOM_TOKENS + 3):
        got = grown(tail, seed=number)
        expected = torch.cat([expected, states(1, seed=number)], dim=-2)
        assert torch.equal(got, expected)
        places.append(got.data_ptr())
    assert len(set(places)) == 2
    assert places.index(places[-1]) == ROOM_TOKENS + 1  # the first token came with room behind it


def test_returned_states_are_not_changed_by_later_tokens():
    tail = holding(5)
    first = grown(tail, 2, seed=1)
    before, other = first.clone(), copy.copy(tail)
    second = grown(tail, seed=2)
    apart = grown(other, seed=3)  # the slot behind it is taken
    tail.truncate(2)
    shorter = grown(tail, seed=4)
    assert torch.equal(first, before)
    assert torch.equal(second, torch.cat([before, states(1, seed=2)], dim=-2))
    assert torch.equal(apart, torch.cat([before, states(1, seed=3)], dim=-2))
    assert torch.equal(shorter, torch.cat([before[..., :-1, :], states(1, seed=4)], dim=-2))
    assert second.data_ptr() == first.data_ptr()
    assert len({part.data_ptr() for part in (first, apart, shorter)}) == 3


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copy_and_original_append_to_different_memory(copied):
    tail = holding(5)
    grown(tail, seed=1)
    theirs, ours = grown(copied(tail), seed=2), grown(tail, seed=3)
    assert torch.equal(theirs[..., -1:, :], states(1, seed=2))
    assert torch.equal(ours[..., -1:, :], states(1, seed=3))


def test_appending_many_tokens_at_once_allocates_no_spare_slots():
    got = grown(holding(5), ROOM_TOKENS + 1)
    assert got.untyped_storage().nbytes() == got.nbytes


def test_mismatched_states_are_promoted_or_refused_as_by_concatenation():
    assert grown(Tail(states(5).bfloat16(), -states(5).bfloat16())).dtype == torch.float32
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        holding(5).append(states(1)[:, :1], states(1)[:, :1])


def test_gradients_flow_through_stored_states_and_to_earlier_queries():
    stored = states(5).requires_grad_()
    tail = Tail(stored, -stored)
    grown(tail)
    grown(tail).sum().backward()
    assert_close(stored.grad, torch.ones_like(stored))
    tail, query = holding(5), states(1).requires_grad_()
    for _ in range(2):  # what the first query saw is needed again behind the second
        keys = grown(tail)
        loss = torch.nn.functional.scaled_dot_product_attention(query, keys, keys).sum()
        query.grad = None
        loss.backward(retain_graph=True)
    assert query.grad.abs().sum() > 0


def test_tail_of_inference_mode_grows_outside_of_inference_mode():
    tail = holding(5)
    with torch.inference_mode():
        first = grown(tail, seed=1)
    expected = torch.cat([first, states(1, seed=2), states(1, seed=3)], dim=-2)
    grown(tail, seed=2)
    with torch.inference_mode():
        assert torch.equal(grown(tail, seed=3), expected)


def test_copies_of_a_cache_continue_in_separate_threads():
    model, ids = tiny_model("llama"), random_ids(1, 40)
    cache = CompressedCache(model, SnapKV(24, window_size=8))
    call(model, cache, ids)

    def go_on(branch, token, logits):
        for step in range(25):
            logits.append(call(model, branch, torch.full((1, 1), token + step % 20)))

    expected, found = ([[], []] for _ in range(2))
    for token in range(2):
        go_on(copy.deepcopy(cache), 10 + token, expected[token])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [
            threading.Thread(target=go_on, args=(copy.copy(cache), 10 + token, found[token]))
            for token in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(torch.cat(one), torch.cat(other))


@torch.no_grad()
def test_pieces_of_an_announced_prompt_are_appended_without_reallocation():
    pieces, tail = [states(count, seed=count) for count in (70, 90, 80)], Tail()
    tail.begin(pieces[0], -pieces[0], coming=170)
    places, first = {tail.keys.data_ptr()}, tail.keys.clone()
    for piece in pieces[1:]:
        keys, values = tail.append(piece, -piece)
        places.add(keys.data_ptr())
    assert torch.equal(keys, torch.cat(pieces, dim=2))
    assert torch.equal(values, -keys)
    assert torch.equal(keys[:, :, :70], first)
    assert len(places) == 1
    grown(tail)
    assert tail.keys.data_ptr() not in places, "there was no room for more"
