"""A tail with a fixed address holds the same tokens as a growing tail."""

import torch

from snapkv.storage.lent_tail import LentTail, UsedSlots
from snapkv.storage.tail import Tail


def used(slots):
    return UsedSlots(slots, torch.device("cpu"))


def test_lent_tail_equals_a_growing_tail_and_keeps_its_memory_address():
    keys, values, count = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 6), used(8)
    grown, lent = Tail(keys, values), LentTail(keys, values, count)
    places = lent.keys.data_ptr(), lent.values.data_ptr(), count.on_device.data_ptr()
    for tokens, rejected in ((1, 0), (4, 3), (4, 0), (2, 1), (1, 0)):
        new = torch.randn(2, 3, tokens, 4), torch.randn(2, 3, tokens, 6)
        assert lent.columns(tokens) == 13
        with count.counting(tokens):
            assert all(len(part[0, 0]) == 13 for part in lent.append(*new))
            assert all(map(torch.equal, lent.written, grown.append(*new)))
        lent.count = None
        assert all(map(torch.equal, lent.written, grown.written))
        if rejected:
            grown.truncate(rejected)
            count.remove(rejected)
            lent.clear(rejected)
        assert all(map(torch.equal, lent.written, grown.written))
    assert (lent.keys.data_ptr(), lent.values.data_ptr(), count.on_device.data_ptr()) == places


def test_unwritten_slots_of_a_lent_tail_are_zero():
    """An attention weight of 0 would not hide a NaN."""
    keys, count = torch.full((1, 1, 2, 4), torch.nan), used(3)
    lent = LentTail(keys, keys, count)
    with count.counting(2):
        lent.append(keys, keys)
    lent.count = None
    count.remove(1)
    lent.clear(1)
    assert not lent.keys[:, :, 3:].any()
    assert not lent.values[:, :, 3:].any()
