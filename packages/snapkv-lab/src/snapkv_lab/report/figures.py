"""Figures of runs and benches: heat maps, bars and curves with confidence intervals of the
means.
"""

import re
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from snapkv.errors import wrong
from snapkv_lab import drawing
from snapkv_lab.evaluate.intervals import Interval
from snapkv_lab.evaluate.runner import Results
from snapkv_lab.evaluate.summary import ScoreLine, axis_values, score_lines
from snapkv_lab.report.tables import IN_NATS, IN_PERCENT
from snapkv_lab.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#F0496E", "#EBB839", "#0CD79F")
_MOST_PANELS_IN_A_ROW = 3
_MOST_ANNOTATED = 10
_MOST_TICKS = 12
_MOST_UPRIGHT = 4
_UNITS = {"length": "tokens", "depth": "percent", "position": "percent"}
_MARKERS = "osD^vP*X"
# The colours of Okabe and Ito, which colour-blind readers can also tell apart.
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")


def draw(results: Results) -> dict[str, "Figure"]:
    """Draw the figures of a run, and return them by name.

    "scores" is a heat map per method if the task has two axes; with one axis it shows bars or
    curves. "budgets" is added if a method ran with several budgets, labelled ``NAME@BUDGET``: it
    shows the mean score at each budget, and the other methods as horizontal lines. "loss" is added
    if the loss of the references was measured: it shows the mean loss of every method.
    """
    import matplotlib

    lines = score_lines(results.rows, results.task.axes[0])
    with matplotlib.rc_context(drawing.STYLE):
        many = len(results.task.axes) > 1
        figures = {"scores": _heat_maps(results, lines) if many else _columns(results, lines)}
        if families := _families(lines):
            figures["budgets"] = _budgets(results, lines, families)
        if any(line.loss is not None for line in lines):
            figures["loss"] = _losses(results, lines)
    return figures


def save_figures(figures: dict[str, "Figure"], path: str) -> list[Path]:
    """Write the figures of a run to files.

    Args:
        figures: the figures by name, as `draw` returns them.
        path: the file of the scores. Other figures are written next to it, such as
            ``NAME-budgets.png``.

    Returns:
        The paths of the files, in the order of the figures.

    Raises:
        OutputError: a file cannot be written; those before it are.
    """
    target, written = Path(path), []
    for name, figure in figures.items():
        file = target if name == "scores" else target.with_stem(f"{target.stem}-{name}")
        drawing.save_figure(figure, file)
        written.append(file)
    return written


def _heat_maps(results: Results, lines: Sequence[ScoreLine]) -> "Figure":
    """Draw a heat map for each method and each question.

    The first axis runs right, and the second runs down.
    """
    values = [axis_values(results.rows, axis) for axis in results.task.axes[:2]]
    columns, rows = (sorted(each) if _is_numeric(each) else each for each in values)
    across = 2 if len(lines) == 4 else min(len(lines), _MOST_PANELS_IN_A_ROW)
    down = -(-len(lines) // across)
    width, height = (min(max(0.45 * len(cells), 2.4), 6.0) for cells in (columns, rows))
    figure = _figure(results, 1.6 + across * (width + 0.5), 0.6 + down * (height + 0.8))
    panels = drawing.new_panels(figure, down, across, len(lines))
    for panel, line in zip(panels, lines, strict=True):
        _heat_map(panel, results, line, columns, rows)
    if _trained_border(results, columns) is not None:
        positions = format_tokens(results.run["model"]["max_tokens"])
        figure.supxlabel(f"dashed line: the model's {positions} positions end")
    scale = figure.colorbar(panels[0].images[0], ax=figure.axes, shrink=0.8, ticks=[0, 0.5, 1])
    scale.ax.set_yticklabels(["0", "50", "100"])
    scale.set_label(results.task.metric)
    return figure


def _heat_map(
    panel: "Axes", results: Results, line: ScoreLine, columns: list[Any], rows: list[Any]
) -> None:
    """Draw the heat map of a single method into a panel.

    The colours always cover the range from 0 to 1. A hatched cell has no score.

    Args:
        panel: the panel, which is changed.
        results: the results of the run.
        line: the method and the question.
        columns: the values of the first axis, from left to right.
        rows: the values of the second axis, from the top.
    """
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    x_axis, y_axis = results.task.axes[:2]
    rows_at: dict[tuple[Any, Any], list[Row]] = {}
    for row in results.rows:
        if (row["method"], row["question"]) == (line.method, line.question):
            place = (columns.index(row["cell"][x_axis]), rows.index(row["cell"][y_axis]))
            rows_at.setdefault(place, []).append(row)
    grid = [[float("nan")] * len(columns) for _ in rows]
    for (x, y), cell in rows_at.items():
        scores = [row["score"] for row in cell if row["score"] is not None]
        if scores:
            grid[y][x] = fmean(scores)
        else:
            style: dict[str, Any] = {"facecolor": "#eeeeee", "edgecolor": "#999999", "lw": 0}
            panel.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, hatch="///", **style))
        if max(len(columns), len(rows)) <= _MOST_ANNOTATED:
            reason = cell[0]["status"].replace("out of memory", "OOM").replace(" ", "\n")
            text = f"{100 * fmean(scores):.0f}" if scores else reason
            panel.text(x, y, text, ha="center", va="center", fontsize=7)
    colours = LinearSegmentedColormap.from_list("score", _COLOURS)
    panel.imshow(grid, cmap=colours, vmin=0, vmax=1, aspect="auto")
    sure = "" if line.interval is None else f" ({IN_PERCENT.interval(line.interval)})"
    panel.set_title(f"{_name(line)}\nmean {IN_PERCENT.text(line.mean)}{sure}")
    _label_axis(panel.xaxis, x_axis, columns)
    _label_axis(panel.yaxis, y_axis, rows)
    border = _trained_border(results, columns)
    if border is not None:
        panel.axvline(border, color="black", linestyle="--", linewidth=1.2)


