"""Nothing is lost: a later prompt votes on all that was seen, as if it had been read at once."""

import copy

import pytest
import torch

from snapkv import (
    AdaKV,
    CompressedCache,
    FullCache,
    InvalidArgumentError,
    InvalidTypeError,
    OutOfMemoryError,
    PyramidKV,
    SnapKV,
)
from tests.families import CLOSE, ONCE, call, random_ids, tiny_model
from tests.oracle import masked_decode_logits, unwrapped

DOCUMENT, QUESTION, BUDGET, WINDOW = 90, 20, 40, 8
POLICY = SnapKV(BUDGET, window_size=WINDOW, kernel_size=5)
ROOMY = SnapKV(500, window_size=WINDOW)


def read(model, *turns, policy=POLICY, recall="host", **options):
    """A cache that has read the turns one after the other, and the last one's logits."""
    cache = CompressedCache(model, policy, recall=recall, **options)
    for ids in turns:
        cache.expect_prompt(cache.get_seq_length() + ids.shape[1])
        logits = call(model, cache, ids)
    return cache, logits


def document(batch=1):
    return random_ids(batch, DOCUMENT)


def question(batch=1, tokens=QUESTION, seed=1):
    return random_ids(batch, tokens, seed=seed)


def assert_same_choice(cache, other):
    for layer in other.compressed_layers:
        assert torch.equal(cache.kept_positions(layer), other.kept_positions(layer))


# The oracle: what a fresh compression of the whole text keeps, and masked full attention.


@pytest.mark.parametrize(("family", "implementation"), ONCE)
def test_a_turn_keeps_what_a_fresh_compression_of_the_whole_keeps(family, implementation):
    model = tiny_model(family, implementation)
    whole = torch.cat([document(2), question(2)], dim=1)
    cache, logits = read(model, document(2), question(2))
    fresh, expected = read(model, whole, recall=None)
    assert_same_choice(cache, fresh)
    torch.testing.assert_close(logits, expected[:, -QUESTION:], **CLOSE)
    continuation = random_ids(2, 3, seed=5)
    got = torch.cat([call(model, cache, token) for token in continuation.split(1, 1)], dim=1)
    expected = masked_decode_logits(model, fresh, whole, continuation)
    torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize(
    "policy",
    [
        SnapKV(BUDGET, window_size=WINDOW, group_reduce="none"),
        SnapKV(keep_ratio=0.3, window_size=WINDOW),
        AdaKV(POLICY),
        PyramidKV(BUDGET, window_size=WINDOW),
        FullCache(),
    ],
    ids=lambda policy: policy.name,
)
def test_every_kind_of_choice_is_made_again(policy, tmp_path):
    """Over three turns, one of them shorter than the window, out of files without names."""
    model, place = tiny_model("llama"), tmp_path / "parked"
    turns = [document(2), question(2, tokens=3), question(2, seed=2)]
    cache, logits = read(model, *turns, policy=policy, recall=place)
    fresh, expected = read(model, torch.cat(turns, dim=1), policy=policy, recall=None)
    assert_same_choice(cache, fresh)
    torch.testing.assert_close(logits, expected[:, -QUESTION:], **CLOSE)
    token = random_ids(2, 1, seed=5)
    torch.testing.assert_close(call(model, cache, token), call(model, fresh, token), **CLOSE)
    assert not list(place.glob("*"))


def test_a_second_question_finds_what_the_first_one_dropped():
    model = tiny_model("llama")
    turns = [document(), question(), question(seed=2)]
    cache, logits = read(model, *turns)
    forgetful, other = read(model, *turns, recall=None)
    assert not torch.equal(forgetful.kept_positions(0)[..., :32], cache.kept_positions(0)[..., :32])
    assert not torch.allclose(other, logits, atol=1e-2)


# Through `generate`.


def generated(model, cache, ids, **options):
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=6,
        do_sample=False,
        **options,
    )


def conversation(model, cache, turns=3):
    ids = document()
    for turn in range(turns):
        ids = torch.cat([generated(model, cache, ids), question(seed=turn)], dim=1)
    return ids


def test_generate_goes_on_over_several_turns():
    """The first token is the full cache's; the host holds what was seen, the device the budget."""
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
    static = CompressedCache(model, POLICY, recall="host", storage="static", room_tokens=32)
    assert torch.equal(conversation(model, static), ids)
    assert_same_choice(static, cache)


