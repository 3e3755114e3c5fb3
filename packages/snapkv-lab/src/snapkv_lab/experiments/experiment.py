"""What an experiment is, and the one way to run it, to store its rows and to draw its page.

An experiment is declared in a module of this package: its parameters, a function that yields rows,
and its tables as data. Rows: `docs/results/NAME.jsonl`; page: `docs/results/tables/NAME.md`.
"""

import argparse
import functools
import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from snapkv_app.models import LoadedModel, load
from snapkv_lab.experiments.pages import PAGES, Listing, refresh_tables
from snapkv_lab.experiments.prompts import NeedlePrompt, make_documents
from snapkv_lab.experiments.records import RESULTS, describe_environment, environment_line
from snapkv_lab.rows import Row, RowFile, read_rows, select_rows, write_rows


class Size(NamedTuple):
    """A parameter of two sizes: as it is stored, and for a look."""

    full: Any
    small: Any


class RunContext(SimpleNamespace):
    """What a run asks for: the experiment's parameters are further attributes.

    Attributes:
        parts: names of those that are wanted.
        small: whether little is measured, for a look.
        model: what `snapkv ask --model` takes.
        of_model: the one whose rows are for `docs/results`; None for any.
        dtype: of its weights and its cache.
        started: when, by `time.monotonic`.
    """

    parts: Sequence[str] = ()
    small: bool = False
    model: str = "demo"
    of_model: str | None = "demo"
    dtype: str = "auto"
    started: float = 0.0

    @functools.cached_property
    def loaded(self) -> LoadedModel:
        return load(self.model, dtype=self.dtype)

    def documents(self, tokens: int, count: int = 1) -> list[NeedlePrompt]:
        """Prompts of so many tokens with a magic number in each."""
        return make_documents(self.loaded.tokenizer, prompt_tokens=tokens, count=count)

    @property
    def stored(self) -> bool:
        """Whether the rows are for `docs/results`, not for a look."""
        return not self.small and self.of_model in (None, self.model)

    def prompt(self, tokens: int) -> list[int]:
        """Token ids of that length."""
        return self.documents(tokens)[0].prompt_ids


