"""Nothing is lost: a later prompt votes on all that was seen, as if it had been read at once."""

import copy

import pytest
import torch

from snapkv import (
    H2O,
    AdaKV,
    Compactor,
    CompressedCache,
    ExpectedAttention,
    FullCache,
    InvalidArgumentError,
    InvalidTypeError,
    OutOfMemoryError,
    PyramidKV,
    SnapKV,
)
from tests.families import CASES, CLOSE, call, random_ids, tiny_model
from tests.oracle import masked_decode_logits, unwrapped

DOCUMENT, QUESTION, BUDGET, WINDOW = 90, 20, 40, 8
POLICY = SnapKV(BUDGET, window_size=WINDOW, kernel_size=5)


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


@pytest.mark.parametrize(("family", "implementation"), CASES)
def test_a_turn_keeps_what_a_fresh_compression_of_the_whole_keeps(family, implementation):
    model = tiny_model(family, implementation)
    whole = torch.cat([document(2), question(2)], dim=1)
    cache, logits = read(model, document(2), question(2))
    fresh, expected = read(model, whole, recall=None)
    assert_same_choice(cache, fresh)
    torch.testing.assert_close(logits, expected[:, -QUESTION:], **CLOSE)
    continuation = random_ids(2, 3, seed=5)
    got = torch.cat([call(model, cache, token) for token in continuation.split(1, 1)], dim=1)
    torch.testing.assert_close(
        got, masked_decode_logits(model, fresh, whole, continuation), **CLOSE
    )


@pytest.mark.parametrize("recall", ["host", "folder"])
@pytest.mark.parametrize(
    "policy",
    [
        POLICY,
        SnapKV(BUDGET, window_size=WINDOW, group_reduce="none"),
        SnapKV(keep_ratio=0.3, window_size=WINDOW),
        AdaKV(POLICY),
        PyramidKV(BUDGET, window_size=WINDOW),
        FullCache(),
    ],
    ids=lambda policy: policy.name,
)
def test_every_kind_of_choice_is_made_again(policy, recall, tmp_path):
    model, place = tiny_model("llama"), str(tmp_path / "parked") if recall == "folder" else recall
    whole = torch.cat([document(2), question(2)], dim=1)
    cache, logits = read(model, document(2), question(2), policy=policy, recall=place)
    fresh, expected = read(model, whole, policy=policy, recall=None)
    assert_same_choice(cache, fresh)
    torch.testing.assert_close(logits, expected[:, -QUESTION:], **CLOSE)
    token = random_ids(2, 1, seed=5)
    torch.testing.assert_close(call(model, cache, token), call(model, fresh, token), **CLOSE)
    assert not list(tmp_path.glob("parked/*"))  # files without names


def test_a_question_shorter_than_the_window_votes_with_the_end_of_the_turn_before():
    model = tiny_model("llama")
    cache, _ = read(model, document(), question(tokens=3))
    fresh, _ = read(model, torch.cat([document(), question(tokens=3)], 1), recall=None)
    assert_same_choice(cache, fresh)


def test_a_second_question_finds_what_the_first_one_dropped():
    """Three turns: each is as good as if the ones before had been read with a full cache."""
    model = tiny_model("llama")
    turns = [document(), question(), question(seed=2)]
    cache, logits = read(model, *turns)
    fresh, expected = read(model, torch.cat(turns, 1), recall=None)
    assert_same_choice(cache, fresh)
    torch.testing.assert_close(logits, expected[:, -QUESTION:], **CLOSE)
    forgetful, other = read(model, *turns, recall=None)
    assert not torch.equal(forgetful.kept_positions(0)[..., :32], cache.kept_positions(0)[..., :32])
    assert not torch.allclose(other, logits, atol=1e-2)


def test_padded_rows_recall_their_own_tokens():
    model, ids = tiny_model("llama"), document(3)
    mask = torch.ones_like(ids)
    mask[0, :50], mask[1, :10] = 0, 0
    ids = ids.masked_fill(mask == 0, 0)
    asked, ones = question(3), torch.ones(3, QUESTION, dtype=torch.int64)
    cache = CompressedCache(model, POLICY, recall="host")
    whole, whole_mask = torch.cat([ids, asked], 1), torch.cat([mask, ones], 1)
    positions = (whole_mask.cumsum(-1) - 1).clamp(min=0)
    call(model, cache, ids, attention_mask=mask, position_ids=positions[:, :DOCUMENT])
    cache.expect_prompt(DOCUMENT + QUESTION)
    call(model, cache, asked, attention_mask=whole_mask, position_ids=positions[:, DOCUMENT:])
    for row, pads in enumerate((50, 10, 0)):
        alone, _ = read(model, whole[row : row + 1, pads:], recall=None)
        for layer in range(4):
            kept = cache.kept_positions(layer)[row]
            assert torch.equal(kept[kept >= 0].view(2, -1), alone.kept_positions(layer)[0])


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
    """The cache that has room for everything says the same, the one that forgets does not."""
    model = tiny_model("qwen3")
    cache = CompressedCache(model, POLICY, recall="host")
    ids = conversation(model, cache)
    assert cache.report().kept_tokens == BUDGET + 5
    first = unwrapped(model, "sdpa").generate(document(), max_new_tokens=1, do_sample=False)
    assert torch.equal(ids[:, : DOCUMENT + 1], first)
    static = CompressedCache(model, POLICY, recall="host", storage="static", room_tokens=32)
    assert torch.equal(conversation(model, static), ids)
    for layer in range(4):
        assert torch.equal(static.kept_positions(layer), cache.kept_positions(layer))


