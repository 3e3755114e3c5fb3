"""Acceptance of drafts: by hand, against a loop, and over many draws."""

import math

import pytest
import torch

from snapkv_lab.medusa.tree import CandidateTree, accept_greedily, accept_typically

TREE = CandidateTree(((0,), (0, 0), (1,)))  # nodes: root, [0], [1], [0, 0]


def test_greedy_acceptance_returns_the_longest_path_of_the_models_choices():
    tokens = torch.tensor([5, 6, 7, 8])
    assert accept_greedily(TREE.paths, tokens, torch.tensor([6, 8, 0, 0])) == [0, 1, 3]
    assert accept_greedily(TREE.paths, tokens, torch.tensor([6, 9, 0, 0])) == [0, 1]
    assert accept_greedily(TREE.paths, tokens, torch.tensor([7, 8, 0, 0])) == [0, 2]
    assert accept_greedily(TREE.paths, tokens, torch.tensor([9, 8, 0, 0])) == [0]


def test_greedy_acceptance_returns_the_first_of_equal_paths():
    tree = CandidateTree(((0,), (1,)))
    tokens = torch.tensor([5, 6, 6])
    assert accept_greedily(tree.paths, tokens, torch.tensor([6, 0, 0])) == tree.paths[0].tolist()


@pytest.mark.parametrize("pad", [0, 7])
def test_padding_of_short_paths_is_never_accepted(pad):
    """The reference pads with token 0. If the model chooses token 0 after a short leaf, it accepts
    the padding and stores a row too many.
    """
    tokens = torch.tensor([5, 6, 7, pad])
    chosen = torch.tensor([7, 1, pad, pad])
    assert accept_greedily(TREE.paths, tokens, chosen) == [0, 2]
    probabilities = torch.zeros(4, 9)
    probabilities[torch.arange(4), chosen] = 1.0
    assert accept_typically(TREE.paths, tokens, probabilities) == [0, 2]


def test_typical_acceptance_equals_one_by_hand():
    """H = 1.142 nats: 0.3 * exp(-H) = 0.0958, so the bound is 0.09; 0.15 passes, 0.05 does not."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    assert -(p * p.log()).sum() == pytest.approx(1.142, abs=1e-3)
    chain = CandidateTree.chain(1).paths
    for token, accepted in ((0, True), (1, True), (2, True), (3, False)):
        nodes = accept_typically(chain, torch.tensor([0, token]), p.expand(2, 4))
        assert nodes == ([0, 1] if accepted else [0])


def test_typical_acceptance_lowers_its_bound_if_the_model_is_unsure():
    """Uniform over 50: the bound is 0.3 / 50 = 0.006, and 0.02 passes."""
    p = torch.full((2, 50), 0.02)
    chain = CandidateTree.chain(1).paths
    assert 0.3 * math.exp(-math.log(50)) == pytest.approx(0.006)
    assert accept_typically(chain, torch.tensor([0, 7]), p) == [0, 1]
    assert accept_typically(chain, torch.tensor([0, 7]), p, delta=1.1) == [0]


def test_typical_acceptance_returns_the_likeliest_of_equally_long_paths():
    tree = CandidateTree(((0,), (1,)))
    p = torch.tensor([[0.3, 0.5, 0.2]]).expand(3, 3)
    assert accept_typically(tree.paths, torch.tensor([2, 0, 1]), p) == [0, 2]
    assert accept_typically(tree.paths, torch.tensor([2, 1, 0]), p) == [0, 1]
