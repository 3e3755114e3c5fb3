"""Tables of text for a terminal, a page or Markdown, and how numbers are written in them."""

import html
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from snapkv.validation import format_bytes
from snapkv_lab.evaluate.intervals import Measure, excludes_zero
from snapkv_lab.rows import Row


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of text cells.

    Attributes:
        title: a line above the table.
        headings: one text per column.
        rows: one text per column for every row.
        caption: a line below the table.
        left: how many first columns hold words and are left-aligned; the others hold numbers.
        bold: (row, column) of the cells that are shown in bold.
    """

    title: str = ""
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    left: int = 1
    bold: frozenset[tuple[int, int]] = frozenset()

    def as_markdown(self) -> str:
        """Return the table in Markdown format, without the title and the caption."""
        lines = []
        for row, texts in enumerate(self.rows):
            marks = ["**" if (row, column) in self.bold else "" for column in range(len(texts))]
            lines.append(
                [m + escape_markdown(text) + m for m, text in zip(marks, texts, strict=True)]
            )
        return markdown_table([*map(escape_markdown, self.headings)], lines, self.left)


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table with the given headings and rows.

    The cells are already Markdown. The first `left` columns are left-aligned, and the others are
    right-aligned.
    """
    rule = ["---"] * left + ["---:"] * (len(headings) - left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [headings, rule, *rows])


def escape_markdown(text: str) -> str:
    """Escape HTML and the marks of Markdown in the text, so that a table cell shows it literally.

    The text becomes one line. An underscore inside a word is no mark, and is left as it is.
    """
    return _MARKS.sub(r"\\\g<0>", html.escape(" ".join(text.split()), quote=False))


_MARKS = re.compile(r"[\\`*|~\[\]]|(?<![^\W_])_|_(?![^\W_])")


# Tables of rows.

Cell = str | Callable[[Any], str]
"""Makes the text of a cell: a pattern such as "{ms[p50]:.1f}", which is filled with the fields of a
row, or a function of the row.
"""


class _Patterns(string.Formatter):
    """A formatter that fills a pattern with the values of a row.

    A field that is None gives an empty text. Three formats are added to Python's: `bytes` writes
    bytes with a unit, `seconds|.2f` writes milliseconds as seconds, and `spread|.3f` writes a
    median with its 20th and 80th percentile.
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
    """Return the text of a table cell for the given row.

    A field of a pattern that is None in the row gives an empty text.
    """
    return pattern(row) if callable(pattern) else _Patterns().vformat(pattern, (), row)


class Pivot(NamedTuple):
    """A description of a table whose columns depend on the values in the rows.

    There is one line per `line` and one column per `heading`. If several rows have the same line
    and heading, the last one is shown. A cell without a row shows `empty`. `first` is the heading
    of the first column.
    """

    first: str
    line: Cell
    heading: Cell
    of: Cell
    empty: str = "-"


def render_rows(rows: Iterable[Any], columns: Mapping[str, Cell] | Pivot) -> str:
    """Return a Markdown table of the given rows.

    Args:
        rows: the rows.
        columns: the cell of each column by its heading, for a table with one line per row; or a
            description of a table whose columns depend on the rows.
    """
    if isinstance(columns, Pivot):
        return _render_pivot(list(rows), columns)
    return markdown_table(
        list(columns), [[format_cell(each, row) for each in columns.values()] for row in rows]
    )


def _render_pivot(rows: Sequence[Row], by: Pivot) -> str:
    """Return the Markdown table of a pivot, with lines and columns in order of first appearance in
    the rows.
    """
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        cells.setdefault(format_cell(by.line, row), {})[format_cell(by.heading, row)] = format_cell(
            by.of, row
        )
    headings = list(dict.fromkeys(format_cell(by.heading, row) for row in rows))
    lines = ([name, *(own.get(each, by.empty) for each in headings)] for name, own in cells.items())
    return markdown_table([by.first, *headings], lines)


# Numbers.


class Scale(NamedTuple):
    """The scale and the number of digits with which numbers are shown in a table."""

    times: int
    digits: int

    def text(self, number: float | None, sign: str = "") -> str:
        """Return the number as text, or a dash for None.

        Numbers that are not negative have a plus sign if `sign` is "+".
        """
        return "-" if number is None else f"{self.times * number:{sign}z.{self.digits}f}"

    def interval(self, ends: Sequence[float] | None) -> str:
        """Return the text of a confidence interval, such as "51.0 to 63.5". It is "one sample" for
        None, and "no spread" if both ends are equal.
        """
        if ends is None:
            return "one sample"
        if ends[0] == ends[1]:
            return "no spread"
        return f"{self.text(ends[0])} to {self.text(ends[1])}"


IN_PERCENT, IN_NATS = Scale(100, 1), Scale(1, 3)
"""The scales for scores and for losses."""


def format_difference(difference: Row | None, of: Measure = "score") -> str:
    """Return a difference and its confidence interval as text, such as "+1.2 (0.3 to 2.1)".

    The text ends with ", no difference seen" if the interval contains zero. It is a dash for None.

    Args:
        difference: one of `cell_differences` or `line_differences`, or None.
        of: whether it is a difference of scores, shown times 100, or of losses.
    """
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
    """Return a number of bytes as text with a unit, or a dash for None. It is rounded to a whole
    number of bytes first.
    """
    return "-" if count is None else format_bytes(round(count))
