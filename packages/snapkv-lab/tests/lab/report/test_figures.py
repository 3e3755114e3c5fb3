"""Figures show what the rows contain."""

import math
import xml.etree.ElementTree as ElementTree

import pytest

from snapkv_lab import drawing
from snapkv_lab.report import figures
from tests.lab.evaluate.tiny import Keys
from tests.lab.report.runs import answered, grid, results, sets

matplotlib = pytest.importorskip("matplotlib")


def panels(figure):
    return [axes for axes in figure.axes if axes.get_title()]


def ticks(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def texts(axes):
    return [text.get_text().replace("\n", " ") for text in axes.texts]


def test_every_method_has_a_heat_map_on_one_fixed_scale():
    figure = figures.draw(grid())["scores"]
    assert [panel.get_title() for panel in panels(figure)] == [
        "full\nmean 12.5 (0.0 to 25.0)", "snapkv@512\nmean 37.5 (29.2 to 45.8)",
        "snapkv@1024\nmean 62.5 (54.2 to 70.8)",
    ]  # fmt: skip
    for panel in panels(figure):
        (image,) = panel.images
        assert (image.norm.vmin, image.norm.vmax) == (0, 1)
        assert (panel.get_xlabel(), panel.get_ylabel()) == ("length (tokens)", "depth (percent)")
        assert ticks(panel.xaxis) == ["1k", "4k", "16k"]
        assert ticks(panel.yaxis) == ["0", "50", "100"]
        top, bottom = panel.get_ylim()[::-1]
        assert top < bottom  # depth 0 is above
    shown = panels(figure)[1].images[0].get_array().filled(math.nan).tolist()
    assert [line[:2] for line in shown] == [[0.25, 0.25], [0.375, 0.375], [0.5, 0.5]]
    assert all(math.isnan(line[2]) for line in shown)


def test_cells_without_an_answer_are_hatched_and_say_why():
    full, snapkv, _ = panels(figures.draw(grid())["scores"])
    assert len(full.patches) == 6
    assert all(patch.get_hatch() for patch in full.patches)
    assert sorted(texts(full)) == sorted(["0", "12", "25", *["OOM"] * 3, *["too long"] * 3])
    assert len(snapkv.patches) == 3
    assert texts(snapkv).count("too long") == 3


def test_the_models_positions_end_at_a_dashed_line():
    def lines(run):
        return [
            [(line.get_xdata()[0], line.get_linestyle()) for line in panel.lines]
            for panel in panels(figures.draw(run)["scores"])
        ]

    assert lines(grid()) == [[(1.5, "--")]] * 3  # between 4k and 16k
    assert lines(grid(lengths=(1024, 4096))) == [[], [], []]
    unlimited = grid()
    unlimited.run["model"] = {**unlimited.run["model"], "max_tokens": None}
    assert lines(unlimited) == [[], [], []]


def test_named_columns_are_groups_of_bars_and_a_mean():
    (axes,) = figures.draw(sets())["scores"].axes
    assert ticks(axes.xaxis) == ["qa", "code", "news", "mean"]
    bars = {
        container.get_label(): [bar.get_height() for bar in container]
        for container in axes.containers
    }
    assert bars == {
        "full": [50, 75, 0, 62.5],
        "snapkv@512": [50, 25, 12.5, pytest.approx(87.5 / 3)],
    }
    assert texts(axes) == ["OOM"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["full", "snapkv@512"]


def test_several_budgets_are_drawn_as_a_curve_and_other_methods_as_lines():
    made = figures.draw(grid(methods=("full", "snapkv@512", "snapkv@1024", "h2o@512")))
    (axes,) = made["budgets"].axes
    curve, *across = axes.lines
    assert curve.get_label() == "snapkv"
    assert list(curve.get_xdata()) == [512, 1024]
    assert list(curve.get_ydata()) == [37.5, 62.5]
    assert {line.get_label(): line.get_ydata()[0] for line in across} == {
        "full": 12.5, "h2o@512": 87.5,
    }  # fmt: skip
    assert ticks(axes.xaxis) == ["512", "1k"]
    assert axes.get_xscale() == "log"


def shaded(axes):
    """Return the lowest and the highest point of each shaded band of a panel."""
    return [
        tuple(round(end, 6) for end in (points[:, 1].min(), points[:, 1].max()))
        for band in axes.collections
        for points in (path.vertices for path in band.get_paths())
    ]


def test_intervals_are_lines_on_bars_and_bands_around_curves():
    cells = [{"set": name} for name in ("qa", "code")]
    bars = [answered("full", cells[0], (0.0, 1.0)), answered("full", cells[1], (1.0,))]
    (axes,) = figures.draw(results(sets().task, bars))["scores"].axes
    (lines,) = axes.collections
    assert [segment.tolist() for segment in lines.get_segments()] == [[[0, 0], [0, 100]]]
    curve = [
        answered("full", {"sentences": n}, scores) for n, scores in ((16, (0, 0)), (8, (0, 1)))
    ]
    (axes,) = figures.draw(results(Keys(), curve))["scores"].axes
    assert ticks(axes.xaxis) == ["8", "16"]
    (line,) = axes.lines
    assert list(line.get_ydata()) == [50, 0]
    assert shaded(axes) == [(0, 100)]


@pytest.mark.parametrize("suffix", drawing.FORMATS)
def test_the_same_rows_give_the_same_file(suffix):
    first, again = (drawing.encode_figure(figures.draw(grid())["scores"], suffix) for _ in range(2))
    assert first == again


def test_dollar_signs_in_names_start_no_formula():
    run = grid(methods=("$\\frac{1}$", "a_b^c"))
    run.run["model"] = {**run.run["model"], "name": "<b>$x$ & \\alpha</b>"}
    for figure in figures.draw(run).values():
        ElementTree.fromstring(drawing.encode_figure(figure, ".svg"))


# Benches: a curve per cache, a panel per batch.


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
    one, eight = figures.draw_bench(DECODE).axes
    assert (one.get_title(), eight.get_title()) == ("batch 1", "batch 8")
    drawn = {line.get_label(): line.get_xydata().tolist() for line in one.lines}
    assert drawn == {"transformers": [[1024, 20]], "snapkv@512": [[1024, 9], [4096, 10]]}
    assert [(text.get_text(), text.get_position()[0]) for text in one.texts] == [("OOM", 4096)]
    assert [label.get_text() for label in one.get_xticklabels()] == ["1k", "4k"]


def test_memory_figure_has_peak_and_held_bytes_in_one_colour():
    rows = [cell("memory", "snapkv", 1024, peak_growth_bytes=2**31, held_bytes=2**29)]
    peak, held = figures.draw_bench(rows).axes[0].lines
    assert (peak.get_ydata()[0], held.get_ydata()[0]) == (2, 0.5)
    assert (peak.get_color(), held.get_linestyle()) == (held.get_color(), ":")
