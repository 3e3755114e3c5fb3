"""The one way in which commands show rows and columns: nothing is cut off, however narrow it is."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from snapkv.cli.standard_output import write, write_json

Cell = str | Text
"""What stands in a table. A str is shown as it is: brackets in it are no markup."""

_READABLE = 20
"""Columns of the screen that the longest word of a cell or heading may claim; a longer one, such as
a link or the parameters of a method, is folded."""

_BORDER = 3
"""Columns of the screen that a column of a table takes beside its text."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Rows under headings, laid out when it is known how wide the screen is.

    A table where no word but a very long one has to be broken; else the table with rows and columns
    changed over, if that is one; else a paragraph per row, with a line per heading.

    Attributes:
        headings: one per column.
        rows: as many cells each.
        title: above it, or none.
        caption: below it, or none.
        left: how many of the first columns are text, which stands on the left; others are numbers.
        ruled: whether a line stands below the first row of a table.
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
    return cell if isinstance(cell, Text) else Text(cell)


def _folded(*parts: Cell) -> Text:
    """A text that goes on in the next line where it is too long for one."""
    return Text.assemble(*parts, overflow="fold")


def _widths(columns: Sequence[Sequence[Text]], screen: int) -> list[int]:
    """How wide each column is; none where headings or short words would be broken."""
    widths, wanted = [], []
    for column in columns:
        words = _longest(word for cell in column for word in cell.plain.split())
        widths.append(max(1, min(words, _READABLE)))
        wanted.append(_longest(line for cell in column for line in cell.plain.splitlines()))
    left = screen - _BORDER * len(columns) - 1 - sum(widths)
    if left < 0:
        return []
    # What is left goes to the columns that want more, the most modest of them first.
    hungry = sorted(range(len(columns)), key=lambda place: wanted[place] - widths[place])
    for number, place in enumerate(hungry):
        more = min(max(0, wanted[place] - widths[place]), -(-left // (len(hungry) - number)))
        widths[place] += more
        left -= more
    return widths


def _longest(texts: Iterable[str]) -> int:
    return max(map(cell_len, texts), default=0)


def show(grid: Grid | Text, *, soft_wrap: bool = False) -> None:
    """Print on standard output; what its encoding cannot express is escaped."""
    console = Console(soft_wrap=soft_wrap)
    with console.capture() as drawn:
        console.print(grid)
    write(drawn.get())


def say(lines: Iterable[Text], *, to_errors: bool = False) -> None:
    """Print lines, unbroken however long, so that a command in them can be copied."""
    for line in lines:
        if to_errors:
            Console(stderr=True, soft_wrap=True).print(line)
        else:
            show(line, soft_wrap=True)


def give(
    found: dict[str, Any], grid: Callable[[], Grid], *, as_json: bool, place: str = ""
) -> None:
    """Print what was found as one JSON object, or as a table and, behind it, where all of it is."""
    if as_json:
        write_json(found)
        return
    show(grid())
    if place:
        typer.echo(place, err=True)
