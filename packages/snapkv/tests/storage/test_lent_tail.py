"""A tail with a fixed address holds the same tokens as a growing tail."""

import torch

from snapkv.storage.lent_tail import LentTail
from snapkv.storage.tail import Tail


def test_lent_tail_equals_a_growing_tail_and_keeps_its_memory_address():
    keys, values = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 6)
    grown, lent = Tail(keys, values), LentTail(keys, values, 8)
    places = lent.keys.data_ptr(), lent.values.data_ptr(), lent.count.data_ptr()
    for tokens in (1, 4, 3):
        new = torch.randn(2, 3, tokens, 4), torch.randn(2, 3, tokens, 6)
        assert lent.columns(tokens) == 13
        assert all(len(part[0, 0]) == 13 for part in lent.append(*new))
        assert all(map(torch.equal, lent.written, grown.append(*new)))
    assert (lent.keys.data_ptr(), lent.values.data_ptr(), lent.count.data_ptr()) == places


def test_unwritten_slots_of_a_lent_tail_are_zero():
    """An attention weight of 0 would not hide a NaN."""
    keys = torch.full((1, 1, 2, 4), torch.nan)
    lent = LentTail(keys, keys, 3)
    assert not lent.keys[:, :, 2:].any()
    assert not lent.values[:, :, 2:].any()
