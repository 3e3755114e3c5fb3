"""What reading under a cap loses: measured on rows, and how the measuring works."""

import pytest
import torch

from snapkv import SnapKV
from snapkv_lab.experiments import chunked
from tests.families import tiny_model


def test_shared_positions_by_hand():
    """Two heads of one layer, the last position left out: one of two and two of two shared."""
    one = [torch.tensor([[[1, 4, 9], [2, 3, 9]]])]
    other = [torch.tensor([[[1, 5, 9], [2, 3, 9]]])]
    assert chunked.shared_positions(one, other, 1) == 0.75


def test_a_cap_that_never_drops_loses_nothing(monkeypatch, random_document):
    monkeypatch.setattr(chunked, "POLICY", SnapKV(40, window_size=8))
    model = tiny_model("llama")
    exact, wide, tight = chunked.measure(
        model, [random_document], caps=(None, 150, 48), chunk_tokens=30
    )
    assert exact["kept_as_exact"] == wide["kept_as_exact"] == 1
    assert wide["answer_nll"] == pytest.approx(exact["answer_nll"], abs=1e-3)
    assert tight["kept_as_exact"] < 1
    assert tight["answer_nll"] != exact["answer_nll"]
