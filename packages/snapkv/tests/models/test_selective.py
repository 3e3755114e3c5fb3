"""Selective reading, against a full reading whose upper layers are not shown the other tokens."""

import contextlib
import copy
import functools
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from snapkv import CacheMismatchError, CompressedCache, FullCache, InvalidArgumentError, SnapKV
from snapkv.policies import EvictingPolicy
from snapkv.prefill import selective
from snapkv.prefill.selective import _TokensThatGoOn, _voting
from tests.families import HYBRID, ONCE, generated, kept_of, left_padded, random_ids, tiny_model
from tests.methods import METHODS
from tests.ops.states import worked_layer

CASES = [case for case in ONCE if case[0] not in HYBRID]
OPTIONS = {"layer": 2, "keep_ratio": 0.25, "least_tokens": 4}
TOKENS, NEW = 120, 4

SNAPKV = SnapKV(24, window_size=8)
NAMES = ["full", "adakv", "pyramidkv", "h2o", "scissorhands", "r-kv"]
POLICIES = {
    "snapkv": (SNAPKV, "append"),
    "turns": (SNAPKV, "compress"),
    "auto": (SnapKV("auto", window_size=8, pooling="fading"), "append"),
    **{name: (METHODS[name], "append") for name in NAMES},
}


answered = functools.partial(generated, max_new_tokens=NEW)


def read(model, cache, ids, mask=None, **options):
    with torch.no_grad():
        return model(ids, attention_mask=mask, past_key_values=cache, **options).logits[:, -1]


def chosen_positions(model, ids):
    """(n,) what goes on from layer 2: what its cache holds where nothing is dropped."""
    cache = CompressedCache(model, FullCache())
    with selective(model, **OPTIONS):
        read(model, cache, ids)
    return cache.kept_positions(2)[0, 0]


