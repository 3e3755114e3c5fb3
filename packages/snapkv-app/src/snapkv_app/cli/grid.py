"""Tables of all commands: nothing is cut off, however narrow the terminal is."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from snapkv.validation import without_controls
from snapkv_app.cli.standard_output import write_drawn, write_json

Cell = str | Text
"""Content of a table cell. A str is shown literally: its brackets are not markup."""

_READABLE = 20
"""Widest word of a cell or heading, in screen columns, that is not wrapped; longer ones are, for
instance links or the parameters of a method."""

_BORDER = 3
"""Screen columns that a column of a table takes besides its text."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Rows under headings, laid out for the width of the screen.

    A table if only very long words must be wrapped; else the transposed table, under the same
    condition; else a paragraph per row, with a line per heading.

    Attributes:
        headings: one per column.
        rows: as many cells each.
        title: above it, or none.
        caption: below it, or none.
        left: how many of the first columns are left-aligned text; the others are numbers.
        ruled: whether to draw a line below the first row of a table.
    """

    headings: tuple[Cell, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    caption: str = ""
    left: int = 1
    ruled: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [[_text(cell) for cell in line] for line in (self.headings, *self.rows)]
        changed_over = [list(line) for line in zip(*lines, strict=True)]
        for layout, columns, left in ((lines, changed_over, self.left), (changed_over, lines, 1)):
            if widths := _widths(columns, options.max_width):
                yield self._table(layout, widths, left)
                return
        yield from self._paragraphs(lines)

    def _table(self, lines: Sequence[Sequence[Text]], widths: Sequence[int], left: int) -> Table:
        table = Table(title=_folded(self.title), caption=_folded(self.caption))
        for place, (heading, width) in enumerate(zip(lines[0], widths, strict=True)):
            justify = "left" if place < left else "right"
            table.add_column(heading, width=width, justify=justify, overflow="fold")  # type: ignore[arg-type] # a Literal
        for number, line in enumerate(lines[1:]):
            table.add_row(*line, end_section=self.ruled and not number)
        return table

    def _paragraphs(self, lines: Sequence[Sequence[Text]]) -> Iterator[Text]:
        if self.title:
            yield _folded(self.title)
        for line in lines[1:]:
            yield Text()
            for heading, cell in zip(lines[0], line, strict=True):
                named = heading.plain.strip()
                yield _folded(f"{named}: " if named else "", cell)
        if self.caption:
            yield _folded(self.caption)


def _text(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(without_controls(cell))


def _folded(*parts: Cell) -> Text:
    """A text that is wrapped if it is too long for one line."""
    return Text.assemble(*parts, overflow="fold")


def _widths(columns: Sequence[Sequence[Text]], screen: int) -> list[int]:
    """The width of each column; None if headings or short words would be wrapped."""
    widths, wanted = [], []
    for column in columns:
        words = _longest(word for cell in column for word in cell.plain.split())
        widths.append(max(1, min(words, _READABLE)))
        wanted.append(_longest(line for cell in column for line in cell.plain.splitlines()))
    left = screen - _BORDER * len(columns) - 1 - sum(widths)
    if left < 0:
        return []
    # Share what is left, beginning with the columns that lack least.
    hungry = sorted(range(len(columns)), key=lambda place: wanted[place] - widths[place])
    for number, place in enumerate(hungry):
        more = min(max(0, wanted[place] - widths[place]), -(-left // (len(hungry) - number)))
        widths[place] += more
        left -= more
    return widths


def _longest(texts: Iterable[str]) -> int:
    return max(map(cell_len, texts), default=0)


def show(grid: Grid | Text, *, soft_wrap: bool = False) -> None:
    """Print on standard output; characters outside its encoding are escaped."""
    console = Console(soft_wrap=soft_wrap)
    console.width = console.width or 80  # COLUMNS=0 says that nobody knows
    with console.capture() as drawn:
        console.print(grid)
    write_drawn(drawn.get())


def say(lines: Iterable[Text], *, to_errors: bool = False) -> None:
    """Print lines without wrapping, so that a command in them can be copied."""
    for line in lines:
        if to_errors:
            Console(stderr=True, soft_wrap=True).print(line)
        else:
            show(line, soft_wrap=True)


def give(
    found: dict[str, Any], grid: Callable[[], Grid], *, as_json: bool, place: str = ""
) -> None:
    """Print a result as one JSON object, or as a table and then the path of the full record."""
    if as_json:
        write_json(found)
        return
    show(grid())
    if place:
        typer.echo(place, err=True)
