"""Recall: a later prompt votes on all tokens seen so far, as if they had been read at once."""

import pytest
import torch

from snapkv import CompressedCache, InvalidArgumentError, OutOfMemoryError, SnapKV
from tests.families import call, generated, random_ids, tiny_model
from tests.oracle import unwrapped

DOCUMENT, QUESTION, BUDGET, WINDOW = 90, 20, 40, 8
POLICY = SnapKV(BUDGET, window_size=WINDOW, kernel_size=5)


def read(model, *turns, policy=POLICY, recall="host", **options):
    """Read the turns one after the other; return the cache and the logits of the last turn."""
    cache = CompressedCache(model, policy, recall=recall, **options)
    for ids in turns:
        cache.expect_prompt(cache.get_seq_length() + ids.shape[1])
        logits = call(model, cache, ids)
    return cache, logits


def document(batch=1):
    return random_ids(batch, DOCUMENT)


def question(batch=1, tokens=QUESTION, seed=1):
    return random_ids(batch, tokens, seed=seed)


# Through `generate`.


def conversation(model, cache, turns=3):
    ids = document()
    for turn in range(turns):
        ids = torch.cat([generated(model, cache, ids), question(seed=turn)], dim=1)
    return ids


def test_generate_continues_over_several_turns_within_the_budget():
    """The host holds all tokens seen, and the device only the budget."""
    model = tiny_model("qwen3")
    cache = CompressedCache(model, POLICY, recall="host")
    ids = conversation(model, cache)
    report = cache.report()
    assert report.kept_tokens == BUDGET + 5
    per_token = report.full_bytes // report.seen_tokens
    assert report.host_bytes == per_token * (report.seen_tokens - 5)
    assert report.held_bytes == per_token * (BUDGET + 5)
    first = unwrapped(model, "sdpa").generate(document(), max_new_tokens=1, do_sample=False)
    assert torch.equal(ids[:, : DOCUMENT + 1], first)


# Where it ends.


def test_recall_bytes_limits_host_memory_and_reset_frees_the_memory():
    model = tiny_model("llama")
    needed = read(model, document())[0].report().host_bytes
    cache = CompressedCache(model, POLICY, recall="host", recall_bytes=needed)
    for _ in range(3):
        call(model, cache, document())
        cache.reset()
    with pytest.raises(
        OutOfMemoryError, match=r"recall_bytes: .* are offloaded, and .* more would"
    ):
        call(model, cache, random_ids(1, DOCUMENT + 1))


def test_prompt_lookup_equals_plain_decoding_and_requires_an_empty_cache():
    """In a second turn, transformers would read the whole text into the cache again."""
    model, said, lookup = tiny_model("llama"), [], {"prompt_lookup_num_tokens": 3}
    for options in ({}, lookup):
        cache = CompressedCache(model, POLICY, recall="host")
        said.append(generated(model, cache, document(), **options))
        assert cache.report().host_bytes
    assert torch.equal(*said)
    plain = CompressedCache(model, POLICY)
    assert torch.equal(generated(model, plain, document()), said[0])
    for used in (cache, plain):
        with pytest.raises(InvalidArgumentError, match="transformers needs an empty cache"):
            generated(model, used, torch.cat([said[0], question()], 1), **lookup)
