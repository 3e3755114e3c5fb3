"""Bits and levels, by hand."""

import base64

import pytest
import torch

from snapkv.inspector.packing import is_logarithmic, levels, packed_bits, packed_scores


def raw(text):
    return list(base64.b64decode(text))


def test_the_first_position_is_the_lowest_bit_and_heads_begin_on_bytes():
    kept = torch.tensor([[1, 0, 0, 1, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0, 1, 0]]).bool()
    assert raw(packed_bits(kept)) == [0b1001, 1, 0b10000000, 0]


def test_levels_are_powers_of_ten_below_the_highest():
    scores = torch.tensor([[1.0, 0.1, 1e-3, 1e-6, 1e-9, 0.0]])
    expected = [255, 255 * 5 / 6, 127.5, 0, 0, 0]
    assert levels(scores, scores)[0].tolist() == pytest.approx(expected, abs=0.01)


def test_levels_are_even_where_a_score_is_negative():
    scores = torch.tensor([[-1.0, 0.0, 1.0]])
    assert not is_logarithmic(scores)
    assert levels(scores, scores)[0].tolist() == pytest.approx([0, 127.5, 255])


def test_a_bin_shows_its_highest_score_and_each_head_its_own_scale():
    scores = torch.tensor([[0.1, 1.0, 0.01, 0.001, 1.0], [0.0, 0.0, 5.0, 0.0, 0.5]])
    assert raw(packed_scores(scores, 2)) == [255, round(255 * 4 / 6), 255, 0, 255, 212]


def test_a_head_without_any_vote_is_empty():
    assert raw(packed_scores(torch.zeros(1, 3), 1)) == [0, 0, 0]
