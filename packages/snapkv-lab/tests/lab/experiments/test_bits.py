"""What few bits keep and cost: how it is measured, and what the committed rows say."""

import pytest

from snapkv_lab.experiments import bits
from tests.families import tiny_model


def test_fewer_bits_hold_fewer_bytes_in_every_row(random_document):
    rows = list(bits.measure(tiny_model("llama"), [random_document], budget=64, tokens=3))
    assert [(row["cache"], row["bits"]) for row in rows] == [
        (name, kind) for name in ("full cache", "SnapKV") for kind in bits.BITS
    ]
    for whole, *few in (rows[:4], rows[4:]):
        assert all(row["held_bytes"] < 0.6 * whole["held_bytes"] for row in few)
        assert whole["against_whole"]["p50"] == 1
        assert few[0]["nll"] == pytest.approx(whole["nll"], abs=0.05)
    assert bits.EXPERIMENT.render(
        [{**row, "model": {"name": "m", "dtype": "d", "attn_implementation": "a", "device": "c"},
          "environment": {"processor": "p", "threads": 1, "torch": "t", "transformers": "t",
                          "commit": "c"}} for row in rows]
    ).count("\n| ") == 10  # fmt: skip
