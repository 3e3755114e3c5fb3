"""Pages made of nothing but rows, and the small tables that other pages show of them.

A page of tables is `docs/results/tables/NAME.md`. The pages of `PAGES` are written by hand around
tables between `<!-- shown: NAME | SECTION | KEYS -->` and `<!-- end -->`. Such a table says
itself what it shows: its columns by its headings, its lines by their first cells, as many as KEYS;
without KEYS it shows every line. All other cells are copied from the table below that section of
that page.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

from snapkv_lab.experiments.records import ROOT
from snapkv_lab.report.tables import Cell, Pivot, format_cell, markdown_table, render_rows
from snapkv_lab.rows import Row, select_rows

PAGES = *(ROOT / f"docs/{name}.md" for name in ("results", "paper", "gpu")), ROOT / "README.md"


@dataclass(frozen=True)
class Listing:
    """A heading, and a table of some of the rows; nothing where there are none of them.

    The columns are cells by their headings, or a pivot; the first row fills the title, if any. Of
    the rows that have a value for each key of `where`, `made` makes what there is a line for.
    """

    columns: Mapping[str, Cell] | Pivot
    title: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)
    made: Callable[[list[Row]], Iterable[Any]] = iter

    def parts(self, rows: Sequence[Row]) -> Iterator[str]:
        own = select_rows(rows, **self.where) if self.where else list(rows)
        if own:
            if self.title:
                yield f"## {format_cell(self.title, own[0])}"
            yield render_rows(self.made(own), self.columns)


def refresh_tables(text: str, tables: Path) -> str:
    """The text of a page with its tables copied again from the pages in a folder.

    Raises:
        ValueError: a page has no such line or column, or a line is not the only one of its keys.
    """

    def anew(mark: re.Match[str]) -> str:
        page, section, *keys = mark[1].split(" | ")
        shown = _split_cells(mark[2].splitlines())
        source = _read_table((tables / f"{page}.md").read_text("utf-8"), section)
        new = _copy_table(mark[1], source, shown, int(*keys) if keys else 0)
        return f"<!-- shown: {mark[1]} -->\n\n{new}\n\n<!-- end -->"

    return re.sub(r"<!-- shown: (.+?) -->\n(.*?)<!-- end -->", anew, text, flags=re.DOTALL)


def _copy_table(where: str, source: list[list[str]], shown: list[list[str]], keys: int) -> str:
    """The columns of a table that another shows, of the lines that it shows."""
    (header, _, *lines), (columns, _, *kept) = source, shown
    if missing := set(columns) - set(header):
        raise ValueError(f"{where}: expected columns of {header}, got {sorted(missing)}")
    places = [header.index(column) for column in columns]
    if keys:
        lines = [_find_line(where, lines, places, line[:keys]) for line in kept]
    return markdown_table(columns, [[line[place] for place in places] for line in lines])


def _find_line(
    where: str, lines: list[list[str]], places: list[int], first: list[str]
) -> list[str]:
    found = [line for line in lines if [line[place] for place in places[: len(first)]] == first]
    if len(found) != 1:
        raise ValueError(f"{where}: expected one line {' | '.join(first)}, got {found}")
    return found[0]


def _read_table(page: str, section: str) -> list[list[str]]:
    below = dropwhile(lambda line: line.lstrip("# ") != section, page.splitlines())
    from_table = dropwhile(lambda line: not line.startswith("|"), below)
    return _split_cells(takewhile(lambda line: line.startswith("|"), from_table))


def _split_cells(lines: Iterable[str]) -> list[list[str]]:
    rows = (line for line in lines if line.startswith("|"))
    return [[each.strip() for each in line.strip("|").split("|")] for line in rows]
