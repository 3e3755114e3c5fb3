"""The picture of docs/index.md: what a prompt takes, in the full cache and in a compressed one.

python -m snapkv_lab.experiments overview
        draw docs/results/overview.svg from the rows of `snapkv_lab.experiments.speed`
"""

from typing import TYPE_CHECKING

from snapkv_lab import drawing
from snapkv_lab.experiments import speed
from snapkv_lab.experiments.records import RESULTS, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE = RESULTS / "overview.svg"
STYLE = drawing.STYLE | {"svg.fonttype": "none"}
_COLOURS = {"full": "#9aa5b1", "snapkv": "#2a6fb0"}
_WIDTH = 0.38
_MIB = 2**20


def drawn(rows: list[Row]) -> "Figure":
    """Bytes held, and time per token, behind a short and a long prompt."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    timed = [row for row in rows if row["benchmark"] == "decode" and "ms_per_token" in row]
    budget = timed[0]["budget"]
    labels = {"full": "full cache", "snapkv": f"SnapKV, budget {budget}"}
    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 2.6), layout="constrained")
        held, time = figure.subplots(1, 2)
        for place, (cache, label) in enumerate(labels.items()):
            own = sorted(
                (row for row in timed if row["cache"] == cache),
                key=lambda row: int(row["prompt_tokens"]),
            )
            at = [index + (place - 0.5) * _WIDTH for index in range(len(own))]
            for panel, heights in (
                (held, [row["held_bytes"] / _MIB for row in own]),
                (time, [row["ms_per_token"]["p50"] for row in own]),
            ):
                bars = panel.bar(at, heights, _WIDTH, label=label, color=_COLOURS[cache])
                panel.bar_label(bars, fmt="{:.3g}", padding=2)
                panel.set_xticks(
                    range(len(own)), [f"{row['prompt_tokens']:,} prompt tokens" for row in own]
                )
        for panel, title in ((held, "keys and values, MiB"), (time, "ms per generated token")):
            panel.set_title(title)
            panel.margins(y=0.15)
            panel.spines[["top", "right"]].set_visible(False)
        handles, names = held.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=2, frameon=False)
    return figure


def main() -> None:
    """Draw it."""
    drawing.save(drawn(speed.EXPERIMENT.known()), FIGURE, STYLE)


if __name__ == "__main__":
    main()