def test_the_first_token_of_a_turn_is_that_of_all_that_is_stored_off_the_device():
    """With room for everything nothing is dropped, and recall changes nothing."""
    model = tiny_model("llama")
    roomy = CompressedCache(model, SnapKV(500, window_size=WINDOW), recall="host")
    full = CompressedCache(model, FullCache())
    assert torch.equal(conversation(model, roomy), conversation(model, full))
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
    fresh, _ = read(model, torch.cat([document(), question()], 1), recall=None)
    assert_same_choice(cache, fresh)
    report = cache.report()
    assert report.host_bytes == report.full_bytes  # all that was seen


def test_beams_and_repeated_rows_recall_the_row_they_come_from():
    model = tiny_model("llama")
    cache, _ = read(model, document(3))
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.batch_repeat_interleave(2)
    rows = [2, 2, 0, 0, 1, 1]
    cache.expect_prompt(DOCUMENT + QUESTION)
    call(model, cache, question(6))
    fresh, _ = read(model, torch.cat([document(3)[rows], question(6)], 1), recall=None)
    assert_same_choice(cache, fresh)
    beams = CompressedCache(model, POLICY, recall="host")
    ids = generated(model, beams, document(), num_beams=3)
    assert ids.shape == (1, DOCUMENT + 6)


def test_tokens_can_be_taken_back_as_far_as_anyone_likes():
    model = tiny_model("llama")
    cache, _ = read(model, document(), question())
    cache.crop(-QUESTION - 30)
    assert cache.get_seq_length() == DOCUMENT - 30
    call(model, cache, question(seed=7))
    fresh, _ = read(model, torch.cat([document()[:, :60], question(seed=7)], 1), recall=None)
    assert_same_choice(cache, fresh)


def test_a_turn_that_was_announced_and_not_read_is_taken_back():
    model = tiny_model("llama")
    cache, _ = read(model, document())
    before = copy.deepcopy(cache)
    with pytest.raises(ValueError, match="nonsense"):
        generated(model, cache, torch.cat([document(), question()], 1), nonsense=1)
    token = question(tokens=1)
    assert torch.equal(call(model, cache, token), call(model, before, token))


# Refresh.


def test_a_refresh_chooses_as_the_last_queries_vote_on_everything():
    model = tiny_model("llama")
    tokens = random_ids(1, 12, seed=3)
    cache, _ = read(model, document(), refresh_every=4)
    record = _Record(cache)
    for step, token in enumerate(tokens.split(1, dim=1), 1):
        call(model, cache, token)
        assert cache.report().kept_tokens == BUDGET + step % 4
        if step % 4 == 0:
            assert record.agrees()
    report = cache.report()
    assert report.host_bytes == report.full_bytes


class _Record:
    """Every key and query that a cache's layers have seen, noted beside them."""

    def __init__(self, cache):
        self.cache, self.layer = cache, cache.layers[2]
        self.keys = [self.layer.offloaded.with_tail(*self._none())[0]]
        self.queries = [self.layer.notes.last_queries.clone()]
        update = self.layer.update

        def noted_update(keys, values, *args, **kwargs):
            self.keys.append(keys)
            return update(keys, values, *args, **kwargs)

        look_back = self.layer.look_back

        def noted_look_back(queries):
            self.queries.append(queries)
            return look_back(queries)

        self.layer.update, self.layer.look_back = noted_update, noted_look_back

    def _none(self):
        return self.layer.keys[:, :, :0], self.layer.values[:, :, :0]

    def agrees(self):
        """Whether the layer keeps what plain sums of plain attention say."""
        keys, queries = torch.cat(self.keys, 2), torch.cat(self.queries, 2)[:, :, -WINDOW:]
        T = keys.shape[2]
        scores = queries @ keys.repeat_interleave(4, dim=1).transpose(-1, -2) * 8**-0.5
        hidden = torch.ones(WINDOW, T).tril(T - WINDOW) == 0
        votes = scores.masked_fill(hidden, -torch.inf).softmax(-1).sum(2)[..., : T - WINDOW]
        votes = torch.nn.functional.max_pool1d(votes.view(1, 2, 4, -1).mean(2), 5, 1, 2)
        best = votes.topk(BUDGET - WINDOW).values.min(-1).values
        kept = self.cache.kept_positions(2)[..., : BUDGET - WINDOW]
        return bool((votes.gather(2, kept) >= best[..., None] - 1e-6).all())


