"""Figures of `snapkv bench`: a curve per cache, a panel per batch, nothing silently left out."""

import pytest

from snapkv import InvalidArgumentError
from snapkv_lab.report.figures import draw_bench as draw


def cell(bench, cache, length, batch=1, **values):
    status = "ok" if values else "out of memory"
    return {"bench": bench, "cache": cache, "length": length, "batch": batch, "status": status} | (
        values
    )


def times(value):
    return {"p20": value - 1, "p50": value, "p80": value + 1}


DECODE = [
    cell("decode", "transformers", 1024, ms_per_token=times(20)),
    cell("decode", "transformers", 4096),
    cell("decode", "snapkv@512", 4096, ms_per_token=times(10)),
    cell("decode", "snapkv@512", 1024, ms_per_token=times(9)),
    cell("decode", "snapkv@512", 1024, batch=8, ms_per_token=times(30)),
]


def test_curves_are_medians_over_ascending_lengths_and_missing_cells_are_marked():
    one, eight = draw(DECODE).axes
    assert (one.get_title(), eight.get_title()) == ("batch 1", "batch 8")
    drawn = {line.get_label(): line.get_xydata().tolist() for line in one.lines}
    assert drawn == {"transformers": [[1024, 20]], "snapkv@512": [[1024, 9], [4096, 10]]}
    assert [(text.get_text(), text.get_position()[0]) for text in one.texts] == [("OOM", 4096)]
    assert [label.get_text() for label in one.get_xticklabels()] == ["1k", "4k"]


def test_memory_shows_the_peak_and_what_is_held_in_one_colour():
    rows = [cell("memory", "snapkv", 1024, peak_growth_bytes=2**31, held_bytes=2**29)]
    peak, held = draw(rows).axes[0].lines
    assert (peak.get_ydata()[0], held.get_ydata()[0]) == (2, 0.5)
    assert (peak.get_color(), held.get_linestyle()) == (held.get_color(), ":")


def test_nothing_to_draw_is_said():
    with pytest.raises(InvalidArgumentError, match="plot: expected rows to draw"):
        draw([])