def _trained_border(results: Results, columns: list[Any]) -> float | None:
    """Return the place on the horizontal axis of a heat map between lengths that the model supports
    and longer ones.

    Args:
        results: the results of the run.
        columns: the values of the first axis in ascending order.

    Returns:
        The place, in columns from 0. None if no length exceeds the model's positions, or if all of
        them do; and if the first axis of the task is not the length, or the model has no limit.
    """
    positions = results.run["model"]["max_tokens"]
    if results.task.axes[0] != "length" or positions is None or not _is_numeric(columns):
        return None
    inside = sum(length <= positions for length in columns)
    return inside - 0.5 if 0 < inside < len(columns) else None


def _columns(results: Results, lines: Sequence[ScoreLine]) -> "Figure":
    """Draw the scores of all methods in one panel: as curves if the first axis has numbers,
    otherwise as groups of bars with a group for the mean.
    """
    axis = results.task.axes[0]
    columns = axis_values(results.rows, axis)
    if _is_numeric(columns):
        columns = sorted(columns)
        figure = _figure(results, max(5.0, 0.6 * len(columns) + 2), 4.0)
        panel = figure.subplots()
        for index, line in enumerate(lines):
            scores = [line.scores.get(column, float("nan")) for column in columns]
            intervals = [line.intervals.get(column) for column in columns]
            draw_curve(panel, range(len(columns)), scores, intervals, index, _name(line))
        _label_axis(panel.xaxis, axis, columns)
    else:
        figure = _figure(results, max(5.0, 0.16 * len(lines) * (len(columns) + 1) + 2), 4.0)
        panel = figure.subplots()
        for index, line in enumerate(lines):
            _bars(panel, line, columns, index, len(lines))
        _label_axis(panel.xaxis, axis, [*columns, "mean"])
        if len(columns) > _MOST_UPRIGHT:
            for label in panel.get_xticklabels():
                label.set(rotation=35, ha="right", rotation_mode="anchor")
    _finish(panel, results, legend=len(lines))
    return figure


def _bars(panel: "Axes", line: ScoreLine, columns: list[Any], index: int, count: int) -> None:
    """Draw a method's bars into the groups of all columns and of the mean.

    Args:
        panel: the panel, which is changed.
        line: the scores of the method; the reason for a missing one stands in the place of its bar.
        columns: the columns.
        index: the place of the method's bar in each group.
        count: the number of bars in each group.
    """
    width = 0.8 / count
    places = [group + (index - (count - 1) / 2) * width for group in range(len(columns) + 1)]
    scores = [*(line.scores.get(column) for column in columns), line.mean]
    heights = [100 * (score or 0.0) for score in scores]
    panel.bar(places, heights, width, color=line_style(index)["color"], label=_name(line))
    intervals = [*(line.intervals.get(column) for column in columns), line.interval]
    with_interval = [(place, ends) for place, ends in zip(places, intervals, strict=True) if ends]
    lows, highs = ([100 * ends[side] for _, ends in with_interval] for side in (0, 1))
    panel.vlines([place for place, _ in with_interval], lows, highs, color="black", linewidth=0.8)
    for place, column, score in zip(places, columns, scores, strict=False):
        if score is None and column in line.reasons:
            text = line.reasons[column].replace("out of memory", "OOM")
            panel.text(place, 1, text, rotation=90, ha="center", va="bottom", fontsize=7)


