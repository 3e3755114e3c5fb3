"""Helpers for figures: whether one can be drawn, line plots and heat maps of rows.

The same rows always give the same bytes.
"""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from snapkv.cache.saving.writing import replace_file
from snapkv.errors import missing_package, wrong
from snapkv_lab.rows import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")

# Labels are texts of users, in which a dollar sign begins no formula. Ids in an SVG must not be
# random, so that the same rows give the same file.
STYLE: dict[Any, Any] = {"text.parse_math": False, "svg.hashsalt": "snapkv", "font.size": 9}

PLAIN: dict[Any, Any] = {"svg.hashsalt": "snapkv", "svg.fonttype": "none"}
"""The style of line plots and heat maps, whose text stays text in an SVG."""


def require_drawable(path: str | None = None) -> None:
    """Check that a figure can be drawn, before a long run starts.

    Args:
        path: the file of the figure; None if the figure is a part of a page.

    Raises:
        InvalidArgumentError: the file name has no known ending.
        MissingDependencyError: matplotlib is not installed.
    """
    if path is not None and Path(path).suffix.lower() not in FORMATS:
        problem = f"expected a file name that ends in {', '.join(FORMATS)}, but got {path!r}"
        raise wrong("plot", problem, "Use one of these formats")
    try:
        import matplotlib.figure  # noqa: F401 # whether it is there
    except ImportError as error:
        raise missing_package("plot: drawing figures", "matplotlib") from error


def new_figure(width: float, height: float) -> "Figure":
    """Return a new figure of the given size in inches, without opening a window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def new_panels(figure: Any, down: int, across: int, count: int) -> list[Any]:
    """Add a grid of panels to the figure and return the first `count` of them. The other panels are
    left blank.

    Args:
        figure: matplotlib's figure, which is changed.
        down: the number of rows of the grid.
        across: the number of its columns.
        count: how many panels are returned, row by row.
    """
    grid = list(figure.subplots(down, across, squeeze=False).flat)
    for panel in grid[count:]:
        panel.set_axis_off()
    return grid[:count]


def add_grid(panel: Any, axis: str) -> None:
    """Add grey grid lines to one axis of the panel."""
    panel.grid(axis=axis, color="#dddddd")
    panel.set_axisbelow(True)


def encode_figure(
    figure: Any, suffix: str, style: dict[Any, Any] = STYLE, *, dpi: int = 150
) -> bytes:
    """Return the contents of a file that shows the figure. The same figure always gives the same
    bytes: no date and no random ids are written.

    Args:
        figure: matplotlib's figure.
        suffix: the ending of the file's name in lower case, such as ".svg", which decides the
            format.
        style: matplotlib's settings while the figure is drawn.
        dpi: the dots per inch of a picture of pixels.
    """
    from matplotlib import rc_context

    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix, {})
    target = io.BytesIO()
    with rc_context(style):
        figure.savefig(target, format=suffix.removeprefix("."), dpi=dpi, metadata=undated)
    return target.getvalue()


def save_figure(figure: Any, path: Path, style: dict[Any, Any] = STYLE, *, dpi: int = 150) -> None:
    """Write the figure to a file in the format that the ending of its name says.

    The file is written completely or not at all.

    Raises:
        OutputError: the file cannot be written.
    """
    replace_file(path, encode_figure(figure, path.suffix.lower(), style, dpi=dpi))


# Line plots and heat maps of rows, which studies draw.

_LEGEND_ENTRIES = 10
"""The most curves that a legend lists; with more curves it lists the first and the last."""


class Panel(NamedTuple):
    """A pair of axes with labelled curves of one field of the rows over another field.

    The values of `y` are from 0 to 1.
    """

    title: str
    x: str
    y: str
    curves: Mapping[str, Sequence[Row]]
    dotted: Mapping[str, Sequence[Row]] = MappingProxyType({})


def draw_curves(*panels: Panel) -> Any:
    """Return a new figure with the panels side by side. There must be at least one."""
    result = new_figure(4.6 * len(panels), 4.2)
    for place, panel in zip(result.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(place, panel)
    return result


def _draw(place: Any, panel: Panel) -> None:
    """Draw the curves of a panel into matplotlib's axes `place`, with labels and a legend."""
    from matplotlib.ticker import MaxNLocator

    _draw_lines(place, panel, panel.curves, "-")
    _draw_lines(place, panel, panel.dotted, ":")
    place.set(title=panel.title, xlabel=panel.x, ylabel=panel.y.replace("_", " "), ylim=(0, 1.03))
    place.xaxis.set_major_locator(MaxNLocator(integer=True))
    place.grid(alpha=0.3)
    handles, names = place.get_legend_handles_labels()
    if len(handles) > _LEGEND_ENTRIES:
        handles, names = [handles[0], handles[-1]], [names[0], names[-1]]
    under = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "ncols": 2}
    place.legend(handles, names, fontsize="x-small", frameon=False, **under)


def _draw_lines(place: Any, panel: Panel, curves: Mapping[str, Sequence[Row]], style: str) -> None:
    """Draw curves into matplotlib's axes, in colours from dark to light. A number that is None
    interrupts its curve.

    Args:
        place: the axes, which are changed.
        panel: names the fields of both axes.
        curves: the rows of each curve by its label.
        style: matplotlib's line style, such as ":".
    """
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


def draw_cells(title: str, rows: Sequence[Row], *, x: str, y: str, panel: str, value: str) -> Any:
    """Return a figure with the numbers in the rows as heat maps, one for each value of a field.

    A cell whose number is None, or that has no row, stays blank.

    Args:
        title: the beginning of the title of each heat map.
        rows: the rows.
        x: the name of the field that gives the column of a number.
        y: the name of the field that gives the line of a number.
        panel: the name of the field that has one heat map for each of its values.
        value: the name of the field with the numbers, which are from 0 to 1.
    """
    kinds = list(dict.fromkeys(row[panel] for row in rows))
    result = new_figure(4.6 * len(kinds), 4.2)
    for place, kind in zip(result.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        own = [row for row in rows if row[panel] == kind]
        columns, lines = (sorted({row[key] for row in own}) for key in (x, y))
        numbers = [[math.nan] * len(columns) for _ in lines]
        for row in own:
            column, line = columns.index(row[x]), lines.index(row[y])
            if row[value] is not None:
                numbers[line][column] = row[value]
                dark = row[value] < 0.6
                style = {"ha": "center", "va": "center", "color": "white" if dark else "black"}
                place.text(column, line, f"{row[value]:.2f}", **style)
        place.imshow(numbers, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        labels = {"xlabel": x.replace("_", " "), "ylabel": y.replace("_", " ")}
        place.set(title=f"{title}, {panel} {kind}", **labels)
        place.set_xticks(range(len(columns)), columns)
        place.set_yticks(range(len(lines)), lines)
    return result
