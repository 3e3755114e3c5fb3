"""The figures of `snapkv bench`: a panel per batch size, a curve per cache, over the prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from snapkv.errors import InvalidArgumentError
from snapkv_lab.drawing import STYLE
from snapkv_lab.report.figures import line_style, shown_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """What a bench's rows say, and how it is drawn.

    Attributes:
        key: of the number, or of its percentiles; `also` of another one, drawn dotted.
        label: of the axis. unit: what the number is divided by.
    """

    key: str
    label: str
    unit: float = 1
    also: str | None = None


_MEASURED = {
    "decode": _Measured(key="ms_per_token", label="ms per token"),
    "prefill": _Measured(key="ms", label="seconds to the first token", unit=1000),
    "memory": _Measured(
        key="peak_growth_bytes",
        label="GiB at the peak (dotted: held after it)",
        unit=2**30,
        also="held_bytes",
    ),
    "throughput": _Measured(key="tokens_per_second", label="tokens per second"),
}


def draw(rows: Sequence[Row]) -> "Figure":
    """The figure of one bench's rows; cells that ran out of memory are marked at their length.

    Raises:
        InvalidArgumentError: there are no rows.
    """
    import matplotlib
    from matplotlib.figure import Figure

    if not rows:
        raise InvalidArgumentError("plot: expected rows to draw, got none; measure something")
    bench = rows[0]["bench"]
    # Throughput finds a batch size of its own for every cache.
    batches = [None] if bench == "throughput" else sorted({row["batch"] for row in rows})
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1 + 4.2 * len(batches), 4.2), layout="constrained")
        panels = figure.subplots(1, len(batches), squeeze=False)[0]
        for panel, batch in zip(panels, batches, strict=True):
            _draw_panel(panel, [row for row in rows if batch in (None, row["batch"])], bench)
            if batch is not None:
                panel.set_title(f"batch {batch}")
    return figure


def _draw_panel(panel: "Axes", rows: Sequence[Row], bench: str) -> None:
    measured = _MEASURED[bench]
    caches = list(dict.fromkeys(row["cache"] for row in rows))
    for index, cache in enumerate(caches):
        own = sorted((row for row in rows if row["cache"] == cache), key=itemgetter("length"))
        there = [row for row in own if row["status"] == "ok"]
        style = line_style(index)
        lengths = [row["length"] for row in there]
        values = [_value(row, measured.key) / measured.unit for row in there]
        panel.plot(lengths, values, label=cache, **style)
        if measured.also is not None:
            held = [_value(row, measured.also) / measured.unit for row in there]
            panel.plot(lengths, held, linestyle=":", **style)
        for row in own:
            if row["status"] != "ok":
                _mark_missing(panel, row["length"], index, style["color"])
    lengths = sorted({row["length"] for row in rows})
    panel.set_xscale("log", base=2)
    panel.minorticks_off()
    panel.set_xticks(lengths, [shown_tokens(length) for length in lengths])
    panel.set_ylim(bottom=0)
    panel.set(xlabel="prompt tokens", ylabel=measured.label)
    panel.grid(axis="y", color="#dddddd")
    panel.set_axisbelow(True)
    panel.legend(frameon=False, fontsize="small")


def _mark_missing(panel: "Axes", length: int, index: int, colour: str) -> None:
    """Say at the upper edge that this cache did not fit."""
    height = 0.98 - 0.05 * index
    place = {"transform": panel.get_xaxis_transform(), "ha": "center", "va": "top"}
    panel.text(length, height, "OOM", color=colour, fontsize=7, **place)  # type: ignore[arg-type] # any text option


def _value(row: Row, key: str) -> float:
    """A number, or the median of its percentiles."""
    value = row[key]
    return float(value["p50"] if isinstance(value, dict) else value)
