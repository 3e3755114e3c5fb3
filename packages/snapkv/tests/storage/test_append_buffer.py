"""Appending in place gives what concatenation gives, and never changes what was handed out."""

import copy
import pickle
import sys
import threading

import pytest
import torch
from torch.testing import assert_close

from snapkv import CompressedCache, SnapKV
from snapkv.storage.append_buffer import ROOM_TOKENS, AppendBuffer
from tests.families import call, random_ids, tiny_model

B, H, D = 2, 3, 4


@pytest.fixture(autouse=True)
def no_grad(request):
    """As in `generate`; with gradients nothing grows in place."""
    with torch.set_grad_enabled("gradients" in request.node.name):
        yield


def states(tokens, seed=0):
    return torch.randn(B, H, tokens, D, generator=torch.Generator().manual_seed(seed))


def test_tokens_come_in_place_until_the_room_is_used_up():
    growing, expected, places = AppendBuffer(), states(5), []
    got = expected
    for number in range(ROOM_TOKENS + 3):
        token = states(1, seed=number)
        got, expected = growing.append(got, token), torch.cat([expected, token], dim=-2)
        assert torch.equal(got, expected)
        places.append(got.data_ptr())
    assert len(set(places)) == 2
    assert places.index(places[-1]) == ROOM_TOKENS + 1  # the first token came with room behind it


def test_what_was_handed_out_stays_as_it_is():
    growing = AppendBuffer()
    first = growing.append(states(5), states(2, seed=1))
    before = first.clone()
    second = growing.append(first, states(1, seed=2))
    other = growing.append(first, states(1, seed=3))  # the slot behind it is taken
    shorter = growing.append(second[..., :-2, :], states(1, seed=4))
    assert torch.equal(first, before)
    assert torch.equal(second, torch.cat([before, states(1, seed=2)], dim=-2))
    assert torch.equal(other, torch.cat([before, states(1, seed=3)], dim=-2))
    assert torch.equal(shorter, torch.cat([before[..., :-1, :], states(1, seed=4)], dim=-2))
    assert second.data_ptr() == first.data_ptr() != other.data_ptr()


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))]
)
def test_a_copy_does_not_write_behind_what_the_original_handed_out(copied):
    growing = AppendBuffer()
    first = growing.append(states(5), states(1, seed=1))
    theirs = copied(growing).append(first, states(1, seed=2))
    ours = growing.append(first, states(1, seed=3))
    assert torch.equal(theirs[..., -1:, :], states(1, seed=2))
    assert torch.equal(ours[..., -1:, :], states(1, seed=3))


def test_it_holds_no_memory_itself_and_many_tokens_at_once_leave_no_room():
    growing = AppendBuffer()
    got = growing.append(states(5), states(1, seed=1))
    held = growing._last
    assert held() is got
    del got
    assert held() is None
    got = growing.append(states(5), states(ROOM_TOKENS + 1, seed=1))
    assert got.untyped_storage().nbytes() == got.nbytes


def test_what_does_not_match_is_for_concatenation_to_judge():
    growing, stored = AppendBuffer(), states(5)
    assert growing.append(stored.bfloat16(), states(1)).dtype == torch.float32
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        growing.append(stored, states(1)[:, :1])


def test_gradients_flow_through_what_is_stored_and_past_it():
    growing, stored = AppendBuffer(), states(5).requires_grad_()
    growing.append(growing.append(stored, states(1)), states(1)).sum().backward()
    assert_close(stored.grad, torch.ones_like(stored))
    keys, query = states(5), states(1).requires_grad_()
    for _ in range(2):  # what the first query saw is needed again behind the second
        keys = growing.append(keys, states(1))
        loss = torch.nn.functional.scaled_dot_product_attention(query, keys, keys).sum()
        query.grad = None
        loss.backward(retain_graph=True)
    assert query.grad.abs().sum() > 0


def test_what_inference_mode_has_made_grows_outside_of_it():
    growing = AppendBuffer()
    with torch.inference_mode():
        first = growing.append(states(5), states(1, seed=1))
        assert growing.append(first, states(1, seed=9)).data_ptr() == first.data_ptr()
    second = growing.append(first, states(1, seed=2))
    with torch.inference_mode():
        third = growing.append(second, states(1, seed=3))
    assert torch.equal(third, torch.cat([first, states(1, seed=2), states(1, seed=3)], dim=-2))


def test_copies_of_a_cache_go_on_in_threads_of_their_own():
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
