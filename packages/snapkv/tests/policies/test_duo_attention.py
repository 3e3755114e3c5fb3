"""DuoAttention by hand, against a loop over positions, and what it does to real answers.

What it shares with the other methods that evict is in `test_evicting.py`.
"""

import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapkv import (
    CompressedCache,
    DuoAttention,
    InvalidArgumentError,
)
from snapkv.hf.known_heads import known_head_scores, remember_head_scores
from snapkv.ops import ScoreOptions
from snapkv.policies import DecodeStep, PromptLayer
from snapkv.policies.head_scores import head_scores
from tests.families import random_ids, tiny_model
from tests.policies.test_evicting import call, kept_of

SCORES = ((0.1, 0.9), (0.4, 0.4), (0.0, 0.2), (0.7, 0.4))
"""Of the tiny llama: four layers of two KV heads."""


# Which heads keep everything.


def heads(policy):
    """The places of the retrieval heads."""
    rows = policy.retrieval_heads
    return [(i, j) for i, row in enumerate(rows) for j, whole in enumerate(row) if whole]


def test_the_best_heads_by_hand():
    """Of 0.9, 0.7 and three times 0.4 the first of the latter is the third best."""
    assert heads(DuoAttention(SCORES, keep_heads=0.25)) == [(0, 1), (3, 0)]
    assert heads(DuoAttention(SCORES, keep_heads=0.375)) == [(0, 1), (1, 0), (3, 0)]
    assert heads(DuoAttention(SCORES)) == [(0, 1), (1, 0), (1, 1), (3, 0)]
    assert heads(DuoAttention(SCORES, keep_heads=0)) == []
    assert len(heads(DuoAttention(SCORES, keep_heads=1))) == 8
    assert heads(DuoAttention(SCORES, threshold=0.4)) == [(0, 1), (1, 0), (1, 1), (3, 0), (3, 1)]
    assert heads(DuoAttention([[1, 0], [True, False]])) == [(0, 0), (1, 0)]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 4).flatmap(
        lambda heads: st.lists(
            st.lists(st.sampled_from([0.1, 0.2, 0.25, 0.7, 3.0]), min_size=heads, max_size=heads),
            min_size=1,
            max_size=5,
        )
    ),
    eighths=st.integers(0, 8),
)
def test_a_share_keeps_that_many_and_none_below_one_that_streams(rows, eighths):
    policy = DuoAttention(rows, keep_heads=eighths / 8)
    every = [score for row in rows for score in row]
    kept = [rows[i][j] for i, j in heads(policy)]
    assert len(kept) == round(Fraction(eighths, 8) * len(every))
    streams = sorted(every)[: len(every) - len(kept)]
    assert sorted(kept + streams) == sorted(every)


# What they keep.


def kept_by_definition(whole, columns, pads, seen, sinks, recent):
    """Slots of one head, one by one: real ones that are first, recent, or of a retrieval head."""
    return [
        slot
        for slot, column in enumerate(columns)
        if column >= pads and (whole or column - pads < sinks or column >= seen - recent)
    ]


def states(batch, slots, pads=None, heads=2, **options):
    keys = torch.zeros(batch, heads, slots, 4)
    return {
        "queries": torch.zeros(batch, heads, 1, 4),
        "keys": keys,
        "score_options": ScoreOptions(scaling=1.0),
        "layer_idx": 0,
        "pad_tokens": pads,
        **options,
    }


def slots_of(keep_indices, row, head):
    own = keep_indices[row, min(head, keep_indices.shape[1] - 1)]
    return own[own >= 0].tolist()


