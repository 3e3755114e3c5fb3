"""The data of the page: counts and voters by worked examples, in bounded size."""

import base64
import functools
from dataclasses import replace

import pytest
import torch

from snapkv import SnapKV, ops
from snapkv.page import Page, Shown, Stop, packing
from snapkv.page.packing import Ballot, packed_counts
from snapkv_app.inspector.ballots import layer_votes
from tests.ops.states import random_layer

TOKENS, QUERY_HEADS = 40, 4


def numbers(text, dtype):
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype).tolist()


layer = functools.partial(random_layer, 0, prompt_tokens=TOKENS, query_tokens=TOKENS)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("pooling", [{"kernel_size": 1}, {"pooling": "avg"}], ids=str)
@pytest.mark.parametrize("voters", [2, 4, 7])
def test_votes_of_all_voters_add_up_to_the_scores(voters, pooling, sinks):
    """Pooling is linear here."""
    states = layer(with_sinks=sinks)
    policy = SnapKV(16, window_size=4, voters=voters, group_reduce="sum", **pooling)
    votes = layer_votes(policy, states)
    assert votes.shape == (voters, TOKENS)
    assert votes.dtype == torch.float32
    assert not votes[:, -4:].any(), "the window is kept anyway"
    shown = replace(states, queries=states.queries[:, :, -voters:])
    torch.testing.assert_close(votes[:, :-4].sum(0), policy.score(shown)[0].sum(0))


@pytest.mark.parametrize(
    ("pooling", "reach"),
    [
        ({"kernel_size": 3}, {-1: 1.0, 0: 1.0, 1: 1.0}),
        ({"pooling": "fading", "decay": 0.5, "sink_tokens": 0}, {n: 0.5**n for n in range(40)}),
    ],
    ids=str,
)
def test_votes_of_one_voter_are_its_pooled_attention(pooling, reach):
    states = layer()
    votes = layer_votes(SnapKV(16, window_size=2, **pooling), states)
    weights = ops.attention_weights(replace(states, queries=states.queries[:, :, -2:]))
    expected = torch.zeros(2, TOKENS)
    for head in range(QUERY_HEADS):
        for at in range(TOKENS - 2):
            near = [(at - n, lift) for n, lift in reach.items() if 0 <= at - n < TOKENS - 2]
            expected[:, at] += torch.stack(
                [weights[0, head, :, one] * lift for one, lift in near]
            ).amax(0)
    torch.testing.assert_close(votes, expected)


def test_prompt_within_the_window_has_no_votes():
    assert not layer_votes(SnapKV(64, window_size=48), layer()).any()


def test_every_token_names_its_top_voters_and_their_shares():
    votes = torch.zeros(4, 8)
    votes[:, 0] = torch.tensor([1.0, 4.0, 3.0, 2.0])
    votes[2, 5] = 7.0
    data = Ballot(votes=votes, sink_tokens=1, window_tokens=2).data()
    assert (data["first"], data["named"], data["bin_tokens"]) == (4, 3, 1)
    who = numbers(data["who"], torch.int32)
    parts = numbers(data["parts"], torch.uint8)
    assert who[:3] == [5, 6, 7]
    assert parts[:3] == [102, 76, 51]  # of 255: 4, 3 and 2 of 10; the even one of 76.5
    assert (who[15], parts[15:18]) == (6, [255, 0, 0])
    assert sum(parts[3:15]) == 0, "places without votes name nobody"


def test_map_opens_at_the_strongest_vote_away_from_the_ends():
    votes = torch.zeros(2, 12)
    votes[0, 1] = votes[0, 8] = 9.0
    votes[0, 3] = votes[1, 3] = 2.0
    votes[1, 6] = 3.0
    assert Ballot(votes=votes, sink_tokens=1, window_tokens=1).strongest == 6
    assert Ballot(votes=votes[:, :6], sink_tokens=0, window_tokens=1).strongest == 0


def test_long_text_shares_bins_so_that_maps_stay_small(monkeypatch):
    """Neighbours share the highest count, and the sum of their votes."""
    monkeypatch.setattr(packing, "MOST_VOTED", 2)
    votes = torch.tensor([[1.0, 0.0, 0.0], [0.0, 3.0, 4.0]])
    data = Ballot(votes=votes, sink_tokens=0, window_tokens=0).data()
    assert data["bin_tokens"] == 2
    assert numbers(data["who"], torch.int32) == [2, 1, 2, 1]
    assert numbers(data["parts"], torch.uint8) == [191, 64, 255, 0]
    assert numbers(packed_counts(torch.tensor([1, 700, 3]), 2), torch.uint16) == [700, 3]


def test_all_maps_of_a_page_share_one_limit(monkeypatch):
    monkeypatch.setattr("snapkv.page.MOST_COUNTS", 10)
    stop = Stop(label="", sentences=("", ""), counts=torch.arange(8), heads=9)
    data = Page("", "", ["a"] * 8, [Shown(label="", stops=[stop] * 3, unvoted="")]).data()
    assert data["bin_tokens"] == 3
    maps = [each["counts"] for each in data["methods"][0]["stops"]]
    assert [numbers(each, torch.uint16) for each in maps] == [[2, 5, 7]] * 3
