"""The figures of the studies; the only place of theirs that imports matplotlib."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from snapkv_lab import drawing
from snapkv_lab.rows import Row

_LEGEND_ENTRIES = 10
"""With more curves than that, the legend has the first and the last."""


class Panel(NamedTuple):
    """Curves in one pair of axes, by label: y from 0 to 1 over x, both keys of the rows."""

    title: str
    x: str
    y: str
    curves: Mapping[str, Sequence[Row]]
    dotted: Mapping[str, Sequence[Row]] = MappingProxyType({})


def curves(*panels: Panel) -> Any:
    """A figure with the panels side by side."""
    figure = drawing.figure(4.6 * len(panels), 4.2)
    for place, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(place, panel)
    return figure


def _draw(place: Any, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    _draw_curves(place, panel, panel.curves, "-")
    _draw_curves(place, panel, panel.dotted, ":")
    place.set(title=panel.title, xlabel=panel.x, ylabel=panel.y.replace("_", " "), ylim=(0, 1.03))
    place.xaxis.set_major_locator(MaxNLocator(integer=True))
    place.grid(alpha=0.3)
    shown, names = place.get_legend_handles_labels()
    if len(shown) > _LEGEND_ENTRIES:
        shown, names = [shown[0], shown[-1]], [names[0], names[-1]]
    under = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "ncols": 2}
    place.legend(shown, names, fontsize="x-small", frameon=False, **under)


def _draw_curves(place: Any, panel: Panel, curves: Mapping[str, Sequence[Row]], style: str) -> None:
    from matplotlib import colormaps

    for number, (label, rows) in enumerate(curves.items()):
        place.plot(
            [row[panel.x] for row in rows],
            [math.nan if row[panel.y] is None else row[panel.y] for row in rows],
            label=label,
            color=colormaps["viridis"](0.9 * number / max(len(curves) - 1, 1)),
            linestyle=style,
            linewidth=1.2,
            marker="." if len(curves) <= _LEGEND_ENTRIES else "",  # shows points without a line
            markersize=3,
        )


def grid(title: str, rows: Sequence[Row], *, x: str, y: str, panel: str, value: str) -> Any:
    """A figure of numbers from 0 to 1 by two keys, one table of cells for each value of a third."""
    kinds = list(dict.fromkeys(row[panel] for row in rows))
    figure = drawing.figure(4.6 * len(kinds), 4.2)
    for place, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        own = [row for row in rows if row[panel] == kind]
        columns, lines = (sorted({row[key] for row in own}) for key in (x, y))
        cells = [[math.nan] * len(columns) for _ in lines]
        for row in own:
            column, line = columns.index(row[x]), lines.index(row[y])
            if row[value] is not None:
                cells[line][column] = row[value]
                dark = row[value] < 0.6
                style = {"ha": "center", "va": "center", "color": "white" if dark else "black"}
                place.text(column, line, f"{row[value]:.2f}", **style)
        place.imshow(cells, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        labels = {"xlabel": x.replace("_", " "), "ylabel": y.replace("_", " ")}
        place.set(title=f"{title}, {panel} {kind}", **labels)
        place.set_xticks(range(len(columns)), columns)
        place.set_yticks(range(len(lines)), lines)
    return figure


def save(figure: Any, path: str) -> None:
    """Write a figure in the format that the name ends in."""
    style = {"svg.hashsalt": "snapkv", "svg.fonttype": "none"}
    drawing.save(figure, Path(path), style, dpi=100)
