"""What appending in place gains: how it is measured, and what the committed rows say."""

from snapkv_lab.experiments import appending
from tests.families import tiny_model


def test_there_is_a_row_for_every_cell():
    cells = ((1, 40), (2, 80))
    rows = list(appending.measure(tiny_model("llama"), cells=cells, prompt_tokens=120, tokens=3))
    assert [(row["batch"], row["stored_tokens"]) for row in rows] == list(cells)
    assert all(row["ms"]["p50"] > 0 and row["copying_ms"]["p50"] > 0 for row in rows)