def test_where_all_fits_nothing_is_dropped_and_recall_changes_nothing():
    model = tiny_model("llama")
    expected = conversation(model, CompressedCache(model, FullCache()), turns=2)
    roomy = CompressedCache(model, ROOMY, recall="host")
    assert torch.equal(conversation(model, roomy, turns=2), expected)
    assert roomy.report().host_bytes == 0


def test_a_turn_may_come_in_pieces_and_holds_no_more_than_one_layer_between_them():
    model = tiny_model("llama")
    cache = CompressedCache(model, POLICY, recall="host")
    cache.expect_prompt(DOCUMENT)
    for piece in document().split(40, dim=1):
        call(model, cache, piece)
        seen = cache.get_seq_length()
        assert cache.report().kept_tokens == (BUDGET if seen == DOCUMENT else 0)
    cache.expect_prompt(DOCUMENT + QUESTION)
    for piece in question().split(7, dim=1):
        call(model, cache, piece)
    assert_same_choice(cache, read(model, torch.cat([document(), question()], 1), recall=None)[0])
    report = cache.report()
    assert report.host_bytes == report.full_bytes  # all that was seen


def test_beams_and_repeated_rows_recall_the_row_they_come_from():
    model = tiny_model("llama")
    cache, _ = read(model, document(3))
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.batch_repeat_interleave(2)
    cache.expect_prompt(DOCUMENT + QUESTION)
    call(model, cache, question(6))
    text = torch.cat([document(3)[[2, 2, 0, 0, 1, 1]], question(6)], 1)
    assert_same_choice(cache, read(model, text, recall=None)[0])
    beams = CompressedCache(model, POLICY, recall="host")
    assert generated(model, beams, document(), num_beams=3).shape == (1, DOCUMENT + 6)


def test_a_turn_that_was_announced_and_not_read_is_taken_back():
    model = tiny_model("llama")
    cache, _ = read(model, document())
    before, token = copy.deepcopy(cache), question(tokens=1)
    with pytest.raises(ValueError, match="nonsense"):
        generated(model, cache, torch.cat([document(), question()], 1), nonsense=1)
    assert torch.equal(call(model, cache, token), call(model, before, token))


# Where it ends.


def test_the_limit_is_kept_and_given_back():
    model = tiny_model("llama")
    needed = read(model, document())[0].report().host_bytes
    cache = CompressedCache(model, POLICY, recall="host", recall_bytes=needed)
    for _ in range(3):
        call(model, cache, document())
        cache.reset()
    with pytest.raises(OutOfMemoryError, match=r"recall_bytes: expected room for .* limit of"):
        call(model, cache, random_ids(1, DOCUMENT + 1))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recall_bytes": 0}, "recall_bytes: expected at least 1"),
        ({"turns": "forget"}, "turns: expected one of append, compress"),
        ({"recall": "/proc/nowhere"}, "recall: expected 'host' or a folder"),
        ({"recall": "a\0b"}, "recall: expected 'host' or a folder.*null byte; choose another"),
    ],
)
def test_what_cannot_be_done_is_said_when_the_cache_is_made(options, said):
    with pytest.raises(InvalidArgumentError, match=said):
        CompressedCache(tiny_model("llama"), **{"policy": POLICY, "recall": "host", **options})
    with pytest.raises(InvalidTypeError, match="recall: expected 'host' or the path"):
        CompressedCache(tiny_model("llama"), POLICY, recall=5)


def test_drafts_say_what_plain_decoding_says_and_need_an_empty_cache():
    """In a second turn transformers reads all of the text into the cache again, whosever it is."""
    model, said, lookup = tiny_model("llama"), [], {"prompt_lookup_num_tokens": 3}
    for options in ({}, lookup):
        cache = CompressedCache(model, POLICY, recall="host")
        said.append(generated(model, cache, document(), **options))
        assert cache.report().host_bytes
    assert torch.equal(*said)
    static = CompressedCache(model, POLICY, storage="static", room_tokens=64)
    assert torch.equal(generated(model, static, document()), said[0])
    for used in (cache, static):
        with pytest.raises(InvalidArgumentError, match="past_key_values: expected an empty cache"):
            generated(model, used, torch.cat([said[0], question()], 1), **lookup)
