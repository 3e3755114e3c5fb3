"""Turns, copies and files in combinations that went wrong once."""

import copy
import sys
import threading

import pytest
import torch

from snapkv import CompressedCache, FullCache, SnapKV
from snapkv.prefill import layer_by_layer
from tests.families import call, random_ids, tiny_model

POLICY = SnapKV(budget=24, window_size=8)


def _generate(model, cache, ids):
    return model.generate(
        ids, past_key_values=cache, max_new_tokens=4, do_sample=False, disable_compile=True
    )


@pytest.mark.parametrize(
    ("policy", "options"),
    [(POLICY, {"recall": "host"}), (FullCache(), {})],
    ids=["recall", "nothing dropped"],
)
def test_a_later_turn_is_read_layer_by_layer_as_at_once(policy, options):
    model, ids = tiny_model("llama"), random_ids(1, 101)
    answers = []
    for chunk_tokens in (15, 1000):
        cache = CompressedCache(model, policy, **options)
        with layer_by_layer(model, chunk_tokens=chunk_tokens):
            text = torch.cat([_generate(model, cache, ids), random_ids(1, 30, 9)], dim=1)
            answers.append(_generate(model, cache, text))
    assert torch.equal(*answers)


def test_quantised_cache_saved_between_pieces_of_a_later_prompt_goes_on(tmp_path):
    model, ids = tiny_model("llama"), random_ids(1, 40)
    logits = []
    for saves in (False, True):
        cache = CompressedCache(model, SnapKV(budget=64, window_size=8), quantize="int8")
        call(model, cache, ids[:, :13])  # fits, so all of it is held as codes
        cache.expect_prompt(40)
        call(model, cache, ids[:, 13:22])
        if saves:
            cache.save(tmp_path / "cache")
            cache = CompressedCache.load(tmp_path / "cache", model)
        assert cache.get_seq_length() == 22
        logits.append(call(model, cache, ids[:, 22:]))
    torch.testing.assert_close(*logits)


def test_copies_of_a_cache_go_on_in_threads_of_their_own():
    model, ids = tiny_model("llama"), random_ids(1, 40)
    cache = CompressedCache(model, POLICY)
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


def test_static_cache_whose_first_prompt_fitted_compresses_the_next_turn():
    model, ids, kept = tiny_model("llama"), random_ids(1, 80), []
    for options in ({}, {"storage": "static", "room_tokens": 30}):
        cache = CompressedCache(model, POLICY, recall="host", **options)
        text = torch.cat([_generate(model, cache, ids[:, :15]), ids[:, 40:65]], dim=1)
        _generate(model, cache, text)
        kept.append(cache.report().kept_tokens)
    assert kept[0] == kept[1]
