"""The figures of a run: heat maps, bars, curves; with the intervals of their means."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from snapkv_lab import drawing
from snapkv_lab.evaluate.intervals import Interval
from snapkv_lab.evaluate.runner import Results
from snapkv_lab.evaluate.store import Record
from snapkv_lab.evaluate.summary import ScoreLine, axis_values, score_lines, shown_loss, shown_score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#F0496E", "#EBB839", "#0CD79F")
_MOST_PANELS_IN_A_ROW = 3
_MOST_ANNOTATED = 10
_MOST_TICKS = 12
_MOST_UPRIGHT = 4
_SHORT_REASONS = {"out of memory": "OOM"}
_UNITS = {"length": "tokens", "depth": "percent", "position": "percent"}
_MARKERS = "osD^vP*X"
# Okabe and Ito's colours, which the colour-blind can tell apart too.
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")


def draw(results: Results) -> dict[str, "Figure"]:
    """The figures of a run by name.

    "scores" is a heat map per method for a task of two axes, and bars or curves for one axis.
    "budgets" is there where a method ran at several budgets, labelled ``NAME@BUDGET``: its mean
    score at each, with the other methods as horizontal lines. "loss" is there where the loss of the
    references was taken: the mean of every method.
    """
    import matplotlib

    lines = score_lines(results.rows, results.task.axes[0])
    with matplotlib.rc_context(drawing.STYLE):
        many = len(results.task.axes) > 1
        figures = {"scores": _heat_maps(results, lines) if many else _columns(results, lines)}
        families = _families(lines)
        if families:
            figures["budgets"] = _budgets(results, lines, families)
        if any(line.loss is not None for line in lines):
            figures["loss"] = _losses(results, lines)
    return figures


def save(figures: dict[str, "Figure"], path: str) -> list[Path]:
    """Write the scores to `path` and any other figure beside it, as ``NAME-budgets.png``."""
    target = Path(path)
    written = []
    for name, figure in figures.items():
        file = target if name == "scores" else target.with_stem(f"{target.stem}-{name}")
        drawing.save(figure, file)
        written.append(file)
    return written


def _heat_maps(results: Results, lines: Sequence[ScoreLine]) -> "Figure":
    """A panel per method and question, the first axis from left to right, the second downwards."""
    columns, rows = (_ordered(axis_values(results.rows, axis)) for axis in results.task.axes[:2])
    across = 2 if len(lines) == 4 else min(len(lines), _MOST_PANELS_IN_A_ROW)
    down = -(-len(lines) // across)
    width, height = (min(max(0.45 * len(cells), 2.4), 6.0) for cells in (columns, rows))
    figure = _figure(results, 1.6 + across * (width + 0.5), 0.6 + down * (height + 0.8))
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for panel, line in zip(panels, lines, strict=False):
        _heat_map(panel, results, line, columns, rows)
    for panel in panels[len(lines) :]:
        panel.set_axis_off()
    if _trained_border(results, columns) is not None:
        positions = shown_tokens(results.run["model"]["max_tokens"])
        figure.supxlabel(f"dashed line: the model's {positions} positions end")
    scale = figure.colorbar(panels[0].images[0], ax=panels, shrink=0.8, ticks=[0, 0.5, 1])
    scale.ax.set_yticklabels(["0", "50", "100"])
    scale.set_label(results.task.metric)
    return figure


def _heat_map(
    panel: "Axes", results: Results, line: ScoreLine, columns: list[Any], rows: list[Any]
) -> None:
    """One method: a coloured cell per score, from 0 to 1 whatever the scores are."""
    from matplotlib.colors import LinearSegmentedColormap

    x_axis, y_axis = results.task.axes[:2]
    found: dict[tuple[Any, Any], list[Record]] = {}
    for row in results.rows:
        if (row["method"], row["question"]) == (line.method, line.question):
            place = (columns.index(row["cell"][x_axis]), rows.index(row["cell"][y_axis]))
            found.setdefault(place, []).append(row)
    grid = [[float("nan")] * len(columns) for _ in rows]
    for (x, y), cell in found.items():
        scores = [row["score"] for row in cell if row["score"] is not None]
        if scores:
            grid[y][x] = fmean(scores)
        _mark_cell(panel, x, y, scores, cell[0]["status"], max(len(columns), len(rows)))
    colours = LinearSegmentedColormap.from_list("score", _COLOURS)
    panel.imshow(grid, cmap=colours, vmin=0, vmax=1, aspect="auto")
    sure = "" if line.interval is None else f" ({line.shown_interval})"
    panel.set_title(f"{_name(line)}\nmean {shown_score(line.mean)}{sure}")
    _label_axis(panel.xaxis, x_axis, columns)
    _label_axis(panel.yaxis, y_axis, rows)
    border = _trained_border(results, columns)
    if border is not None:
        panel.axvline(border, color="black", linestyle="--", linewidth=1.2)


def _mark_cell(
    panel: "Axes", x: int, y: int, scores: list[float], reason: str, cells_in_a_row: int
) -> None:
    """Write the score into a cell where it is large; hatch it and say why where there is none."""
    from matplotlib.patches import Rectangle

    if not scores:
        corner = (x - 0.5, y - 0.5)
        panel.add_patch(
            Rectangle(corner, 1, 1, facecolor="#eeeeee", edgecolor="#999999", hatch="///", lw=0)
        )
    if cells_in_a_row <= _MOST_ANNOTATED:
        text = f"{100 * fmean(scores):.0f}" if scores else _short(reason).replace(" ", "\n")
        panel.text(x, y, text, ha="center", va="center", fontsize=7)


def _trained_border(results: Results, columns: list[Any]) -> float | None:
    """Where lengths beyond the model's positions begin, in columns; None where none or all do."""
    positions = results.run["model"]["max_tokens"]
    if results.task.axes[0] != "length" or positions is None:
        return None
    inside = sum(length <= positions for length in columns)
    return inside - 0.5 if 0 < inside < len(columns) else None


