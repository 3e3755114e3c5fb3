"""Turns, copies and files in combinations that went wrong once."""

import copy
import sys
import threading

import torch

from snapkv import CompressedCache, SnapKV
from tests.families import call, random_ids, tiny_model

POLICY = SnapKV(budget=24, window_size=8)


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
