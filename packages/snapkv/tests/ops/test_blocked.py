"""Votes block by block equal the reference, and hold no more than a block of scores."""

import pytest
import torch

from snapkv import InvalidArgumentError, ops
from snapkv.ops import ScoreOptions
from snapkv.ops.votes import api, blocked, by_head, reference
from tests.ops.vote_cases import require_votes

SHAPES = [  # B, Hq, Hkv, W, T, D
    pytest.param(2, 4, 2, 8, 63, 16, id="gqa-63"),
    pytest.param(1, 3, 3, 16, 100, 60, id="mha-d60"),
    pytest.param(2, 8, 1, 5, 129, 32, id="mqa-129"),
    pytest.param(1, 2, 2, 8, 8, 16, id="no prefix"),
    pytest.param(1, 2, 1, 1, 40, 64, id="window 1"),
]


def states(B, Hq, Hkv, W, T, D, dtype=torch.float32):
    generator = torch.Generator().manual_seed(T)
    queries = torch.randn(B, Hq, W, D, generator=generator).mul_(2).to(dtype)
    return queries, torch.randn(B, Hkv, T, D, generator=generator).to(dtype)


@pytest.mark.parametrize(("B", "Hq", "Hkv", "W", "T", "D"), SHAPES)
@pytest.mark.parametrize("block_tokens", [1, 7, 64, 1000])
@pytest.mark.parametrize("extras", ["", "softcap", "sinks", "pads", "all"])
def test_blocked_votes_equal_the_reference(B, Hq, Hkv, W, T, D, block_tokens, extras):
    queries, keys = states(B, Hq, Hkv, W, T, D)
    scores = {"scaling": D**-0.5}
    if extras in ("softcap", "all"):
        scores["softcap"] = 5.0
    if extras in ("sinks", "all"):
        scores["sink_logits"] = torch.linspace(-1, 2, Hq)
    options = {"score_options": ScoreOptions(**scores)}
    if extras in ("pads", "all"):
        options["pad_tokens"] = torch.arange(B) * (T - 3)  # the second row is nearly all pads
    expected = reference.window_votes(queries, keys, **options)
    votes = blocked.window_votes(queries, keys, block_tokens=block_tokens, **options)
    assert votes.dtype == torch.float32
    torch.testing.assert_close(votes, expected, atol=1e-6 * W, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_low_precision_states_are_scored_in_float32(dtype):
    queries, keys = states(1, 4, 2, 8, 90, 32, dtype)
    votes = blocked.window_votes(queries, keys, ScoreOptions(scaling=0.2), block_tokens=16)
    expected = reference.window_votes(queries.double(), keys.double(), ScoreOptions(scaling=0.2))
    torch.testing.assert_close(votes, expected.float(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "at_once"), [(torch.bfloat16, 1), (torch.bfloat16, 1 << 30), (torch.float16, 1 << 14)]
)
def test_votes_by_head_err_no_more_than_the_reference(monkeypatch, dtype, at_once):
    monkeypatch.setattr(by_head, "MOST_BYTES", at_once)
    shapes = ("gqa-63", "mha-d80", "mqa-d96", "window 1", "no prefix", "one of prefix")
    require_votes("by_head", dtype, shapes=shapes)
    require_votes("by_head", dtype, shapes=("several splits",), reduces=("mean",))


def test_heads_with_too_many_scores_vote_block_by_block(monkeypatch):
    queries, keys = states(1, 4, 2, 8, 90, 32, torch.bfloat16)
    expected = by_head.window_votes(queries, keys, ScoreOptions(scaling=0.2))
    monkeypatch.setattr(by_head, "MOST_BYTES_OF_A_HEAD", 4 * 2 * 8 * 90 - 1)
    votes = by_head.window_votes(queries, keys, ScoreOptions(scaling=0.2))
    assert torch.equal(votes, blocked.window_votes(queries, keys, ScoreOptions(scaling=0.2)))
    torch.testing.assert_close(votes, expected, atol=1e-6, rtol=1e-5)


def test_memory_is_bounded_by_the_block(monkeypatch):
    queries, keys = states(1, 8, 2, 32, 4096, 64, torch.bfloat16)

    def peak(vote, **options):
        with torch.profiler.profile(profile_memory=True) as profile:
            vote(queries, keys, ScoreOptions(scaling=0.1), **options)
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


def test_the_implementation_goes_by_name(monkeypatch):
    queries, keys = states(1, 2, 1, 4, 50, 16)
    ran = []
    modules = {"reference": reference, "blocked": blocked, "by_head": by_head}
    for name, module in modules.items():
        vote = module.window_votes
        monkeypatch.setitem(
            api._IN_TORCH["window_votes"],
            name,
            lambda *a, n=name, v=vote, **o: ran.append(n) or v(*a, **o),
        )
    for impl in ("auto", *modules):
        ops.window_votes(queries, keys, ScoreOptions(scaling=0.2), impl=impl)
    assert ran == ["blocked", *modules]
    with pytest.raises(InvalidArgumentError, match="impl: expected auto or one of"):
        ops.window_votes(queries, keys, ScoreOptions(scaling=0.2), impl="cuda")