def _columns(results: Results, lines: Sequence[ScoreLine]) -> "Figure":
    """Curves over a numeric axis; groups of bars, and one for the mean, over names."""
    axis = results.task.axes[0]
    columns = axis_values(results.rows, axis)
    if _numeric(columns):
        columns = sorted(columns)
        figure = _figure(results, max(5.0, 0.6 * len(columns) + 2), 4.0)
        panel = figure.subplots()
        for index, line in enumerate(lines):
            scores = [line.scores.get(column, float("nan")) for column in columns]
            panel.plot([100 * score for score in scores], label=_name(line), **line_style(index))
            intervals = [line.intervals.get(column) for column in columns]
            band(panel, range(len(columns)), intervals, line_style(index)["color"])
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
    """One method's bar in every group, and in the group of the means."""
    width = 0.8 / count
    places = [group + (index - (count - 1) / 2) * width for group in range(len(columns) + 1)]
    scores = [*(line.scores.get(column) for column in columns), line.mean]
    colour = _LINES[index % len(_LINES)]
    heights = [100 * (score or 0.0) for score in scores]
    panel.bar(places, heights, width, color=colour, label=_name(line))
    intervals = [*(line.intervals.get(column) for column in columns), line.interval]
    known = [(place, ends) for place, ends in zip(places, intervals, strict=True) if ends]
    lows, highs = ([100 * ends[side] for _, ends in known] for side in (0, 1))
    panel.vlines([place for place, _ in known], lows, highs, color="black", linewidth=0.8)
    for place, column, score in zip(places, columns, scores, strict=False):
        if score is None and column in line.reasons:
            text = _short(line.reasons[column])
            panel.text(place, 1, text, rotation=90, ha="center", va="bottom", fontsize=7)


def _families(lines: Sequence[ScoreLine]) -> dict[str, dict[int, ScoreLine]]:
    """Methods that answered at several budgets: by name and question, their lines by budget."""
    found: dict[str, dict[int, ScoreLine]] = {}
    for line in lines:
        labelled = re.fullmatch(r"(.+)@(\d+)", line.method)
        if labelled and line.scores:
            name = _name(line, method=labelled[1])
            found.setdefault(name, {})[int(labelled[2])] = line
    return {name: by_budget for name, by_budget in found.items() if len(by_budget) > 1}