def _families(lines: Sequence[ScoreLine]) -> dict[str, dict[int, ScoreLine]]:
    """Group the lines of methods that were run with several budgets, by their labels
    ``NAME@BUDGET``. Lines without scores, and methods with a single budget, are left out.

    Returns:
        The lines by budget, for the name of each method in the legend.
    """
    families: dict[str, dict[int, ScoreLine]] = {}
    for line in lines:
        labelled = re.fullmatch(r"(.+)@(\d+)", line.method)
        if labelled and line.scores:
            name = _name(line, method=labelled[1])
            families.setdefault(name, {})[int(labelled[2])] = line
    return {name: by_budget for name, by_budget in families.items() if len(by_budget) > 1}


def _budgets(
    results: Results, lines: Sequence[ScoreLine], families: dict[str, dict[int, ScoreLine]]
) -> "Figure":
    """Draw the mean score of each method as a function of the budget.

    Args:
        results: the results of the run.
        lines: the lines of all methods. Those that are not in `families` are drawn as dashed
            horizontal lines.
        families: the lines by budget, by name, as `_families` returns them.
    """
    figure = _figure(results, 6.0, 4.0)
    panel = figure.subplots()
    for index, (name, by_budget) in enumerate(families.items()):
        budgets, own = zip(*sorted(by_budget.items(), key=itemgetter(0)), strict=True)
        means = [line.mean or 0.0 for line in own]
        draw_curve(panel, budgets, means, [line.interval for line in own], index, name)
    swept = [line for by_budget in families.values() for line in by_budget.values()]
    others = [line for line in lines if line not in swept and line.scores]
    for index, line in enumerate(others, len(families)):
        height, colour = 100 * (line.mean or 0.0), line_style(index)["color"]
        panel.axhline(height, color=colour, linestyle="--", label=_name(line))
    _token_axis(panel, {budget for by_budget in families.values() for budget in by_budget})
    panel.set_xlabel("budget (tokens per head and layer)")
    _finish(panel, results, legend=len(families) + len(others))
    return figure


def _losses(results: Results, lines: Sequence[ScoreLine]) -> "Figure":
    """Draw the mean loss of the references for every method and question, with its interval."""
    figure = _figure(results, 6.0, 1.4 + 0.3 * len(lines))
    panel = figure.subplots()
    for place, line in enumerate(lines):
        if line.loss is None:
            continue
        corner, text = (line.loss, place), IN_NATS.text(line.loss)
        panel.plot(*corner, "o", color=_LINES[0])
        if line.loss_interval is not None:
            panel.hlines(place, *line.loss_interval, color=_LINES[0])
        panel.annotate(text, corner, (0, 5), textcoords="offset points", ha="center", fontsize=7)
    panel.set_yticks(range(len(lines)), [_name(line) for line in lines])
    panel.set_ylim(len(lines) - 0.4, -0.6)
    panel.set_xlabel("loss of the reference (mean, nats per token; lower is better)")
    drawing.add_grid(panel, "x")
    return figure


def _figure(results: Results, width: float, height: float) -> "Figure":
    figure = drawing.new_figure(width, height)
    figure.suptitle(f"{results.task.name}, {results.run['model']['name']}")
    return figure


def _finish(panel: "Axes", results: Results, *, legend: int) -> None:
    """Set the range and the label of the score axis, and add a legend with `legend` entries."""
    panel.set_ylim(0, 105)
    panel.set_ylabel(f"{results.task.metric} (mean)")
    drawing.add_grid(panel, "y")
    panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(legend, 3), frameon=False)