def describe_run(given: RunContext) -> Row:
    """What rows say of model and machine, where they do not say it themselves."""
    return {"model": given.loaded.description(), "environment": describe_environment()}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A question, what measures its rows, and the tables of them.

    Attributes:
        name: of the command, the rows and the page.
        title: of the page.
        measure: yields rows for what is given; by their names where there are parts that can be
            measured by themselves, whose rows replace those of the same part. None: the rows are
            made elsewhere.
        cases: of a part, what is measured one by one, each with a unique `name`, which its rows
            have as "text": they are added to the file after every case, and a later run goes on
            after them. `measure` then takes a case as well.
        part_key: a row's key with its part.
        options: parameters with their defaults; numbers, texts and tuples of them are options of
            the command. Where some have two sizes there is a small form, which is printed and not
            stored.
        fields: what every row has.
        described: what rows say of what they were measured on.
        before: what is done before anything is measured; it may end the run.
        takes: how long it takes on two cores.
        threads: of torch, and of processes that it starts.
        tables: the page after its title; None where there is no page.
        measured: what the page says about where the rows were measured.
        read: gives what the page is made of; by default the rows of the file.
        drawn: makes what else comes of it, such as figures.
    """

    name: str
    title: str
    measure: Callable[..., Iterable[Row]] | Mapping[str, Callable[..., Iterable[Row]]] | None = None
    cases: Callable[[RunContext, str], Iterable[Any]] | None = None
    part_key: str = "part"
    options: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    described: Callable[[RunContext], Row] = describe_run
    before: Callable[["Experiment", RunContext], object] | None = None
    takes: str = "minutes"
    threads: int | None = None
    tables: Sequence[Listing] | Callable[[Any], Iterable[str]] | None = None
    measured: Callable[[Any], str] = environment_line
    read: Callable[[], Any] | None = None
    drawn: Callable[[Any], object] | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.measure) if isinstance(self.measure, Mapping) else ()

    @property
    def rows(self) -> Path:
        return RESULTS / f"{self.name}.jsonl"

    @property
    def page(self) -> Path:
        return RESULTS / "tables" / f"{self.name}.md"

    def known(self) -> Any:
        if self.read is not None:
            return self.read()
        return read_rows(self.rows) if self.rows.exists() else []

    def render(self, rows: Any) -> str:
        made = f"Made by `python -m snapkv_lab.experiments {self.name}`. {self.measured(rows)}."
        if callable(self.tables):
            parts = self.tables(rows)
        else:
            parts = itertools.chain.from_iterable(each.parts(rows) for each in self.tables or ())
        return "\n\n".join([f"# {self.title}", made, *parts]) + "\n"

    def given(self, **parameters: Any) -> RunContext:
        """What a run asks for, where it says nothing else."""
        small = parameters.get("small", False)
        own = {
            name: each[small] if isinstance(each, Size) else each
            for name, each in self.options.items()
        }
        return RunContext(**{"parts": self.parts, "started": time.monotonic(), **own, **parameters})

    def complete(self, given: RunContext) -> Iterator[Row]:
        """The rows of what is asked for, each shown as it comes, with what it was measured on."""
        for part in given.parts or ("",):
            yield from self._measured(given, part)

    def _measured(self, given: RunContext, part: str) -> Iterator[Row]:
        measure = self.measure[part] if isinstance(self.measure, Mapping) else self.measure
        assert measure is not None
        named: Row = {self.part_key: part} if part else {}
        about: Row = {}
        if self.cases is not None:
            rows = self._rows_of_cases(given, part, measure)
        else:
            rows = (named | row | self.fields for row in measure(given))
        for row in rows:
            print(row, file=sys.stderr)
            if self.cases is None:
                about = about or self.described(given)
            yield about | row

    def _rows_of_cases(
        self, given: RunContext, part: str, measure: Callable[..., Iterable[Row]]
    ) -> Iterator[Row]:
        """The rows of every case that has none yet, stored as they come."""
        named = {self.part_key: part} if part else {}
        run = ({"run": part} if part else {}) | self.described(given)
        if given.stored and run not in self.known():
            self._append(run)
        for case in self.remaining(given, part):
            rows = [named | row for row in measure(given, case)]
            if given.stored:
                self._append(*rows)
            yield from rows

    def _append(self, *rows: Row) -> None:
        with RowFile(self.rows) as file:
            file.read()  # without a line that was cut off
            file.add(*rows)

    def remaining(self, given: RunContext, part: str) -> Iterator[Any]:
        """The cases of a part that lack rows; each is looked up when its turn comes."""
        assert self.cases is not None
        for case in self.cases(given, part):
            named = ({self.part_key: part} if part else {}) | {"text": case.name}
            if not (given.stored and select_rows(self.known(), **named)):  # of another process, too
                yield case

    def store(self, given: RunContext) -> None:
        """Measure, and put rows into the file, a part as soon as it is whole."""
        for part in given.parts or ("",):
            rows = list(self._measured(given, part))
            if self.cases is None and self.read is None:  # else they are stored as they come
                others = [row for row in self.known() if self._part(row) != part]
                write_rows(self.rows, sorted([*others, *rows], key=self._place))

    def _part(self, row: Row) -> str:
        return str(row[self.part_key]) if self.parts else ""

    def _place(self, row: Row) -> int:
        part = self._part(row)
        return self.parts.index(part) if part in self.parts else len(self.parts)

    def write(self) -> None:
        self.page.parent.mkdir(parents=True, exist_ok=True)
        self.page.write_text(self.render(self.known()), encoding="utf-8")

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Measure what is asked for, and make the page of all that is there."""
        asked = vars(self._parser().parse_args(arguments))
        render = asked.pop("render", False)
        asked["parts"] = asked.get("parts") or self.parts
        given = self.given(**{name: each for name, each in asked.items() if each is not None})
        if self.threads is not None:
            torch.set_num_threads(self.threads)
            os.environ["OMP_NUM_THREADS"] = str(self.threads)
        if self.measure is not None and not render:
            if self.before is not None:
                self.before(self, given)
            if not given.stored:
                print("\n".join(map(json.dumps, self.complete(given))))
                return
            self.store(given)
        if self.drawn is not None:
            self.drawn(self.known())
        if self.tables is not None:
            self.write()
            print(self.page.read_text(encoding="utf-8"))

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=f"snapkv_lab.experiments {self.name}", description=f"{self.title}; {self.takes}."
        )
        if self.measure is not None:
            parser.add_argument("--model", help="another than demo's: print, store nothing")
        if self.tables is not None:
            parser.add_argument("--render", action="store_true", help="only make the page")
        if any(isinstance(each, Size) for each in self.options.values()):
            parser.add_argument("--small", action="store_true", help="measure little, only print")
        if self.parts:
            parser.add_argument(
                "--part", action="append", dest="parts", choices=self.parts, help="all by default"
            )
        given = self.given()
        for name in self.options:
            default = getattr(given, name)
            kinds = {type(each) for each in (default if isinstance(default, tuple) else (default,))}
            if len(kinds) == 1 and kinds <= {int, float, str}:
                several = "+" if isinstance(default, tuple) else None
                flag = f"--{name.replace('_', '-')}"
                parser.add_argument(flag, type=kinds.pop(), nargs=several, help=f"{default}")
        return parser


def load_experiments() -> dict[str, Experiment]:
    """Every experiment by its name; without the plugin for vLLM only those that need none."""
    found: dict[str, Experiment] = {}
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        if " = Experiment(" in path.read_text("utf-8"):
            try:
                module = importlib.import_module(f"{__package__}.{path.stem}")
            except ModuleNotFoundError as error:
                if error.name != "snapkv_vllm":
                    raise
                continue  # the plugin is not installed
            own = (each for each in vars(module).values() if isinstance(each, Experiment))
            found |= {each.name: each for each in own}
    return dict(sorted(found.items()))


def _write_all(known: object) -> None:
    for each in load_experiments().values():
        if each.tables is not None and each.known():
            each.write()
    for page in PAGES:
        page.write_text(
            refresh_tables(page.read_text("utf-8"), RESULTS / "tables"), encoding="utf-8"
        )


RESULTS_PAGES = Experiment(
    name="results",
    title="Every page of tables, and what other pages show of them",
    drawn=_write_all,
)
