"""What appending in place gains: how it is measured, and what the committed rows say."""

from benchmarks import appending
from benchmarks.records import read_rows

from tests.families import tiny_model


def test_a_token_takes_less_time_everywhere_and_more_so_in_batches():
    ratios = {
        (row["batch"], row["stored_tokens"]): row["ratio"]["p50"]
        for row in read_rows(appending.ROWS)
    }
    assert set(ratios) == set(appending.CELLS)
    assert 0.865 < min(ratios.values()) == ratios[8, 1024] < 0.875
    assert 0.975 < max(ratios.values()) < 0.985
    assert ratios[8, 1024] < ratios[4, 1024] < ratios[1, 1024]


def test_there_is_a_row_for_every_cell():
    cells = ((1, 40), (2, 80))
    rows = list(appending.measure(tiny_model("llama"), cells=cells, prompt_tokens=120, tokens=3))
    assert [(row["batch"], row["stored_tokens"]) for row in rows] == list(cells)
    assert all(row["ms"]["p50"] > 0 and row["copying_ms"]["p50"] > 0 for row in rows)
