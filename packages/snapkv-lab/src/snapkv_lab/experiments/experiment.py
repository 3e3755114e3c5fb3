"""What an experiment is, and the one way to run it, to store its rows and to draw its page.

An experiment is a file with a declaration, `EXPERIMENT`, a function that yields rows, and tables
as data. Rows: `docs/results/NAME.jsonl`; page: `docs/results/tables/NAME.md`.
"""

import argparse
import itertools
import json
import os
import string
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from snapkv.app.models import LoadedModel, load
from snapkv.validation import format_bytes
from snapkv_lab.experiments.environment import describe_environment
from snapkv_lab.experiments.records import (
    RESULTS,
    TABLES,
    Row,
    environment_line,
    markdown_table,
    read_rows,
    tables_page,
    write_rows,
)

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
    """The cell that a row gives."""
    return pattern(row) if callable(pattern) else _Cells().vformat(pattern, (), row)


def table(rows: Iterable[Any], columns: Mapping[str, Cell]) -> str:
    """A line for each row; columns by their headings."""
    return markdown_table(
        list(columns), ([cell(each, row) for each in columns.values()] for row in rows)
    )


def pivot(rows: Sequence[Row], first: str, line: Cell, heading: Cell, of: Cell) -> str:
    """A line for each value of `line`, a column for each of `heading`, as they come in the rows.

    Args:
        rows: where several have the same place the last one counts.
        first: the heading of the lines.
        line: a row's line.
        heading: a row's column.
        of: what stands there; "-" where no row does.
    """
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        found.setdefault(cell(line, row), {})[cell(heading, row)] = cell(of, row)
    headings = list(dict.fromkeys(cell(heading, row) for row in rows))
    lines = [[name, *(own.get(each, "-") for each in headings)] for name, own in found.items()]
    return markdown_table([first, *headings], lines)


def of(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """The rows with these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


@dataclass(frozen=True)
class Shown:
    """A part of a table of a page, copied into docs/results.md or README.md.

    Attributes:
        section: the heading right above it, perhaps the page's title.
        columns: by their headings, in the order in which they are shown.
        rows: by their first cells, joined by bars, as many as tell a row from the others; none
            shows all.
    """

    section: str
    columns: tuple[str, ...]
    rows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Given:
    """What the command line asks of a measurement.

    Attributes:
        parts: names of those that are wanted.
        small: whether little is measured, for a look.
        options: the experiment's own.
    """

    parts: Sequence[str] = ()
    small: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def loaded(self) -> LoadedModel:
        """The demo model."""
        return load("demo")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A question, what measures its rows, and the tables of them.

    Attributes:
        name: of the module, the rows and the page.
        title: of the page.
        measure: yields rows, each of one part where there are parts; those without "model" and
            "environment" get the demo model's and the machine's. None: they are made elsewhere.
        tables: the page's parts behind its title: headings and tables.
        measured: what the page says about where the rows were measured.
        shown: by the names of their marks, the tables copied to other pages.
        parts: that can be measured by themselves; their rows replace those of the same parts.
        part_key: a row's key with its part.
        takes: how long it takes on two cores.
        small: whether there is a small form, which is printed and not stored.
        resumes: `measure` stores by itself what it has, and goes on behind what is there.
        threads: of torch, and of processes that it starts.
        options: further ones, with their defaults.
        read: gives what `tables` takes; by default the rows of the file.
        drawn: writes the figures beside the page.
    """

    name: str
    title: str
    tables: Callable[[Any], Iterable[str]]
    measure: Callable[[Given], Iterable[Row]] | None = None
    measured: Callable[[Any], str] = environment_line
    shown: Mapping[str, Shown] = field(default_factory=dict)
    parts: Sequence[str] = ()
    part_key: str = "part"
    takes: str = "minutes"
    small: bool = False
    resumes: bool = False
    threads: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[], Any] | None = None
    drawn: Callable[[Any], None] | None = None

    @property
    def rows(self) -> Path:
        """Where the rows are."""
        return RESULTS / f"{self.name}.jsonl"

    @property
    def page(self) -> Path:
        """Where the page is."""
        return TABLES / f"{self.name}.md"

    def known(self) -> Any:
        """What the page is made of."""
        if self.read is not None:
            return self.read()
        return read_rows(self.rows) if self.rows.exists() else []

    def render(self, rows: Any) -> str:
        """The page of these rows."""
        return tables_page(self.name, self.title, self.measured(rows), *self.tables(rows))

    def write(self) -> None:
        """Make page and figures of the rows that are there."""
        known = self.known()
        self.page.parent.mkdir(exist_ok=True)
        self.page.write_text(self.render(known), encoding="utf-8")
        if self.drawn is not None:
            self.drawn(known)

    def complete(self, given: Given) -> Iterator[Row]:
        """The rows with what they were measured on, each shown as it comes."""
        assert self.measure is not None
        environment = describe_environment()
        for row in self.measure(given):
            if "model" not in row:
                row = row | {"model": given.loaded.description()}
            print(row, file=sys.stderr)
            yield row | {"environment": row.get("environment", environment)}

    def store(self, rows: Iterable[Row]) -> None:
        """Put rows into the file, a part as soon as it is whole."""

        def part(row: Row) -> str:
            return str(row[self.part_key]) if self.parts else ""

        for name, own in itertools.groupby(rows, part):
            new = list(own)
            others = [row for row in self.known() if part(row) != name] if self.parts else []
            places = {each: place for place, each in enumerate(self.parts)}
            write_rows(self.rows, sorted([*others, *new], key=lambda row: places.get(part(row), 0)))

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Measure what is asked for, and make the page of all that is there."""
        parser = argparse.ArgumentParser(
            prog=f"snapkv_lab.experiments {self.name}",
            description=f"{self.title}; {self.takes} on two cores.",
        )
        parser.add_argument("--render", action="store_true", help="only make the page of the rows")
        if self.small:
            parser.add_argument(
                "--small", action="store_true", help="measure little, store nothing"
            )
        if self.parts:
            names = ", ".join(self.parts)
            parser.add_argument("parts", nargs="*", help=f"of {names}; all by default")
            for option in {"--only", "--part", f"--{self.part_key}"}:
                parser.add_argument(option, action="append", dest="chosen", choices=self.parts)
        for name, default in self.options.items():
            several = isinstance(default, tuple)
            parser.add_argument(
                f"--{name.replace('_', '-')}",
                type=type(default[0] if several else default),
                default=default,
                nargs="+" if several else None,
            )
        given = vars(parser.parse_args(arguments))
        asked = [*given.pop("parts", ()), *(given.pop("chosen", None) or ())]
        if unknown := set(asked) - set(self.parts):
            parser.error(f"expected parts of {names}, got {', '.join(unknown)}")
        render, small = given.pop("render"), given.pop("small", False)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
            os.environ["OMP_NUM_THREADS"] = str(self.threads)
        if self.measure is not None and not render:
            what = Given(parts=asked or self.parts, small=small, options=given)
            if small:
                rows = list(self.complete(what))
                print("\n".join(map(json.dumps, rows)))
                return
            if self.resumes:
                for _ in self.measure(what):
                    pass
            else:
                self.store(self.complete(what))
        self.write()
        print(self.page.read_text(encoding="utf-8"))
