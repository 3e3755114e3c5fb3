"""Tables of texts, for a terminal, a page or Markdown, and how numbers stand in them."""

import html
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from snapkv.validation import format_bytes
from snapkv_lab.evaluate.intervals import Measure, excludes_zero
from snapkv_lab.rows import Row


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of texts; the first `left` columns are words, the others numbers; `bold` are places."""

    title: str = ""
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    left: int = 1
    bold: frozenset[tuple[int, int]] = frozenset()

    def as_markdown(self) -> str:
        lines = []
        for row, texts in enumerate(self.rows):
            marks = ["**" if (row, column) in self.bold else "" for column in range(len(texts))]
            lines.append(
                [m + escape_markdown(text) + m for m, text in zip(marks, texts, strict=True)]
            )
        return markdown_table([*map(escape_markdown, self.headings)], lines, self.left)


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Cells as they are; the first `left` columns are left-aligned, numbers stand on the right."""
    rule = ["---"] * left + ["---:"] * (len(headings) - left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [headings, rule, *rows])


def escape_markdown(text: str) -> str:
    """Text that Markdown takes for nothing else."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|").replace("*", "\\*")


# Tables of rows.

Cell = str | Callable[[Any], str]
"""A pattern that a row fills, such as "{ms[p50]:.1f}", or a function of the row."""


class _Patterns(string.Formatter):
    """Patterns over rows. None is an empty cell; three formats more than Python's.

    `bytes`; `seconds|.2f` of milliseconds; `spread|.3f`, a median with 20th and 80th percentile.
    """

    def format_field(self, value: Any, format_spec: str) -> str:
        kind, _, rest = format_spec.partition("|")
        if value is None:
            return ""
        if kind == "bytes":
            return format_bytes(value)
        if kind == "seconds":
            return format(value / 1000, rest)
        if kind == "spread":
            middle, low, high = (format(value[name], rest) for name in ("p50", "p20", "p80"))
            return f"{middle} ({low} to {high})"
        return str(super().format_field(value, format_spec))


def format_cell(pattern: Cell, row: Any) -> str:
    return pattern(row) if callable(pattern) else _Patterns().vformat(pattern, (), row)


class Pivot(NamedTuple):
    """A line for each value of `line`, a column for each of `heading`, as they come in the rows.

    Where several rows have the same place the last one counts; where none does, there is `empty`.
    """

    first: str
    line: Cell
    heading: Cell
    of: Cell
    empty: str = "-"


def render_rows(rows: Iterable[Any], columns: Mapping[str, Cell] | Pivot) -> str:
    if isinstance(columns, Pivot):
        return _render_pivot(list(rows), columns)
    return markdown_table(
        list(columns), [[format_cell(each, row) for each in columns.values()] for row in rows]
    )


def _render_pivot(rows: Sequence[Row], by: Pivot) -> str:
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        found.setdefault(format_cell(by.line, row), {})[format_cell(by.heading, row)] = format_cell(
            by.of, row
        )
    headings = list(dict.fromkeys(format_cell(by.heading, row) for row in rows))
    lines = ([name, *(own.get(each, by.empty) for each in headings)] for name, own in found.items())
    return markdown_table([by.first, *headings], lines)


# Numbers.


class Scale(NamedTuple):
    """How numbers of a table are written: times what, and with how many digits."""

    times: int
    digits: int

    def text(self, number: float | None, sign: str = "") -> str:
        """A number, with its sign where that is "+"; a dash for none."""
        return "-" if number is None else f"{self.times * number:{sign}z.{self.digits}f}"

    def interval(self, ends: Sequence[float] | None) -> str:
        """An interval, or why there is none, or none with a width."""
        if ends is None:
            return "one sample"
        if ends[0] == ends[1]:
            return "no spread"
        return f"{self.text(ends[0])} to {self.text(ends[1])}"


IN_PERCENT, IN_NATS = Scale(100, 1), Scale(1, 3)
"""How scores are written, and losses."""


def format_difference(difference: Row | None, of: Measure = "score") -> str:
    """A difference with its interval, and whether none is seen; a dash for None."""
    if difference is None:
        return "-"
    scale = IN_PERCENT if of == "score" else IN_NATS
    seen = (
        ""
        if difference["interval"] is None or excludes_zero(difference)
        else ", no difference seen"
    )
    return f"{scale.text(difference[of], '+')} ({scale.interval(difference['interval'])}){seen}"


def format_optional_bytes(count: float | None) -> str:
    return "-" if count is None else format_bytes(round(count))
