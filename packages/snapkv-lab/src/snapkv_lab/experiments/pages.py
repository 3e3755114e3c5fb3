"""Pages of tables that consist only of rows, and small tables that other pages copy from them.

A page of tables is `docs/results/tables/NAME.md`. The pages of `PAGES` are written by hand around
tables between `<!-- shown: NAME | SECTION | KEYS -->` and `<!-- end -->`. The headings of such a
table say which columns it shows, and the first KEYS cells of a line say which line. Without KEYS it
shows every line. All other cells are copied from the table in that section of that page.
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
    """A heading and a table of some rows. It shows nothing if there are no such rows.

    Attributes:
        columns: the cells of a line by their headings, or a pivot.
        title: the heading; fields of the first row are filled in.
        where: values that the fields of a shown row must have.
        make_lines: turns the rows into what the lines are made of.
    """

    columns: Mapping[str, Cell] | Pivot
    title: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)
    make_lines: Callable[[list[Row]], Iterable[Any]] = iter

    def parts(self, rows: Sequence[Row]) -> Iterator[str]:
        """Yield the heading, if there is one, and the table in Markdown format. Nothing is yielded
        if no row has the values of `where`.
        """
        own = select_rows(rows, **self.where) if self.where else list(rows)
        if own:
            if self.title:
                yield f"## {format_cell(self.title, own[0])}"
            yield render_rows(self.make_lines(own), self.columns)


def refresh_tables(text: str, tables: Path) -> str:
    """Return the text of a page with its tables copied again from the pages in a folder.

    Args:
        text: the page, with marks as the docstring of this module describes them.
        tables: the folder of the pages of tables.

    Raises:
        FileNotFoundError: there is no page of a name in a mark.
        ValueError: a page has no such section, line or column, or several lines have the same keys.
    """

    def anew(mark: re.Match[str]) -> str:
        page, section, *keys = mark[1].split(" | ")
        shown = _split_cells(mark[2].splitlines())
        source = _read_table((tables / f"{page}.md").read_text("utf-8"), section)
        new = _copy_table(mark[1], source, shown, int(*keys) if keys else 0)
        return f"<!-- shown: {mark[1]} -->\n\n{new}\n\n<!-- end -->"

    return re.sub(r"<!-- shown: (.+?) -->\n(.*?)<!-- end -->", anew, text, flags=re.DOTALL)


def _copy_table(where: str, source: list[list[str]], shown: list[list[str]], keys: int) -> str:
    """Return a copy of the table with the columns and the lines that are shown.

    Args:
        where: the mark of the table, for error messages.
        source: the cells of the table to copy from.
        shown: the cells of the table as it is now.
        keys: how many first cells identify a line; 0 for all lines.

    Raises:
        ValueError: the source has no such column or line, or several such lines.
    """
    (header, _, *lines), (columns, _, *kept) = source, shown
    if missing := set(columns) - set(header):
        raise ValueError(f"{where}: expected columns of {header}, but got {sorted(missing)}")
    places = [header.index(column) for column in columns]
    if keys:
        lines = [_find_line(where, lines, places, line[:keys]) for line in kept]
    return markdown_table(columns, [[line[place] for place in places] for line in lines])


def _find_line(
    where: str, lines: list[list[str]], places: list[int], first: list[str]
) -> list[str]:
    """Return the line of the table whose first shown cells are the given ones.

    Args:
        where: the mark of the table, for the error message.
        lines: the lines of the table.
        places: the indices of the shown columns.
        first: the cells that identify the line.

    Raises:
        ValueError: no line or several lines begin with them.
    """
    matching = [line for line in lines if [line[place] for place in places[: len(first)]] == first]
    if len(matching) != 1:
        raise ValueError(f"{where}: expected one line {' | '.join(first)}, but got {matching}")
    return matching[0]


def _read_table(page: str, section: str) -> list[list[str]]:
    below = dropwhile(lambda line: line.lstrip("# ") != section, page.splitlines())
    from_table = dropwhile(lambda line: not line.startswith("|"), below)
    return _split_cells(takewhile(lambda line: line.startswith("|"), from_table))


def _split_cells(lines: Iterable[str]) -> list[list[str]]:
    rows = (line for line in lines if line.startswith("|"))
    return [[each.strip() for each in line.strip("|").split("|")] for line in rows]