def test_a_prompt_and_a_step_by_hand():
    policy = DuoAttention([[1, 0]], sink_tokens=2, recent_tokens=3)
    prompt = PromptLayer(**states(1, 8), values=torch.zeros(1, 2, 8, 4))
    selection = policy.select(prompt)
    assert selection.keep_indices.tolist() == [[list(range(8)), [-1, -1, -1, 0, 1, 5, 6, 7]]]
    assert selection.head_tokens.tolist() == [[8, 5]]
    columns = torch.tensor([[list(range(9)), [-1, -1, -1, 0, 1, 5, 6, 7, 8]]])
    eviction = policy.evict(DecodeStep(**states(1, 9), columns=columns, seen_tokens=9))
    assert eviction.keep_indices.tolist() == [[list(range(9)), [-1, -1, -1, -1, 3, 4, 6, 7, 8]]]
    assert eviction.parts_heads


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    pattern=st.lists(st.sampled_from([0, 1]), min_size=1, max_size=3),
    sinks=st.integers(0, 6),
    recent=st.integers(1, 12),
    protect=st.booleans(),
)
def test_a_prompt_keeps_what_the_definition_says(lengths, pattern, sinks, recent, protect):
    T, B, H = max(lengths), len(lengths), len(pattern)
    pads = torch.tensor([T - length for length in lengths])
    protected = torch.zeros(B, 1, T, dtype=torch.bool)
    protected[:, :, T // 2] = protect
    own = states(B, T, pads, H, protected=protected)
    layer = PromptLayer(**own, values=torch.zeros(B, H, T, 4))
    policy = DuoAttention([pattern], sink_tokens=sinks, recent_tokens=recent)
    kept = policy.select(layer).keep_indices
    for row in range(B):
        for head, whole in enumerate(pattern):
            expected = kept_by_definition(whole, range(T), int(pads[row]), T, sinks, recent)
            if protect and pads[row] <= T // 2:
                expected = sorted({*expected, T // 2})
            found = [slot for slot in slots_of(kept, row, head) if slot >= pads[row]]
            assert found == expected


@pytest.mark.parametrize("mode", ["at once", "in pieces", "padded"])
def test_a_model_holds_what_the_definition_says_at_every_step(mode):
    model, policy = tiny_model("llama"), DuoAttention(SCORES, sink_tokens=3, recent_tokens=10)
    ids, pads = random_ids(2, 30), [0, 13 if mode == "padded" else 0]
    cache, mask = CompressedCache(model, policy), torch.ones(2, 30, dtype=torch.long)
    mask[1, : pads[1]] = 0
    cache.expect_prompt(30)
    for piece in ids.split(11 if mode == "in pieces" else 30, dim=1):
        seen = cache.get_seq_length() + piece.shape[1]
        call(model, cache, piece, attention_mask=mask[:, :seen])
    for step in range(15):
        seen = cache.get_seq_length()
        for layer, row in enumerate(policy.retrieval_heads):
            for head, whole in enumerate(row):
                for index, own in enumerate(pads):
                    expected = kept_by_definition(whole, range(seen), own, seen, 3, 10)
                    found = kept_of(cache, layer, index, head)
                    assert found == [column - own for column in expected]
        mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        call(model, cache, random_ids(2, 1, seed=step), attention_mask=mask)


# What was found of a model, and patterns that are not its own.


def test_without_a_pattern_it_goes_by_what_was_found_of_the_model():
    model, policy = tiny_model("llama"), DuoAttention(keep_heads=0.25)
    with pytest.raises(InvalidArgumentError, match=r"pattern: .*run snapkv study heads --model"):
        CompressedCache(model, policy)
    path = remember_head_scores(model, SCORES)
    assert known_head_scores(model) == SCORES
    found = CompressedCache(model, policy).policy
    assert found == DuoAttention(SCORES, keep_heads=0.25)
    assert DuoAttention(str(path)).pattern == DuoAttention(path).pattern == SCORES
    given = DuoAttention([[1, 0]] * 4)
    assert CompressedCache(model, given).policy is given


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"[" * 100_000]
    + [b'{"scores": %s}' % found for found in (b"[[1], []]", b"null", b"5", b"{}", b'"other"')],
    ids=lambda content: content[:20].decode(),
)
def test_a_file_that_says_nothing_is_no_knowledge(content, caplog, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("other").write_text("1\t0\n" * 4)  # scores that were not remembered
    model = tiny_model("llama")
    path = remember_head_scores(model, SCORES)
    identity = json.loads(path.read_bytes())["model"]
    if content.startswith(b"{"):
        content = json.dumps(json.loads(content) | {"model": identity}).encode()
    path.write_bytes(content)
    assert known_head_scores(model) is None
    assert str(path) in caplog.text


@pytest.mark.parametrize("pattern", [[[1, 0]] * 3, [[1, 0, 1]] * 4, [[1]] * 4])
def test_a_pattern_of_another_model_is_refused_before_any_work(pattern):
    with pytest.raises(InvalidArgumentError, match=r"pattern: .*4 layers x 2 KV heads.*got \d x"):
        CompressedCache(tiny_model("llama"), DuoAttention(pattern))


def test_layers_that_slide_by_themselves_need_no_row():
    model = tiny_model("gemma3_text")  # two of four layers
    cache = CompressedCache(model, DuoAttention([[1, 0], [0, 1]], sink_tokens=1, recent_tokens=6))
    call(model, cache, random_ids(1, 30))
    kept = [(cache.kept_positions(index) >= 0).sum(-1).tolist() for index in (1, 3)]
    assert kept == [[[30, 7]], [[7, 30]]]


def test_heads_of_one_latent_need_one_number():
    model = tiny_model("deepseek_v3")
    options = {"sink_tokens": 1, "recent_tokens": 6}
    cache = CompressedCache(model, DuoAttention([[1], [0], [1], [0]], **options))
    call(model, cache, random_ids(1, 30))
    assert [cache.kept_positions(layer).shape[-1] for layer in range(4)] == [30, 7, 30, 7]
    wrong = CompressedCache(model, DuoAttention([[1] * 8] * 4, **options))
    with pytest.raises(InvalidArgumentError, match="4 layers x 1 KV heads"):
        call(model, wrong, random_ids(1, 30))


# Files of scores.


@pytest.mark.parametrize(
    "text",
    [
        "[[0.5, 1], [0, 2e-1]]",
        '{"model": {}, "scores": [[0.5, 1.0], [0.0, 0.2]]}',
        "5.0e-01\t1.0e+00\n0.0e+00\t2.0e-01\n",
        "\ufeff0.5 1\r\n\r\n0 0.2",
    ],
)
def test_scores_are_read_from_json_and_from_the_authors_tables(text, tmp_path):
    path = tmp_path / "scores"
    path.write_text(text, encoding="utf-8", newline="")
    assert head_scores("pattern", str(path)) == ((0.5, 1.0), (0.0, 0.2))


def test_what_it_says_of_itself_makes_it_again():
    policy = DuoAttention(SCORES, keep_heads=0.3)
    described = json.loads(json.dumps(policy.describe()))
    assert described.pop("name") == "duo-attention"
    assert DuoAttention(**described) == policy
    assert hash(DuoAttention([list(row) for row in SCORES], keep_heads=0.3)) == hash(policy)


# What it is good for.
