"""Bounds of pages: what no key of a page exceeds, channel by channel."""

import itertools
from dataclasses import replace

import pytest
import torch

from snapkv.cache.paging import PageRecall, PageTable, evicted_columns
from snapkv.ops import page_bounds, page_scores


def plain_bound(query, keys):
    """The sum over the channels of max(q * least, q * highest), one channel after the other."""
    total = 0.0
    for channel, value in enumerate(query.tolist()):
        column = keys[:, channel].tolist()
        total += max(value * min(column), value * max(column))
    return total


def test_a_worked_example():
    """Two channels, two pages of two keys and one of one, a query head of either sign.

    Page 0 holds (1, 4) and (3, -2): least (1, -2), highest (3, 4).
    Page 1 holds (-1, 0) and (0, 5): least (-1, 0), highest (0, 5).
    Page 2 holds (2, 2).
    Query (2, -1): 2 * 3 + -1 * -2 = 8; 2 * 0 + -1 * 0 = 0; 2 * 2 - 2 = 2.
    Query (-1, 1): -1 * 1 + 1 * 4 = 3; -1 * -1 + 1 * 5 = 6; -2 + 2 = 0.
    Together they are the query heads of one group: (5.5, 3, 1).
    """
    keys = torch.tensor([[[[1.0, 4], [3, -2], [-1, 0], [0, 5], [2, 2]]]])
    pages = torch.tensor([[[[0, 1], [2, 3], [4, -1]]]])
    bounds = page_bounds(keys, pages)
    assert bounds.tolist() == [[[[[1, -2], [3, 4]], [[-1, 0], [0, 5]], [[2, 2], [2, 2]]]]]
    one, other = torch.tensor([[[2.0, -1]]]), torch.tensor([[[-1.0, 1]]])
    assert page_scores(one, bounds).tolist() == [[[8, 0, 2]]]
    assert page_scores(other, bounds).tolist() == [[[3, 6, 0]]]
    assert page_scores(torch.cat([one, other], 1), bounds).tolist() == [[[5.5, 3, 1]]]
    table = PageTable(columns=pages, bounds=bounds, chosen_pages=1)
    assert table.choose(torch.cat([one, other], 1)).tolist() == [[[0, 1]]]
    assert replace(table, chosen_pages=2).choose(other).tolist() == [[[0, 1, 2, 3]]]


def test_under_autocast_bounds_are_no_less_exact():
    """1 + 2**-10 is 1 in bfloat16, where both pages would be equal and the first one win."""
    keys = torch.tensor([1.0, 1 + 2**-10]).view(1, 1, 2, 1)
    pages, query = torch.tensor([[[[0], [1]]]]), torch.ones(1, 1, 1)
    bounds = page_bounds(keys, pages)
    table = PageTable(columns=pages, bounds=bounds, chosen_pages=1)
    with torch.autocast("cpu", torch.bfloat16):
        scores = page_scores(query, bounds)
        chosen = table.choose(query)
    assert scores.dtype == torch.float32
    assert scores.tolist() == [[[1, 1 + 2**-10]]]
    assert chosen.tolist() == [[[1]]]


def test_of_equal_bounds_the_earlier_page_wins_and_a_head_without_tokens_chooses_none():
    pages = torch.tensor([[[[4, 5], [6, -1]], [[-1, -1], [-1, -1]]]])
    table = PageTable(columns=pages, bounds=torch.zeros(1, 2, 2, 2, 3), chosen_pages=1)
    chosen = table.choose(torch.ones(1, 2, 3))
    assert chosen.tolist() == [[[4, 5], [-1, -1]]]


CASES = [
    (1, 1, 1, 1, "float32"),
    (3, 2, 2, 3, "float32"),
    (3, 4, 1, 50, "float32"),
    (1, 4, 2, 3, "float32"),
    (3, 2, 1, 7, "bfloat16"),
]


@pytest.mark.parametrize(("batch", "group", "stored", "page_tokens", "dtype"), CASES)
def test_pages_are_what_is_not_kept_and_bound_it(batch, group, stored, page_tokens, dtype):
    """Kept columns at random, pads in front of every row but one, pages of any size."""
    torch.manual_seed(batch * 100 + group * 10 + page_tokens)
    T, D, Hkv = 20, 5, 2
    keys = torch.randn(batch, Hkv, T, D, dtype=getattr(torch, dtype))
    query = torch.randn(batch, Hkv * group, D, dtype=keys.dtype)
    heads = Hkv if stored == 1 else Hkv * group
    kept = torch.rand(batch, heads, T).argsort(-1)[..., :6].sort(-1).values
    kept[:, :, 0] = -1
    pads = torch.arange(batch) * 4
    rule = PageRecall(2, page_tokens=page_tokens)
    table = rule.cut(kept, pads, keys, T)
    chosen = table.choose(query)
    assert table.bounds.dtype == keys.dtype, "no more memory than two keys of a page"
    for row, head in itertools.product(range(batch), range(heads)):
        evicted = [c for c in range(int(pads[row]), T) if c not in kept[row, head].tolist()]
        cut = [evicted[at : at + page_tokens] for at in range(0, len(evicted), page_tokens)]
        found = [[c for c in page if c >= 0] for page in table.columns[row, head].tolist()]
        assert [page for page in found if page] == cut
        members = range(head * Hkv * group // heads, (head + 1) * Hkv * group // heads)
        own = keys[row, head * Hkv // heads].double()
        bounds = []
        for page in cut:
            of_group = [plain_bound(query[row, one].double(), own[page]) for one in members]
            bounds.append(sum(of_group) / len(of_group))
            for one, bound in zip(members, of_group, strict=True):
                assert (own[page] @ query[row, one].double()).max() <= bound + 1e-12
        best = sorted(sorted(range(len(cut)), key=lambda page: -bounds[page])[:2])
        got = [c for c in chosen[row, head].tolist() if c >= 0]
        assert got == [c for page in best for c in cut[page]]


def test_evicted_columns_leave_out_pads_and_what_is_kept():
    kept = torch.tensor([[[-1, 3, 6]], [[0, 5, 6]]])
    columns = evicted_columns(kept, torch.tensor([2, 0]), 7)
    assert columns.tolist() == [[[2, 4, 5, -1]], [[1, 2, 3, 4]]]
    assert evicted_columns(torch.tensor([[[0, 1]]]), None, 2).shape == (1, 1, 0)
