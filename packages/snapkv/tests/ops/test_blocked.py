"""The implementations for a CPU equal the reference and use bounded memory."""

import functools
import itertools

import pytest
import torch

from snapkv import InvalidArgumentError, ops
from snapkv.ops import AttentionStates, Fading, Pooling, ScoreOptions
from snapkv.ops.votes import api, blocked, by_head, largest, reference
from tests.ops.vote_cases import (
    REDUCES,
    SHAPES,
    options_of,
    require_fading,
    require_votes,
    some_votes,
    states,
)
from tests.pairs import pairs

LIFTS = [Fading(0.8), Fading(1e-300), Pooling(5, "max"), Pooling((0, 4), "avg")]


@pairs(
    shape={name: SHAPES[name] for name in ("gqa-63", "mha-d80", "mqa-d96", "no prefix")},
    lift=LIFTS,
    extras=["", "softcap", "sinks", "pads", "all"],
    group_reduce=REDUCES,
    most_bytes=[1, 1 << 13, 1 << 30],
    more=[0, 3],
    sink_tokens=[0, 2, 70],
)
def test_largest_votes_equal_the_reference(
    monkeypatch, shape, lift, extras, group_reduce, most_bytes, more, sink_tokens
):
    """Positions among the voters are included; only later voters attend to them."""
    monkeypatch.setattr(largest, "MOST_BYTES", most_bytes)
    queries, keys = states(shape)
    given = AttentionStates(queries, keys, **options_of(shape, extras))
    options = {"lift": lift, "group_reduce": group_reduce, "sink_tokens": sink_tokens}
    options["prefix_tokens"] = shape[4] - shape[3] + more
    expected = reference.largest_votes(given, **options)
    pads = [] if given.pad_tokens is None else given.pad_tokens.tolist()
    for row, count in enumerate(pads):
        keys[row, :, :count] = float("nan")
    found = largest.largest_votes(given, **options)
    torch.testing.assert_close(found, expected, atol=1e-6 * shape[3], rtol=1e-5)
    assert (
        group_reduce == "sum"
        or not found[0].numel()
        or 0 <= found[0].min() <= found[0].max() <= 1.000001
    )


@pytest.mark.parametrize(
    ("impl", "dtype", "at_once"),
    [
        ("by_head", torch.bfloat16, 1),
        ("by_head", torch.float16, 1 << 30),
        ("blocked", torch.float32, 0),
        ("blocked", torch.bfloat16, 0),
        ("reference", torch.bfloat16, 0),
    ],
    ids=str,
)
def test_votes_are_as_accurate_as_required_of_kernels(monkeypatch, impl, dtype, at_once):
    monkeypatch.setattr(by_head, "MOST_BYTES", at_once)
    shapes = ("gqa-63", "mha-d80", "window 1", "no prefix", "one of prefix")
    require_votes(impl, dtype, shapes=shapes)


def test_heads_with_too_many_scores_vote_block_by_block(monkeypatch):
    given = AttentionStates(*states(SHAPES["gqa-63"], torch.bfloat16), ScoreOptions(scaling=0.2))
    expected = by_head.window_votes(given)
    monkeypatch.setattr(by_head, "MOST_BYTES_OF_A_HEAD", 4 * 2 * 8 * 63 - 1)
    votes = by_head.window_votes(given)
    assert torch.equal(votes, blocked.window_votes(given))
    torch.testing.assert_close(votes, expected, atol=1e-6, rtol=1e-5)


def test_memory_is_bounded_by_the_block(monkeypatch):
    big = states((1, 8, 2, 32, 4096, 64), torch.bfloat16)
    given = AttentionStates(*big, ScoreOptions(scaling=0.1))

    def peak(vote, **options):
        with torch.profiler.profile(profile_memory=True) as profile:
            vote(given, **options)
        held = most = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        return most

    scores = 8 * 32 * 4096 * 4
    assert peak(reference.window_votes) > 2 * scores
    assert peak(blocked.window_votes, block_tokens=256) < scores / 4
    monkeypatch.setattr(by_head, "MOST_BYTES", scores // 2)
    assert peak(by_head.window_votes) < 0.9 * scores  # half of them, and a copy of half the keys
    monkeypatch.setattr(largest, "MOST_BYTES", scores // 8)
    by_query = functools.partial(largest.largest_votes, lift=Fading(0.9), prefix_tokens=4064)
    assert peak(by_query) < 0.7 * scores  # twice an eighth, half the keys, and what is returned


def test_implementation_is_chosen_by_its_name(monkeypatch):
    given = AttentionStates(*states(SHAPES["gqa-63"]), ScoreOptions(scaling=0.2))
    ran = []
    for name, vote in dict(api._IN_TORCH["window_votes"]).items():
        monkeypatch.setitem(
            api._IN_TORCH["window_votes"],
            name,
            lambda *a, n=name, v=vote, **o: ran.append(n) or v(*a, **o),
        )
    for impl in ("auto", "reference", "blocked", "by_head"):
        ops.window_votes(given, impl=impl)
    assert ran == ["blocked", "reference", "blocked", "by_head"]
    with pytest.raises(InvalidArgumentError, match=r"impl: expected auto or one of.* got 'cuda'"):
        ops.window_votes(given, impl="cuda")


@pytest.mark.parametrize("impl", ["reference", "scan"])
def test_fading_does_not_change_its_input_and_has_gradients(impl):
    require_fading(impl, lengths=(0, 1, 63, 1025))
    votes = some_votes(50)
    before = votes.clone()
    with torch.inference_mode():
        ops.fade_votes(votes, 0.5, impl=impl)
    assert torch.equal(votes, before)
    lifting = torch.tensor([[[4.0, 1.0, 0.5, 3.0]]], requires_grad=True)
    ops.fade_votes(lifting, 0.5, impl=impl).sum().backward()
    assert lifting.grad.tolist() == [[[1 + 0.5 + 0.25, 0.0, 0.0, 1.0]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_gathered_tokens_equal_the_reference(dtype):
    source = torch.Generator().manual_seed(0)
    cases = itertools.product((1, 3), (1, 2, 6), (0, 1, 77), (1, 20), (0, 3))
    for batch, heads, tokens, dim, fillers in cases:
        states = torch.randn(batch, 2, tokens, dim, generator=source).mul_(50).to(dtype)
        order = torch.rand(batch, heads, tokens, generator=source).argsort(dim=-1)
        kept = order[..., : (tokens + 1) // 2].sort(dim=-1).values
        kept[-1, :, :fillers] = -1
        got = blocked.gather_tokens(states, kept)
        assert got.is_contiguous()
        assert torch.equal(got, reference.gather_tokens(states, kept))
        if tokens:  # states that are no one block
            got = blocked.gather_tokens(torch.cat([states, states], dim=2)[:, :, :tokens], kept)
            assert got.is_contiguous()
            assert torch.equal(got, reference.gather_tokens(states, kept))


def test_gathered_tokens_are_a_copy_and_have_gradients():
    states = torch.randn(1, 2, 4, 3, requires_grad=True)
    gathered = ops.gather_tokens(states, torch.tensor([[[0, 3]]]))
    gathered.sum().backward()
    assert states.grad.sum(dim=-1).tolist() == [[[3, 0, 0, 3], [3, 0, 0, 3]]]
    states.detach().zero_()
    assert gathered.abs().min() > 0
