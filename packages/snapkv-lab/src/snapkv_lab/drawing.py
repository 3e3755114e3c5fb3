"""Figures as files: whether one can be drawn, and the same bytes for the same rows."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapkv.cache.saving.writing import replace_file
from snapkv.errors import InvalidArgumentError, missing_package

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")

# Labels are other people's text: no dollar sign begins a formula. Ids in an SVG must not be random,
# or the same rows would give another file.
STYLE: dict[Any, Any] = {"text.parse_math": False, "svg.hashsalt": "snapkv", "font.size": 9}


def require_drawable(path: str | None = None) -> None:
    """Raise before a run starts if its figure could not be drawn when it ends.

    Args:
        path: file of the figure; None where it becomes a part of a page.

    Raises:
        InvalidArgumentError: a suffix that is not in `FORMATS`.
        MissingDependencyError: matplotlib is not installed.
    """
    if path is not None and Path(path).suffix.lower() not in FORMATS:
        raise InvalidArgumentError(
            f"plot: expected a file name that ends in {', '.join(FORMATS)}, got {path!r}; choose "
            "one of them"
        )
    try:
        import matplotlib.figure  # noqa: F401 # whether it is there
    except ImportError as error:
        raise missing_package("plot: drawing figures", "matplotlib") from error


def figure(width: float, height: float) -> "Figure":
    """An empty figure, in inches; no window is opened for it."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def panels(figure: Any, down: int, across: int, count: int) -> list[Any]:
    """The first `count` panels of a grid; the others are left blank."""
    found = list(figure.subplots(down, across, squeeze=False).flat)
    for panel in found[count:]:
        panel.set_axis_off()
    return found[:count]


def grid(panel: Any, axis: str) -> None:
    """Grey lines across an axis, behind what is drawn."""
    panel.grid(axis=axis, color="#dddddd")
    panel.set_axisbelow(True)


def encoded(figure: Any, suffix: str, style: dict[Any, Any] = STYLE, *, dpi: int = 150) -> bytes:
    """A figure as a file of that suffix; the same rows give the same bytes."""
    from matplotlib import rc_context

    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix, {})
    target = io.BytesIO()
    with rc_context(style):
        figure.savefig(target, format=suffix.removeprefix("."), dpi=dpi, metadata=undated)
    return target.getvalue()


def save(figure: Any, path: Path, style: dict[Any, Any] = STYLE, *, dpi: int = 150) -> None:
    """Write a figure, whole or not at all; its format goes by the file's ending."""
    replace_file(path, encoded(figure, path.suffix.lower(), style, dpi=dpi))