def _budgets(
    results: Results, lines: Sequence[ScoreLine], families: dict[str, dict[int, ScoreLine]]
) -> "Figure":
    """Mean score against budget, with the methods of one budget as dashed lines."""
    figure = _figure(results, 6.0, 4.0)
    panel = figure.subplots()
    for index, (name, by_budget) in enumerate(families.items()):
        points = [(budget, 100 * (line.mean or 0.0)) for budget, line in sorted(by_budget.items())]
        panel.plot(*zip(*points, strict=True), label=name, **line_style(index))
        intervals = [line.interval for _, line in sorted(by_budget.items())]
        band(panel, [budget for budget, _ in points], intervals, line_style(index)["color"])
    swept = [line for by_budget in families.values() for line in by_budget.values()]
    others = [line for line in lines if line not in swept and line.scores]
    for index, line in enumerate(others, len(families)):
        height = 100 * (line.mean or 0.0)
        panel.axhline(height, color=_LINES[index % len(_LINES)], linestyle="--", label=_name(line))
    budgets = sorted({budget for by_budget in families.values() for budget in by_budget})
    panel.set_xscale("log", base=2)
    panel.minorticks_off()
    panel.set_xticks(budgets, [shown_tokens(budget) for budget in budgets])
    panel.set_xlabel("budget (tokens per head and layer)")
    _finish(panel, results, legend=len(families) + len(others))
    return figure


def _losses(results: Results, lines: Sequence[ScoreLine]) -> "Figure":
    """A row per method and question: the mean loss of the references, and its interval."""
    figure = _figure(results, 6.0, 1.4 + 0.3 * len(lines))
    panel = figure.subplots()
    for place, line in enumerate(lines):
        if line.loss is None:
            continue
        corner = (line.loss, place)
        panel.plot(*corner, "o", color=_LINES[0])
        if line.loss_interval is not None:
            panel.hlines(place, *line.loss_interval, color=_LINES[0])
        text = shown_loss(line.loss)
        panel.annotate(text, corner, (0, 5), textcoords="offset points", ha="center", fontsize=7)
    panel.set_yticks(range(len(lines)), [_name(line) for line in lines])
    panel.set_ylim(len(lines) - 0.4, -0.6)
    panel.set_xlabel("loss of the reference (mean, nats per token; lower is better)")
    panel.grid(axis="x", color="#dddddd")
    panel.set_axisbelow(True)
    return figure


def _figure(results: Results, width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(f"{results.task.name}, {results.run['model']['name']}")
    return figure


def _finish(panel: "Axes", results: Results, *, legend: int) -> None:
    """The score's axis, from 0 to 100 whatever the scores are, and the legend above."""
    panel.set_ylim(0, 105)
    panel.set_ylabel(f"{results.task.metric} (mean)")
    panel.grid(axis="y", color="#dddddd")
    panel.set_axisbelow(True)
    panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(legend, 3), frameon=False)


def line_style(index: int) -> dict[str, Any]:
    """Colour and marker of the curve of that number."""
    return {
        "color": _LINES[index % len(_LINES)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "clip_on": False,
    }


def band(
    panel: "Axes", places: Sequence[float], intervals: Sequence[Interval | None], colour: str
) -> None:
    """Shade the intervals of a curve's scores; a score without one ends the band."""
    ends = [(float("nan"), float("nan")) if each is None else each for each in intervals]
    low, high = ([100 * each[side] for each in ends] for side in (0, 1))
    panel.fill_between(list(places), low, high, color=colour, alpha=0.15, linewidth=0)


def _label_axis(axis: Any, name: str, values: Sequence[Any]) -> None:
    """Ticks at the cells, not at all of them where they are many."""
    step = -(-len(values) // _MOST_TICKS) if _numeric(values) else 1
    places = range(0, len(values), step)
    texts = [shown_tokens(values[i]) if name == "length" else str(values[i]) for i in places]
    axis.set_ticks(list(places), texts)
    unit = _UNITS.get(name) if _numeric(values) else None
    axis.set_label_text(f"{name} ({unit})" if unit else name)


def _name(line: ScoreLine, method: str | None = None) -> str:
    """What a legend calls a method; that its question is seen by the vote goes without saying."""
    hidden = "" if line.question == "visible" else f", question {line.question}"
    return f"{method or line.method}{hidden}"


def _short(reason: str) -> str:
    return _SHORT_REASONS.get(reason, reason)


def shown_tokens(count: Any) -> str:
    """Tokens as people write them: 512, 4k, 31.5k."""
    return f"{count / 1024:.4g}k" if count >= 1024 and count % 512 == 0 else f"{count:,}"


def _ordered(values: list[Any]) -> list[Any]:
    return sorted(values) if _numeric(values) else values


def _numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)
