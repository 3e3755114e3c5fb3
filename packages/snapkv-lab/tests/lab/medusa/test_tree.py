"""Candidate trees: worked examples by hand, and properties of random trees."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snapkv import InvalidArgumentError
from snapkv_lab.medusa import CandidateTree
from snapkv_lab.medusa.tree import HEAD_RANKS, NO_NODE


def test_tree_tensors_equal_those_of_a_worked_example():
    tree = CandidateTree(((0,), (0, 0), (1,)))
    assert tree.choices == ((0,), (1,), (0, 0))
    rows = ["".join(str(int(seen)) for seen in row) for row in tree.visible]
    assert rows == ["1000", "1100", "1010", "1101"]
    assert tree.picks.tolist() == [0, 1, 2, 11]
    assert tree.depths.tolist() == [0, 1, 1, 2]
    assert tree.paths.tolist() == [[0, 1, 3], [0, 2, NO_NODE]]


def test_tensors_of_a_chain_are_those_of_plain_text():
    tree = CandidateTree.chain(3)
    assert tree.is_chain
    assert torch.equal(tree.visible, torch.ones(4, 4, dtype=torch.bool).tril())
    assert tree.picks.tolist() == [0, 1, 11, 21]
    assert tree.paths.tolist() == [[0, 1, 2, 3]]


def test_tree_without_candidates_has_only_the_root():
    tree = CandidateTree(())
    assert (tree.depth, tree.paths.tolist(), tree.visible.tolist()) == (0, [[0]], [[True]])


def test_a_tree_deeper_than_the_heads_is_pruned():
    """The reference reads a rank of a fourth head from the drafts of three heads."""
    deep = CandidateTree.likeliest([(0.5, 0.2)] * 4, 20)
    assert deep.depth == 4
    pruned = deep.pruned(3)
    assert pruned.depth == 3
    assert set(pruned.choices) == {path for path in deep.choices if len(path) <= 3}
    assert int(pruned.picks.max()) < 1 + 3 * HEAD_RANKS


def test_likeliest_tree_has_the_paths_with_the_largest_products():
    """0.6, then 0.6 * 0.5 = 0.3, then 0.2 before 0.6 * 0.1 and 0.2 * 0.5."""
    tree = CandidateTree.likeliest([(0.6, 0.2), (0.5, 0.1)], 3)
    assert tree.choices == ((0,), (1,), (0, 0))


@pytest.mark.parametrize(
    ("choices", "fault"),
    [
        (((0, 0),), "needs the path"),
        (((0,), (0,)), "repeated"),
        (((10,),), "0 to 9"),
        (((-1,),), "0 to 9"),
        (((),), "empty"),
    ],
)
def test_paths_that_form_no_tree_are_refused(choices, fault):
    with pytest.raises(InvalidArgumentError, match=f"choices: .*{fault}"):
        CandidateTree(choices)


@given(
    st.lists(
        st.lists(st.floats(0.01, 0.9), min_size=1, max_size=HEAD_RANKS), min_size=1, max_size=4
    ),
    st.integers(1, 40),
)
def test_every_path_leads_from_the_root_to_a_leaf(accuracies, nodes):
    tree = CandidateTree.likeliest(accuracies, nodes)
    assert torch.equal(tree.visible.sum(-1) - 1, tree.depths)
    assert bool((tree.visible == tree.visible.tril()).all())
    covered = set()
    for row in tree.paths.tolist():
        path = [node for node in row if node != NO_NODE]
        assert row == path + [NO_NODE] * (len(row) - len(path))
        assert [int(tree.depths[node]) for node in path] == list(range(len(path)))
        seen = tree.visible[path[-1]].nonzero().flatten().tolist()
        assert seen == path
        covered |= set(path)
    assert covered == set(range(1 + len(tree.choices)))