def test_a_refresh_at_a_budget_of_everything_changes_nothing():
    model = tiny_model("llama")
    ids = []
    for options in ({}, {"refresh_every": 2}):
        cache = CompressedCache(model, SnapKV(500, window_size=8), recall="host", **options)
        ids.append(generated(model, cache, document()))
    assert torch.equal(*ids)


@pytest.mark.parametrize("policy", [SnapKV(500, window_size=8), FullCache()], ids=lambda p: p.name)
def test_a_refresh_that_keeps_all_holds_it_in_few_bits(policy):
    """As a prompt of as many tokens is held."""
    model, text = tiny_model("llama"), torch.cat([document(), random_ids(1, 9, seed=3)], dim=1)
    options = {"recall": "host", "quantize": "int4"}
    cache = CompressedCache(model, policy, refresh_every=4, **options)
    call(model, cache, document())
    for token in text[:, document().shape[1] :].split(1, dim=1):
        call(model, cache, token)
    other = CompressedCache(model, policy, **options)
    call(model, other, text[:, :-1])
    call(model, other, text[:, -1:])
    assert cache.report() == other.report()


# What it costs, and where it ends.


def test_the_host_holds_what_was_seen_and_the_device_the_budget():
    model = tiny_model("llama")
    cache = CompressedCache(model, POLICY, recall="host")
    ids = document()
    for turn in range(6):
        ids = torch.cat([generated(model, cache, ids), question(seed=turn)], dim=1)
        report = cache.report()
        assert report.kept_tokens == BUDGET + 5
        per_token = report.full_bytes // report.seen_tokens
        assert report.host_bytes == per_token * (report.seen_tokens - 5)
        assert report.held_bytes == per_token * (BUDGET + 5)


def test_the_limit_is_kept_and_given_back():
    model = tiny_model("llama")
    one = CompressedCache(model, POLICY, recall="host")
    call(model, one, document())
    needed = one.report().host_bytes
    cache = CompressedCache(model, POLICY, recall="host", recall_bytes=needed)
    for _ in range(3):
        call(model, cache, document())
        cache.reset()
    with pytest.raises(OutOfMemoryError, match=r"recall_bytes: expected room for .* limit of"):
        call(model, cache, random_ids(1, DOCUMENT + 1))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recall": "host", "turns": "append"}, "turns: expected 'compress' with recall"),
        ({"recall_bytes": 5}, "recall_bytes: expected recall='host' or a folder"),
        ({"refresh_every": 5}, "refresh_every: expected recall='host' or a folder"),
        ({"recall": "host", "refresh_every": 0}, "refresh_every: expected at least 1"),
        ({"recall": "host", "recall_bytes": 0}, "recall_bytes: expected at least 1"),
        ({"turns": "forget"}, "turns: expected one of append, compress"),
        ({"recall": "/proc/nowhere"}, "recall: expected 'host' or a folder"),
        ({"recall": "a\0b"}, "recall: expected 'host' or a folder.*null byte; choose another"),
        ({"recall": "host", "policy": H2O(64)}, "policy: expected one that only compresses"),
        ({"recall": "host", "refresh_every": 4, "storage": "static"}, "storage: expected 'dyn"),
        (
            {"recall": "host", "refresh_every": 4, "policy": ExpectedAttention(64)},
            "refresh_every: expected a policy whose last",
        ),
        ({"recall": "host", "policy": Compactor(64)}, "policy: expected one that chooses by the"),
    ],
)
def test_what_cannot_be_done_is_said_when_the_cache_is_made(options, said):
    options = {"policy": POLICY, **options}
    with pytest.raises(InvalidArgumentError, match=said):
        CompressedCache(tiny_model("llama"), **options)
    with pytest.raises(InvalidTypeError, match="recall: expected 'host' or the path"):
        CompressedCache(tiny_model("llama"), POLICY, recall=5)


def test_drafts_are_refused_where_the_cache_chooses_again():
    model = tiny_model("llama")
    cache = CompressedCache(model, POLICY, recall="host", refresh_every=4)
    with pytest.raises(InvalidArgumentError, match="refresh_every: expected none where drafts"):
        generated(model, cache, document(), prompt_lookup_num_tokens=3)


def test_prompt_lookup_says_what_plain_decoding_says_and_needs_an_empty_cache():
    """In a second turn transformers reads all of the text into the cache again, whosever it is."""
    model, said = tiny_model("llama"), []
    for options in ({}, {"prompt_lookup_num_tokens": 3}):
        cache = CompressedCache(model, POLICY, recall="host")
        said.append(generated(model, cache, document(), **options))
        assert cache.report().host_bytes
    assert torch.equal(*said)
    with pytest.raises(InvalidArgumentError, match="past_key_values: expected an empty cache"):
        generated(model, cache, torch.cat([said[0], question()], 1), **options)