@contextlib.contextmanager
def hidden_from(layers, columns):
    """These layers' attention does not see these columns of the text, whatever its mask."""

    def without(forward, hidden_states, *args, **kwargs):
        mask = kwargs["attention_mask"]
        assert mask.ndim == 4
        hidden = columns[columns < mask.shape[-1]]
        mask = mask.index_fill(-1, hidden, torch.finfo(mask.dtype).min)
        return forward(hidden_states, *args, **kwargs | {"attention_mask": mask})

    for layer in layers:
        vars(layer)["forward"] = functools.partial(without, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


@pytest.mark.parametrize(("family", "implementation"), CASES)
def test_equals_a_reading_whose_upper_layers_do_not_see_the_rest(family, implementation):
    model, slow = tiny_model(family, implementation), copy.deepcopy(tiny_model(family, "eager"))
    ids, new = random_ids(1, TOKENS, seed=3), random_ids(1, NEW, seed=4)
    turn = random_ids(1, 9, seed=6)
    chosen = chosen_positions(model, ids)
    assert len(chosen) == 26 + 16  # floor((120 - 16) / 4), and the window
    missing = torch.tensor(sorted(set(range(TOKENS)) - set(chosen.tolist())))
    cache, reference = CompressedCache(model, FullCache()), DynamicCache()
    with hidden_from(slow.model.layers[2:], missing), selective(model, **OPTIONS):
        for piece in (ids, *new.split(1, dim=1), turn):
            cache.expect_prompt(cache.get_seq_length() + piece.shape[1])
            expected = read(slow, reference, piece)
            torch.testing.assert_close(read(model, cache, piece), expected, atol=2e-4, rtol=1e-3)
    assert cache.get_seq_length() == TOKENS + NEW + 9
    assert [cache.kept_positions(layer).shape[-1] for layer in range(4)] == [133, 133, 55, 55]


@pytest.mark.parametrize(("policy", "turns"), POLICIES.values(), ids=POLICIES)
def test_padded_rows_choose_and_answer_as_they_do_alone(policy, turns):
    model, lengths = tiny_model("llama"), (120, 37, 18)
    ids, mask = left_padded(lengths, seed=7)
    questions = random_ids(len(lengths), 5, seed=8)
    with selective(model, **OPTIONS):
        cache = CompressedCache(model, policy, turns=turns)
        output = answered(model, cache, ids, attention_mask=mask)
        first = positions(cache)
        after = torch.cat([output, questions], dim=1)
        follows = {"attention_mask": torch.cat([mask, torch.ones(3, 9).long()], dim=1)}
        refused = turns == "append" and not isinstance(policy, EvictingPolicy)
        if refused:
            with pytest.raises(CacheMismatchError, match="rows that have kept everything"):
                answered(model, cache, after, **follows)
        else:
            again = answered(model, cache, after, **follows)
        for row, tokens in enumerate(lengths):
            alone = CompressedCache(model, policy, turns=turns)
            own = answered(model, alone, ids[row : row + 1, -tokens:])
            assert own[0, tokens:].tolist() == output[row, ids.shape[1] :].tolist()
            assert_same_positions(first, alone, row)
            if refused:
                continue
            own = torch.cat([own, questions[row : row + 1]], dim=1)
            own = answered(model, alone, own)
            assert own[0, -NEW:].tolist() == again[row, -NEW:].tolist()
            assert_same_positions(positions(cache), alone, row)


def positions(cache):
    return [cache.kept_positions(layer) for layer in cache.compressed_layers]


def assert_same_positions(batch, alone, row):
    for ours, own in zip(batch, positions(alone), strict=True):
        for head, one in zip(ours[row], own[0], strict=True):
            assert head[head >= 0].tolist() == one[one >= 0].tolist()


@pytest.mark.parametrize(
    ("keep_ratio", "expected"),
    [(0.1, [3, 10, 11]), (0.2, [3, 8, 10, 11]), (0.3, [3, 4, 8, 10, 11])],
)
def test_what_goes_on_by_hand(keep_ratio, expected):
    """What one head looks for counts for more than what both look at a little.

    The shares of 3 are 0.6 and 0, those of 8 are 0.4 and 0.4; of 5, 6 and 7 0 and 0.2. With a decay
    of a half 4 has 0.3 from 3 before it. Of ten tokens before the window one, two or three go on.
    """
    policy = _TokensThatGoOn(
        keep_ratio=keep_ratio,
        window_size=2,
        pooling="fading",
        decay=0.5,
        sink_tokens=0,
        least_tokens=0,
    )
    layer = prompt_of([[3, 3, 3, 8, 8], [8, 8, 5, 6, 7]], tokens=12)
    assert policy.choose(layer).keep_indices.tolist() == [[expected]]


def test_query_heads_of_a_kv_head_are_one_voice_by_hand():
    """One query head gives 0.9 to token 2 and 8 has the highest mean of all four, but 5 goes on.

    The means of the first KV head are 0.45, 0 and 0.45 for 2, 5 and 8, of the second 0, 0.6, 0.4.
    """
    layer = prompt_of([[2] * 9 + [8], [8] * 8 + [0] * 2, *[[5] * 6 + [8] * 4] * 2], tokens=12)
    voting = replace(_voting(0.1, 0), window_size=2, decay=0.5, sink_tokens=0)
    assert voting.choose(layer).keep_indices.tolist() == [[[5, 10, 11]]]


def prompt_of(looks_at, tokens):
    """A layer of two KV heads; of each query head the last two look at these, in equal parts."""
    keys = torch.eye(tokens)[None, None].repeat(1, 2, 1, 1)
    queries = torch.zeros(1, len(looks_at), 2, tokens)
    for head, places in enumerate(looks_at):
        for place in set(places):
            share = torch.tensor(places.count(place) / len(places))
            queries[0, head, :, place] = 60.0 + share.log()
    return worked_layer(keys, queries=queries, layer_idx=1)


@pytest.mark.parametrize("options", [{"least_tokens": 200}, {"keep_ratio": 1.0}])
def test_where_all_tokens_go_on_reading_is_exact(options):
    model, ids = tiny_model("qwen3"), random_ids(2, TOKENS)
    cache, expected = (CompressedCache(model, SNAPKV) for _ in range(2))
    exact = read(model, expected, ids)
    with selective(model, **(OPTIONS | options)):
        assert torch.equal(read(model, cache, ids), exact)
    assert kept_of(cache) == kept_of(expected)


def test_protected_tokens_go_on():
    model, ids = tiny_model("llama"), random_ids(1, TOKENS, seed=11)
    cache = CompressedCache(model, SnapKV(64, window_size=8), protect=[(30, 70)])
    with selective(model, layer=2, keep_ratio=0.05, least_tokens=0):
        read(model, cache, ids)
    for layer in range(4):
        assert set(range(30, 70)) <= set(cache.kept_positions(layer)[0, 0].tolist())


@pytest.mark.parametrize("given", [{"layer": 4}, {"keep_ratio": 0.0}, {"least_tokens": -1}])
def test_numbers_out_of_range_are_refused(given):
    """What goes with no cache or model is in `tests.hf.test_support`."""
    refused = pytest.raises(InvalidArgumentError, match=next(iter(given)))
    with refused, selective(tiny_model("llama"), **OPTIONS | given):
        pass


def test_pieces_and_drafts_are_refused():
    model, ids, cache = tiny_model("llama"), random_ids(1, 60), None
    for drafts in ({}, {"prompt_lookup_num_tokens": 3}):
        cache = CompressedCache(model, SNAPKV)
        if not drafts:
            cache.expect_prompt(100)
        refused = pytest.raises(InvalidArgumentError, match="whole prompt")
        with refused, selective(model, **OPTIONS):
            if drafts:
                model.generate(ids, past_key_values=cache, max_new_tokens=NEW, **drafts)
            read(model, cache, ids)
