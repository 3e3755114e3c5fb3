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
    changed over, if that is one; else a paragraph per row, with a line per heading. What is too
    long for a line goes on in the next.

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
        lines = [_texts(self.headings), *(_texts(row) for row in self.rows)]
        for layout, left in ((lines, self.left), (_changed_over(lines), 1)):
            widths = _widths(layout, options.max_width)
            if widths is not None:
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


def show(grid: Grid) -> None:
    """Print on standard output; what its encoding cannot express is escaped."""
    console = Console()
    with console.capture() as drawn:
        console.print(grid)
    write(drawn.get())


def say(lines: Iterable[Text], *, to_errors: bool = False) -> None:
    """Print lines, unbroken however long, so that a command in them can be copied."""
    console = Console(stderr=to_errors, soft_wrap=True)
    for line in lines:
        if to_errors:
            console.print(line)
            continue
        with console.capture() as drawn:
            console.print(line)
        write(drawn.get())


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


def _texts(cells: Iterable[Cell]) -> list[Text]:
    return [cell if isinstance(cell, Text) else Text(cell) for cell in cells]


def _changed_over(lines: Sequence[Sequence[Text]]) -> list[list[Text]]:
    """Rows as columns and columns as rows."""
    return [list(line) for line in zip(*lines, strict=True)]


def _widths(lines: Sequence[Sequence[Text]], screen: int) -> list[int] | None:
    """How wide each column is; None where headings or short words would be broken."""
    columns = _changed_over(lines)
    least = [_least(column) for column in columns]
    room = screen - _BORDER * len(columns) - 1
    if sum(least) > room:
        return None
    wanted = [max(_longest(cell.plain.splitlines()) for cell in column) for column in columns]
    # What is left goes to the columns that want more, the most modest of them first.
    widths, left = list(least), room - sum(least)
    hungry = sorted(range(len(columns)), key=lambda place: wanted[place] - least[place])
    for number, place in enumerate(hungry):
        more = min(max(0, wanted[place] - least[place]), -(-left // (len(hungry) - number)))
        widths[place] += more
        left -= more
    return widths


def _least(column: Sequence[Text]) -> int:
    """The width at which no word of a column is broken but those that are very long."""
    words = _longest(word for cell in column for word in cell.plain.split())
    return max(1, min(words, _READABLE))


def _longest(texts: Iterable[str]) -> int:
    return max(map(cell_len, texts), default=0)


def _folded(*parts: Cell) -> Text:
    """A text that goes on in the next line where it is too long for one."""
    return Text.assemble(*parts, overflow="fold")
