"""Tables for all commands, in which nothing is cut off, however narrow the terminal is."""

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
"""The content of a table cell. A str is shown literally, so its brackets are not markup."""

_READABLE = 20
"""The width in screen columns up to which a word is not wrapped. Longer words are wrapped, for
instance links or the parameters of a method."""

_BORDER = 3
"""The number of screen columns that a column of a table takes in addition to its text."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Rows under headings, which are laid out for the width of the screen.

    The rows become a table if it fits and only very long words must be wrapped. If it does not fit,
    the transposed table is tried. If that does not fit either, each row becomes a paragraph with a
    line for each heading.

    Attributes:
        headings: one heading for each column.
        rows: the rows, with one cell for each column.
        title: the text above the table; may be empty.
        caption: the text below the table; may be empty.
        left: the number of columns, from the first, with left-aligned text; the other columns hold
            numbers.
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
        transposed = [list(line) for line in zip(*lines, strict=True)]
        for layout, columns, left in ((lines, transposed, self.left), (transposed, lines, 1)):
            if widths := _choose_widths(columns, options.max_width):
                yield self._table(layout, widths, left)
                return
        yield from self._paragraphs(lines)

    def _table(self, lines: Sequence[Sequence[Text]], widths: Sequence[int], left: int) -> Table:
        table = Table(title=_wrapping(self.title), caption=_wrapping(self.caption))
        for place, (heading, width) in enumerate(zip(lines[0], widths, strict=True)):
            justify = "left" if place < left else "right"
            table.add_column(heading, width=width, justify=justify, overflow="fold")  # type: ignore[arg-type] # a Literal
        for number, line in enumerate(lines[1:]):
            table.add_row(*line, end_section=self.ruled and not number)
        return table

    def _paragraphs(self, lines: Sequence[Sequence[Text]]) -> Iterator[Text]:
        if self.title:
            yield _wrapping(self.title)
        for line in lines[1:]:
            yield Text()
            for heading, cell in zip(lines[0], line, strict=True):
                name = heading.plain.strip()
                yield _wrapping(f"{name}: " if name else "", cell)
        if self.caption:
            yield _wrapping(self.caption)


def _text(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(without_controls(cell))


def _wrapping(*parts: Cell) -> Text:
    """Join the parts to a text that is wrapped if it is too long for one line."""
    return Text.assemble(*parts, overflow="fold")


def _choose_widths(columns: Sequence[Sequence[Text]], screen: int) -> list[int]:
    """Return the width of each column of a table, without its borders.

    Args:
        columns: the cells of each column, the heading included.
        screen: the width of the screen.

    Returns:
        The widths in screen columns; empty if the screen is too narrow, so that words of up to
        `_READABLE` columns would have to be wrapped.
    """
    widths, wanted = [], []
    for column in columns:
        words = _longest(word for cell in column for word in cell.plain.split())
        widths.append(max(1, min(words, _READABLE)))
        wanted.append(_longest(line for cell in column for line in cell.plain.splitlines()))
    left = screen - _BORDER * len(columns) - 1 - sum(widths)
    if left < 0:
        return []
    # Share the columns that are left, beginning with the column that needs the fewest.
    by_need = sorted(range(len(columns)), key=lambda place: wanted[place] - widths[place])
    for number, place in enumerate(by_need):
        more = min(max(0, wanted[place] - widths[place]), -(-left // (len(by_need) - number)))
        widths[place] += more
        left -= more
    return widths


def _longest(texts: Iterable[str]) -> int:
    return max(map(cell_len, texts), default=0)


def show(grid: Grid | Text, *, soft_wrap: bool = False) -> None:
    """Print a table or a text on standard output.

    Characters that the encoding of standard output does not have are escaped. With `soft_wrap`,
    long lines are not wrapped.
    """
    console = Console(soft_wrap=soft_wrap)
    console.width = console.width or 80  # COLUMNS=0 means that the width is unknown
    with console.capture() as drawn:
        console.print(grid)
    write_drawn(drawn.get())


def say(lines: Iterable[Text], *, to_errors: bool = False) -> None:
    """Print lines without wrapping, so that a command in them can be copied.

    They go to standard output, or to standard error with `to_errors`.
    """
    for line in lines:
        if to_errors:
            Console(stderr=True, soft_wrap=True).print(line)
        else:
            show(line, soft_wrap=True)


def give(
    found: dict[str, Any], grid: Callable[[], Grid], *, as_json: bool, place: str = ""
) -> None:
    """Print a result on standard output, as one JSON object or as a table.

    Args:
        found: the JSON object.
        grid: builds the table; only called if the table is printed.
        as_json: whether to print the object.
        place: a line about where the full record is, which follows the table on standard error;
            empty for no line.
    """
    if as_json:
        write_json(found)
        return
    show(grid())
    if place:
        typer.echo(place, err=True)
