"""The page of a leaderboard: a table per setting, who is like the full cache, and one figure."""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from snapkv_lab import drawing
from snapkv_lab.evaluate.intervals import METHOD, is_seen, line_differences
from snapkv_lab.evaluate.store import Record
from snapkv_lab.evaluate.summary import ScoreLine, axis_values, score_lines
from snapkv_lab.report.figures import curve, line_style
from snapkv_lab.report.page import Section, as_html, facts_section, picture, write_files
from snapkv_lab.report.tables import (
    IN_PERCENT,
    NONE_SEEN,
    ONE_SAMPLE,
    Table,
    escaped,
    shown_difference,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FILES = (
    *("leaderboard.json", "leaderboard.svg", "leaderboard-time.svg"),
    *("leaderboard.md", "leaderboard.html"),
)
"""What `write_board` writes: the rows, then what is made of them."""

ABOUT = (
    "Scores are times 100, the mean is over tasks. Budget is the share of the bytes that a prompt "
    "takes in the full cache; in few bits (int4) they hold more tokens. Held is what keys and "
    "values take of the full cache's bytes when an answer is complete, question and answer "
    "included; time is that of a token behind the first.",
    f"Intervals, in brackets behind the scores of tasks: 95 %, {METHOD}. The difference is from "
    f"the full cache, sample by sample. {NONE_SEEN.capitalize()} means that its interval holds "
    "zero, and not that there is none: its width says how large one may be. Where there is none, "
    "about one comparison in twenty sees one by chance.",
)

_ACROSS = 4


@dataclass(frozen=True, kw_only=True)
class BoardLine:
    """A method at a share in one setting.

    `name` ends with `bits`, None for as it came; `share` of the full cache's bytes was the budget,
    None for the full cache; `held` is bytes over the full cache's, the mean over cells; `scores`
    are by task; `difference` is from the full cache.
    """

    name: str
    bits: str | None
    share: float | None
    held: float | None
    scores: ScoreLine
    difference: Record | None

    @property
    def method(self) -> str:
        """Its name without the bits."""
        return self.name if self.bits is None else self.name.removesuffix(f" {self.bits}")

    @property
    def kept(self) -> str:
        return "all" if self.share is None else _percent(self.share)


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"


def board_lines(found: Record) -> list[BoardLine]:
    """By setting the full cache, then from the largest share to the smallest the best mean first.

    Methods without an answer in some task come behind those that have one in all.
    """
    rows, differences = found["rows"], line_differences(found["rows"], "task")
    settings, lines = _settings_of(found), []
    for line in score_lines(rows, "task"):
        place = (line.method, line.question)
        own = [row for row in rows if (row["method"], row["question"]) == place]
        held = [row["held_bytes"] / row["full_bytes"] for row in own if row["full_bytes"]]
        share = own[0]["share"]
        lines.append(
            BoardLine(
                name=line.method if share is None else line.method.rpartition("@")[0],
                bits=own[0].get("bits"),
                share=share,
                held=fmean(held) if held else None,
                scores=line,
                difference=differences.get(place),
            )
        )

    def rank(line: BoardLine) -> tuple[int, float, int, float]:
        share, scores = 1.0 if line.share is None else line.share, line.scores
        return settings.index(scores.question), -share, -len(scores.scores), -(scores.mean or 0.0)

    return sorted(lines, key=rank)


def _settings_of(found: Record) -> list[str]:
    return list(dict.fromkeys(row["question"] for row in found["rows"]))


def board_table(found: Record, lines: Sequence[BoardLine], *, by_task: bool = True) -> Table:
    """A row per method and share, with its means and differences; of each task too, or settings."""
    tasks = axis_values(found["rows"], "task") if by_task else []

    def of_task(scores: ScoreLine, task: str) -> str:
        if task not in scores.scores:
            return scores.reasons.get(task) or "-"
        ends = IN_PERCENT.interval(scores.intervals[task])
        return f"{IN_PERCENT.text(scores.scores[task])} ({ends})"

    def texts(line: BoardLine) -> tuple[str, ...]:
        scores = line.scores
        return (
            *(() if by_task else (scores.question,)),
            *(line.name, line.kept, "-" if line.held is None else f"{100 * line.held:.1f} %"),
            *(of_task(scores, task) for task in tasks),
            IN_PERCENT.text(scores.mean),
            IN_PERCENT.interval(scores.interval) if scores.intervals else "-",
            shown_difference(line.difference),
            "-" if scores.token_ms is None else f"{scores.token_ms:.1f}",
        )

    first = ("method",) if by_task else ("question", "method")
    return Table(
        title=f"leaderboard of {found['model']['name']}",
        caption="From the largest share to the smallest, the best mean first"
        if by_task
        else f"95 %: interval of the mean over tasks, {METHOD}",
        headings=(*first, "budget", "held", *tasks, "mean", "95 %", "difference", "ms per token"),
        rows=[texts(line) for line in lines],
        left=len(first),
    )


def seen_table(lines: Sequence[BoardLine]) -> Table:
    """Which methods of a setting are like the full cache at each share.

    Only methods with an answer in all tasks of the full cache are among them.
    """
    tasks = max((len(line.scores.scores) for line in lines if line.share is None), default=0)
    sides = (NONE_SEEN, "worse", "better", ONE_SAMPLE)
    rows = []
    for share in sorted({line.share for line in lines if line.share is not None}, reverse=True):
        own = [
            (_side(line.difference), line.name)
            for line in lines
            if line.share == share and line.difference and len(line.scores.scores) == tasks
        ]
        on = (", ".join(name for where, name in own if where == side) or "-" for side in sides)
        rows.append((_percent(share), *on))
    caption = "By the interval of the difference from the full cache"
    return Table(headings=("budget", *sides), rows=rows, caption=caption, left=5)


def _side(difference: Record) -> str:
    if difference["interval"] is None:
        return ONE_SAMPLE
    if not is_seen(difference):
        return NONE_SEEN
    return "better" if difference["score"] > 0 else "worse"


def draw(found: Record) -> "Figure":
    """A panel per method: its mean over tasks against the bytes that it holds, by setting and bits.

    Bands are intervals; the full cache's mean is a dashed line across every panel.
    """
    from matplotlib import rc_context

    lines = board_lines(found)
    names = list(dict.fromkeys(line.method for line in lines if line.share is not None))
    across = min(_ACROSS, len(names))
    down = -(-len(names) // across)
    with rc_context(drawing.STYLE):
        figure = drawing.figure(1.0 + 2.6 * across, 1.2 + 2.2 * down)
        panels = drawing.panels(figure, down, across, len(names), sharex=True, sharey=True)
        drawn: dict[str, Any] = {}  # in any panel, each once
        for panel, name in zip(panels, names, strict=True):
            _curves(panel, name, lines, _settings_of(found))
            handles, labels = panel.get_legend_handles_labels()
            drawn = dict(zip(labels, handles, strict=True)) | drawn
        figure.supxlabel("bytes held (percent of the full cache's)")
        figure.supylabel("mean score over tasks")
        where: dict[str, Any] = {"loc": "outside upper center", "frameon": False}
        figure.legend([*drawn.values()], [*drawn], ncols=min(2, len(drawn)), **where)
    return figure


def _curves(panel: "Axes", name: str, lines: Sequence[BoardLine], settings: Sequence[str]) -> None:
    """One method in every setting and number of bits, and the full cache's means."""
    kinds = sorted({line.bits for line in lines if line.share is not None}, key=str)
    for index, (bits, setting) in enumerate(itertools.product(kinds, settings)):
        own = [
            (100 * line.held, line.scores)
            for line in lines
            if line.held and (line.method, line.bits, line.scores.question) == (name, bits, setting)
        ]
        if own:  # a curve without points leaves the layout no room
            held, scores = zip(*sorted(own, key=lambda point: point[0]), strict=True)
            means, ends = [each.mean or 0.0 for each in scores], [each.interval for each in scores]
            label = f"question {setting}" + ("" if bits is None else f", {bits}")
            curve(panel, held, means, ends, index, label)
    for index, setting in enumerate(settings):
        for line in lines:
            whole = line.share is None and line.scores.question == setting
            if whole and line.scores.scores:
                height, colour = 100 * (line.scores.mean or 0.0), line_style(index)["color"]
                label = f"full cache, {setting}"
                panel.axhline(height, color=colour, linestyle="--", label=label)
    panel.set_title(name)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:.4g}")
    panel.set_ylim(0, 105)
    drawing.grid(panel, "y")


def draw_times(found: Record) -> "Figure":
    """A panel per budget: means over tasks against time per token, a mark per method and bits.

    Named are the full cache, and what no other line beats in both.
    """
    from matplotlib import rc_context

    lines = [line for line in board_lines(found) if line.scores.token_ms and line.scores.scores]
    shares = sorted({line.share for line in lines if line.share is not None}, reverse=True)
    kinds = sorted(set(map(_kind, lines)), key=lambda kind: (kind[0], kind[1] or ""))
    across = max(1, min(_ACROSS, len(shares)))
    down = max(1, -(-len(shares) // across))
    with rc_context(drawing.STYLE):
        figure = drawing.figure(1.0 + 3.4 * across, 1.2 + 2.6 * down)
        panels = drawing.panels(figure, down, across, len(shares), sharex=True, sharey=True)
        for panel, share in zip(panels, shares, strict=True):
            _times(panel, [line for line in lines if line.share in (share, None)], kinds)
            panel.set_title(f"budget {_percent(share)}")
        figure.supxlabel("time per token (ms, median)")
        figure.supylabel("mean score over tasks")
        drawn = {label: mark for panel in panels for mark, label in _legend(panel)}
        where: dict[str, Any] = {"loc": "outside upper center", "frameon": False}
        figure.legend([*drawn.values()], [*drawn], ncols=max(1, len(drawn)), **where)
    return figure


def _times(
    panel: "Axes", lines: Sequence[BoardLine], kinds: Sequence[tuple[str, str | None]]
) -> None:
    points = [(_point(line), line) for line in lines]
    for index, (question, bits) in enumerate(kinds):
        kind = [point for point, line in points if _kind(line) == (question, bits)]
        label = f"question {question}" + ("" if bits is None else f", {bits}")
        style = line_style(index) | {"linestyle": "none", "label": label}
        panel.plot([x for x, _ in kind], [y for _, y in kind], **style)
    for (x, y), line in points:
        beaten = any(a <= x and b >= y and (a, b) != (x, y) for (a, b), _ in points)
        if line.share is None or not beaten:
            panel.annotate(line.name, (x, y), fontsize=7, xytext=(3, 3), textcoords="offset points")
    panel.set_ylim(0, 105)
    drawing.grid(panel, "both")


def _point(line: BoardLine) -> tuple[float, float]:
    return line.scores.token_ms or 0.0, 100 * (line.scores.mean or 0.0)


def _kind(line: BoardLine) -> tuple[str, str | None]:
    return line.scores.question, line.bits


def _legend(panel: "Axes") -> Iterator[tuple[Any, str]]:
    yield from zip(*panel.get_legend_handles_labels(), strict=True)


def as_markdown(found: Record, figure: str = FILES[1], times: str = FILES[2]) -> str:
    parts = [f"# Leaderboard of {escaped(found['model']['name'])}", *ABOUT]
    parts.append(escaped(_facts_line(found)))
    parts.append(f"![Score against bytes held, by method]({figure})")
    parts.append(f"![Score against time per token, by budget]({times})")
    for section in _sections(found):
        parts.append(f"{'#' * section.level} {section.title}")
        if section.table:
            parts.append(section.table.as_markdown())
    return "\n\n".join(parts) + "\n"


def as_page(found: Record) -> str:
    means = "; ".join(
        f"{line.name} at {line.kept} ({line.scores.question}) {IN_PERCENT.text(line.scores.mean)}"
        for line in board_lines(found)
    )
    title = "Mean score over tasks against the bytes held; bands are 95 % intervals"
    drawn = picture(draw(found), title, f"{title}. Means: {means}.")
    beside = "Mean score over tasks against time per token"
    spent = "; ".join(
        f"{line.name} at {line.kept} ({line.scores.question}) {line.scores.token_ms:.1f} ms"
        for line in board_lines(found)
        if line.scores.token_ms is not None
    )
    timed = picture(draw_times(found), beside, f"{beside}. Times: {spent}.")
    return as_html(
        f"Leaderboard of {found['model']['name']}",
        [*ABOUT, _facts_line(found)],
        [
            Section(title="Figures", figures=[drawn, timed]),
            *_sections(found),
            facts_section({name: found[name] for name in ("leaderboard", "model", "runs")}),
        ],
    )


def _sections(found: Record) -> list[Section]:
    lines, made = board_lines(found), []
    for setting in _settings_of(found):
        own = [line for line in lines if line.scores.question == setting]
        made.append(Section(title=f"Question {setting}", table=board_table(found, own)))
        made.append(Section(title="Beside the full cache", table=seen_table(own), level=3))
    left_out = [(place, line) for place, lines in found["left_out"].items() for line in lines]
    if left_out:
        headings, caption = ("where", "method, and why"), "Methods that did not take part"
        table = Table(headings=headings, rows=left_out, caption=caption, left=2)
        made.append(Section(title="Left out", table=table))
    return made


def _facts_line(found: Record) -> str:
    model, versions = found["model"], found["leaderboard"]
    runs = found["runs"].items()
    asked = ", ".join(f"{place.replace('/', ' ')} {run['samples']}" for place, run in runs)
    tokens = [row["prompt_tokens"] for row in found["rows"] if row["prompt_tokens"] is not None]
    length = f", prompts of {fmean(tokens):,.0f} tokens on average" if tokens else ""
    return (
        f"{model['name']} ({model['dtype']}, {model['attn_implementation']}, {model['device']})"
        f"{length}; samples: {asked}; snapkv {versions['snapkv']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}."
    )


def write_board(found: Record, folder: Path) -> Path:
    pictures = [drawing.encoded(made, ".svg") for made in (draw(found), draw_times(found))]
    pages = [as_markdown(found), as_page(found)]
    record = json.dumps(found, indent=1) + "\n"
    contents: list[str | bytes] = [record, *pictures, *pages]
    write_files(folder, dict(zip(FILES, contents, strict=True)))
    return folder / FILES[-1]