def line_style(index: int) -> dict[str, Any]:
    """Return the arguments of matplotlib's `plot` for the curve with the given number.

    Colours and markers repeat after eight curves.
    """
    return {
        "color": _LINES[index % len(_LINES)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "clip_on": False,
    }


def draw_curve(
    panel: "Axes",
    places: Sequence[float],
    scores: Sequence[float],
    intervals: Sequence[Interval | None],
    index: int,
    label: str,
) -> None:
    """Draw the scores into a panel as a curve, with the confidence intervals as a shaded area.

    Scores and intervals are multiplied by 100. A score that is not a number interrupts the curve,
    and an interval that is None interrupts the shading.

    Args:
        panel: the panel, which is changed.
        places: where the scores are on the horizontal axis.
        scores: the scores, from 0 to 1.
        intervals: the interval of each score, or None.
        index: the number of the curve, which decides its colour and marker.
        label: the name in the legend.
    """
    style = line_style(index)
    panel.plot(list(places), [100 * score for score in scores], label=label, **style)
    ends = [(float("nan"), float("nan")) if each is None else each for each in intervals]
    low, high = ([100 * each[side] for each in ends] for side in (0, 1))
    panel.fill_between(list(places), low, high, color=style["color"], alpha=0.15, linewidth=0)


def _token_axis(panel: "Axes", counts: set[int]) -> None:
    panel.set_xscale("log", base=2)
    panel.minorticks_off()
    panel.set_xticks(sorted(counts), [format_tokens(count) for count in sorted(counts)])


def _label_axis(axis: Any, name: str, values: Sequence[Any]) -> None:
    """Label the cells of an axis with their values, and the axis with its name and unit. If there
    are more than 12 numbers, only some of them are shown.
    """
    step = -(-len(values) // _MOST_TICKS) if _is_numeric(values) else 1
    places = range(0, len(values), step)
    is_length = name == "length" and _is_numeric(values)
    texts = [format_tokens(values[i]) if is_length else str(values[i]) for i in places]
    axis.set_ticks(list(places), texts)
    unit = _UNITS.get(name) if _is_numeric(values) else None
    axis.set_label_text(f"{name} ({unit})" if unit else name)


def _name(line: ScoreLine, method: str | None = None) -> str:
    """Return the name of a line for the legend: its method, followed by ", question hidden" if the
    question is hidden. `method` replaces the name of the method.
    """
    hidden = "" if line.question == "visible" else f", question {line.question}"
    return f"{method or line.method}{hidden}"


def format_tokens(count: Any) -> str:
    """Return a number of tokens as a short text, such as 512, 4k or 31.5k, where 1k is 1,024. A
    number that is not a multiple of 512 is written in full, such as 1,000.
    """
    return f"{count / 1024:.4g}k" if count >= 1024 and count % 512 == 0 else f"{count:,}"


def _is_numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)


class _Measured(NamedTuple):
    """The field of a row that is shown in the figure of a benchmark.

    It is divided by `unit`. `also` names a second field, which is drawn as a dotted curve.
    """

    key: str
    label: str
    unit: float = 1
    also: str | None = None


_HELD = "GiB at the peak (dotted: held after it)"
_MEASURED = {
    "decode": _Measured("ms_per_token", "ms per token"),
    "prefill": _Measured("ms", "seconds to the first token", 1000),
    "memory": _Measured("peak_growth_bytes", _HELD, 2**30, "held_bytes"),
    "throughput": _Measured("tokens_per_second", "tokens per second"),
}


def draw_bench(rows: Sequence[Row]) -> "Figure":
    """Draw the results of a benchmark, with a panel for each batch size and a curve for each cache.

    All rows must be of the same benchmark. "OOM" marks lengths that did not fit.

    Raises:
        InvalidArgumentError: there are no rows.
    """
    import matplotlib

    if not rows:
        raise wrong("plot", "there are no rows to draw", "Measure at least one cache")
    bench = rows[0]["bench"]
    # Throughput finds a batch size of its own for every cache.
    batches = [None] if bench == "throughput" else sorted({row["batch"] for row in rows})
    with matplotlib.rc_context(drawing.STYLE):
        figure = drawing.new_figure(1 + 4.2 * len(batches), 4.2)
        panels = drawing.new_panels(figure, 1, len(batches), len(batches))
        for panel, batch in zip(panels, batches, strict=True):
            own = [row for row in rows if batch in (None, row["batch"])]
            _bench_panel(panel, own, _MEASURED[bench])
            if batch is not None:
                panel.set_title(f"batch {batch}")
    return figure


def _bench_panel(panel: "Axes", rows: Sequence[Row], measured: _Measured) -> None:
    """Draw a curve for each cache into a panel, and "OOM" at lengths that did not fit into memory.

    Args:
        panel: the panel, which is changed.
        rows: the rows of one benchmark and batch size.
        measured: the field that is shown.
    """
    for index, cache in enumerate(dict.fromkeys(row["cache"] for row in rows)):
        own = sorted((row for row in rows if row["cache"] == cache), key=itemgetter("length"))
        measured_rows = [row for row in own if row["status"] == "ok"]
        style, lengths = line_style(index), [row["length"] for row in measured_rows]
        values = [_value(row, measured.key) / measured.unit for row in measured_rows]
        panel.plot(lengths, values, label=cache, **style)
        if measured.also is not None:
            held = [_value(row, measured.also) / measured.unit for row in measured_rows]
            panel.plot(lengths, held, linestyle=":", **style)
        place: dict[str, Any] = {"transform": panel.get_xaxis_transform(), "fontsize": 7}
        place |= {"ha": "center", "va": "top", "color": style["color"]}
        for row in own:
            if row["status"] != "ok":  # the note stands at the upper edge
                panel.text(row["length"], 0.98 - 0.05 * index, "OOM", **place)
    _token_axis(panel, {row["length"] for row in rows})
    panel.set_ylim(bottom=0)
    panel.set(xlabel="prompt tokens", ylabel=measured.label)
    drawing.add_grid(panel, "y")
    panel.legend(frameon=False, fontsize="small")


def _value(row: Row, key: str) -> float:
    """Return a number of a row, or its median if the field holds percentiles."""
    value = row[key]
    return float(value["p50"] if isinstance(value, dict) else value)
