"""The memory of reading a prompt, with weights of any shape and type."""

import copy

import pytest
import torch

from snapkv import SnapKV
from snapkv_lab.measure.contenders import compressed_contender
from snapkv_lab.measure.prefill import PrefillBench
from tests.families import tiny_model


@pytest.mark.parametrize(
    "weight",
    [torch.ones(()), torch.ones(4, 6).T, torch.ones(4).to(torch.float8_e4m3fn)],
    ids=["a number", "transposed", "fp8"],
)
def test_weights_of_any_shape_and_dtype_are_used_before_memory_is_measured(weight):
    model = copy.deepcopy(tiny_model("llama"))  # others use it too
    model.scale = torch.nn.Parameter(weight, requires_grad=False)
    bench = PrefillBench(
        model=model, contenders=[compressed_contender("snapkv", SnapKV(48))], lengths=[96], rounds=2
    )
    (row,) = bench.peaks()
    assert row["status"] == "ok"
    assert row["held_bytes"] >= 48 * 4 * 2 * 2 * 8 * 4
