"""Markdown made of nothing but rows: cells, tables, and the small tables that other pages show.

A page of tables is `docs/results/tables/NAME.md`. The pages of `PAGES` are written by hand around
tables between `<!-- shown: NAME | SECTION | KEYS -->` and `<!-- end -->`. Such a table says
itself what it shows: its columns by its headings, its lines by their first cells, as many as KEYS;
without KEYS it shows every line. All other cells are copied from the table below that section of
that page.
"""

import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from snapkv.validation import format_bytes
from snapkv_lab.experiments.records import ROOT
from snapkv_lab.report.tables import markdown_table
from snapkv_lab.rows import Row, of

PAGES = (ROOT / "docs/results.md", ROOT / "README.md")

Cell = str | Callable[[Any], str]
"""A pattern that a row fills, such as "{ms[p50]:.1f}", or a function of the row."""


class _Cells(string.Formatter):
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


def cell(pattern: Cell, row: Any) -> str:
    return pattern(row) if callable(pattern) else _Cells().vformat(pattern, (), row)


class Pivot(NamedTuple):
    """A line for each value of `line`, a column for each of `heading`, as they come in the rows.

    Where several rows have the same place the last one counts; where none does, there is `empty`.
    """

    first: str
    line: Cell
    heading: Cell
    of: Cell
    empty: str = "-"


@dataclass(frozen=True)
class Table:
    """A heading, and a table of some of the rows; nothing where there are none of them.

    Attributes:
        columns: cells by their headings, or a pivot.
        title: the heading without its marks, filled by the first row; none for no heading.
        where: what the rows have; a value for each key.
        made: makes of those rows what the table has a line for.
    """

    columns: Mapping[str, Cell] | Pivot
    title: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)
    made: Callable[[list[Row]], Iterable[Any]] = iter

    def parts(self, rows: Sequence[Row]) -> Iterator[str]:
        own = of(rows, **self.where) if self.where else list(rows)
        if own:
            if self.title:
                yield f"## {cell(self.title, own[0])}"
            yield table(self.made(own), self.columns)


def table(rows: Iterable[Any], columns: Mapping[str, Cell] | Pivot) -> str:
    if isinstance(columns, Pivot):
        return _pivoted(list(rows), columns)
    return markdown_table(
        list(columns), [[cell(each, row) for each in columns.values()] for row in rows]
    )


def _pivoted(rows: Sequence[Row], by: Pivot) -> str:
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        found.setdefault(cell(by.line, row), {})[cell(by.heading, row)] = cell(by.of, row)
    headings = list(dict.fromkeys(cell(by.heading, row) for row in rows))
    lines = ([name, *(own.get(each, by.empty) for each in headings)] for name, own in found.items())
    return markdown_table([by.first, *headings], lines)


def filled(text: str, tables: Path) -> str:
    """The text of a page with its tables copied anew from the pages in a folder.

    Raises:
        ValueError: a page has no such line or column, or a line is not the only one of its keys.
    """

    def anew(mark: re.Match[str]) -> str:
        page, section, *keys = mark[1].split(" | ")
        shown = _cells(mark[2].splitlines())
        source = _table_under((tables / f"{page}.md").read_text("utf-8"), section)
        new = _shown(mark[1], source, shown, int(*keys) if keys else 0)
        return f"<!-- shown: {mark[1]} -->\n\n{new}\n\n<!-- end -->"

    return re.sub(r"<!-- shown: (.+?) -->\n(.*?)<!-- end -->", anew, text, flags=re.DOTALL)


def _shown(where: str, source: list[list[str]], shown: list[list[str]], keys: int) -> str:
    """The columns of a table that another shows, of the lines that it shows."""
    (header, _, *lines), (columns, _, *kept) = source, shown
    if missing := set(columns) - set(header):
        raise ValueError(f"{where}: expected columns of {header}, got {sorted(missing)}")
    places = [header.index(column) for column in columns]
    if keys:
        lines = [_line(where, lines, places, line[:keys]) for line in kept]
    return markdown_table(columns, [[line[place] for place in places] for line in lines])


def _line(where: str, lines: list[list[str]], places: list[int], first: list[str]) -> list[str]:
    found = [line for line in lines if [line[place] for place in places[: len(first)]] == first]
    if len(found) != 1:
        raise ValueError(f"{where}: expected one line {' | '.join(first)}, got {found}")
    return found[0]


def _table_under(page: str, section: str) -> list[list[str]]:
    below = dropwhile(lambda line: line.lstrip("# ") != section, page.splitlines())
    from_table = dropwhile(lambda line: not line.startswith("|"), below)
    return _cells(takewhile(lambda line: line.startswith("|"), from_table))


def _cells(lines: Iterable[str]) -> list[list[str]]:
    rows = (line for line in lines if line.startswith("|"))
    return [[each.strip() for each in line.strip("|").split("|")] for line in rows]
