"""Budgets that are chosen from the votes, and the report of the lost votes."""

import pytest
import torch

from snapkv import AutoBudget, CompressedCache, Document, FullCache, KeyDiff, SnapKV, default_policy
from snapkv.policies.prefix import Prefix
from snapkv.policies.states import LostVotes
from tests.families import random_ids, read, tiny_model
from tests.ops.states import random_layer
from tests.pairs import pairs

SHARES = torch.tensor(
    [[[0.0, 0.30, 0.10, 0.002, 0.001, 0.05], [0.40, 0.0, 0.0, 0.001, 0.2, 0.0021]]]
)


def test_required_positions_are_counted_for_each_head():
    assert AutoBudget(lost_vote=0.002).count_required(SHARES).tolist() == [[3, 3]]
    assert AutoBudget(lost_vote=0.06).count_required(SHARES).tolist() == [[2, 2]]
    assert AutoBudget(lost_vote=0.3).count_required(SHARES).tolist() == [[0, 1]]


def test_bound_on_lost_votes_falls_for_rows_longer_than_1024_tokens():
    shares = torch.tensor([0.004, 0.0015, 0.0006]).repeat(2, 1, 2048)[..., :4096]
    shares[1, 0, : 4096 - 1500] = -torch.inf  # pads
    shares[1, 0, -476:] = 0.0
    of_each = [(row > -torch.inf).sum().item() for row in shares]
    assert of_each == [4096, 1500]
    long, short = AutoBudget(lost_vote=0.002).count_required(shares)[:, 0].tolist()
    assert long == (shares[0, 0] > 0.0005).sum()
    assert short == (shares[1, 0] > 0.002 * 1024 / 1500).sum()
    assert (
        AutoBudget(lost_vote=0.002).count_required(shares[:1, :, :1024]).item()
        == (shares[0, 0, :1024] > 0.002).sum()
    )


@pytest.mark.parametrize(
    ("voted", "expected"), [(0, 4), (4, 4), (7, 7), (12, 12), (50, 12)], ids=str
)
def test_auto_budget_stays_between_its_least_and_most(voted, expected):
    budget = AutoBudget(least=4, most=20)
    layer = random_layer(0, prompt_tokens=108, query_tokens=8)
    votes = torch.zeros(1, 2, 100).index_fill(2, torch.arange(voted), 1.0)
    assert budget.counts(Prefix(layer, 8, 0), lambda _: votes) == [expected]


@pairs(
    group_reduce=["mean", "max", "sum", "none"],
    window_size=[1, 3, 8],
    window_reduce=["mean", "max"],
)
def test_compared_shares_equal_the_attention_of_any_window(
    window_reduce, window_size, group_reduce
):
    """Shares are the mean or the maximum over queries, and are not raised to the head's mean."""
    reduced = {"window_reduce": window_reduce, "group_reduce": group_reduce}
    policy = SnapKV("auto", window_size=window_size, kernel_size=1, **reduced)
    layer = random_layer(0, prompt_tokens=30, query_tokens=window_size)
    keys = layer.keys.repeat_interleave(2, dim=1)
    logits = layer.queries @ keys.mT * layer.score_options.scaling
    hidden = torch.ones(window_size, 30, dtype=torch.bool).triu(31 - window_size)
    weights = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)[..., : 30 - window_size]
    votes = weights.mean(dim=2) if window_reduce == "mean" else weights.amax(dim=2)
    votes = votes.view(1, 2, 2, -1)
    expected = {"max": votes.amax(dim=2), "none": votes.flatten(1, 2)}
    rated = policy.compute_shares(policy.prefix(layer))
    torch.testing.assert_close(rated, expected.get(group_reduce, votes.mean(dim=2)))


def test_lost_votes_equal_a_worked_example():
    votes = torch.tensor([[[4.0, 1.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]]])
    shares = torch.tensor([[[0.4, 0.4, 0.3, 0.3], [0.0, 0.0, 0.0, 0.0]]])
    kept = torch.tensor([[[-1, 0, 2, 4, 5], [0, 1, 2, 4, 5]]])  # 4 and 5 are the window
    lost = LostVotes.of(votes, shares, kept, 6)
    assert lost.mass[0].tolist() == pytest.approx([0.3, 0.0])  # 1 + 2 of 10; none of none
    assert lost.peak[0].tolist() == pytest.approx([0.4, 0.0])


def _prompt(rows=1, tokens=160, pads=0):
    ids = torch.randint(5, 90, (rows, tokens), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :pads] = 0
    return ids, mask


def test_report_has_the_lost_votes():
    model, (ids, _) = tiny_model("llama"), _prompt()
    small, large = (read(model, SnapKV(n, window_size=8), ids).report() for n in (16, 80))
    assert 0 < large["lost_votes"] < small["lost_votes"] < 1
    assert 0 < large["lost_vote_peak"] < small["lost_vote_peak"] < 1
    assert read(model, SnapKV(400), ids).report()["lost_votes"] == 0.0
    assert read(model, FullCache(), ids).report()["lost_votes"] == 0.0
    assert read(model, KeyDiff(40), ids).report()["lost_votes"] is None


def test_cache_and_document_without_a_policy_have_the_default_policy():
    model = tiny_model("llama")
    assert CompressedCache(model).policy == default_policy()
    assert Document(model, random_ids(1, 30))._cache.policy == default_policy()
