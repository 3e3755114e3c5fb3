"""Experiments, and the one way to run them, to store their rows and to write their pages.

A module of this package declares an experiment: its parameters, a function that yields rows, and
its tables as data. The rows are in `docs/results/NAME.jsonl`, and the page is
`docs/results/tables/NAME.md`.
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
    """A parameter that has one value for stored results and another for small runs."""

    full: Any
    small: Any


class RunContext(SimpleNamespace):
    """The settings of a run, including the parameters of the experiment.

    Attributes:
        parts: names of the parts to measure.
        small: whether little is measured and only printed.
        model: the model, as `snapkv ask --model` takes it.
        of_model: the model whose rows are stored in `docs/results`; None for any.
        dtype: the type of the weights and of the cache.
        started: when the run started, by `time.monotonic`.
    """

    parts: Sequence[str] = ()
    small: bool = False
    model: str = "demo"
    of_model: str | None = "demo"
    dtype: str = "auto"
    started: float = 0.0

    @functools.cached_property
    def loaded(self) -> LoadedModel:
        """The model and its tokenizer. They are loaded when they are used for the first time."""
        return load(self.model, dtype=self.dtype)

    def documents(self, tokens: int, count: int = 1) -> list[NeedlePrompt]:
        """Return `count` prompts with the given number of tokens, see `prompts.make_documents`."""
        return make_documents(self.loaded.tokenizer, prompt_tokens=tokens, count=count)

    @property
    def is_stored(self) -> bool:
        """Whether the results of the run are stored in the documentation, and not only printed.

        They are not stored for a small run, and for a model that is not `of_model`.
        """
        return not self.small and self.of_model in (None, self.model)

    def prompt(self, tokens: int) -> list[int]:
        """Return the token ids of a prompt with the given number of tokens and a magic number."""
        return self.documents(tokens)[0].prompt_ids


def describe_run(context: RunContext) -> Row:
    """Return "model" and "environment", the descriptions that are added to the rows.

    This loads the model.
    """
    return {"model": context.loaded.description(), "environment": describe_environment()}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A question, the functions that measure its rows, and the tables that show them.

    Attributes:
        name: the name of the command, the rows and the page.
        title: the title of the page.
        measure: yields the rows of a run; or one such function per part. The rows of a part replace
            its old rows. None if the rows are made elsewhere.
        cases: yields the cases of a part, each with a unique `name`, which its rows have as "text".
            The rows are stored after every case, and a later run continues after them. `measure`
            then also takes a case.
        part_key: the field of a row that has its part.
        options: parameters with their defaults. Numbers, texts and tuples of them are options of
            the command. If some are a `Size`, the experiment has a small form.
        fields: fields that are added to every row.
        describe: returns the description of model and machine that is added to rows.
        prepare: runs before the measurements; it may end the run.
        duration: how long a run takes on two cores.
        threads: how many threads torch and started processes use.
        tables: the contents of the page; None if there is no page.
        origin: returns the sentence of the page about where the rows were measured.
        load: returns what the page shows; by default the rows of the file.
        draw: makes further files, such as figures.
    """

    name: str
    title: str
    measure: Callable[..., Iterable[Row]] | Mapping[str, Callable[..., Iterable[Row]]] | None = None
    cases: Callable[[RunContext, str], Iterable[Any]] | None = None
    part_key: str = "part"
    options: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    describe: Callable[[RunContext], Row] = describe_run
    prepare: Callable[["Experiment", RunContext], object] | None = None
    duration: str = "minutes"
    threads: int | None = None
    tables: Sequence[Listing] | Callable[[Any], Iterable[str]] | None = None
    origin: Callable[[Any], str] = environment_line
    load: Callable[[], Any] | None = None
    draw: Callable[[Any], object] | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of all parts of the experiment; empty if it has no parts."""
        return tuple(self.measure) if isinstance(self.measure, Mapping) else ()

    @property
    def rows(self) -> Path:
        """The file of the rows, `docs/results/NAME.jsonl`."""
        return RESULTS / f"{self.name}.jsonl"

    @property
    def page(self) -> Path:
        """The file of the page, `docs/results/tables/NAME.md`."""
        return RESULTS / "tables" / f"{self.name}.md"

    def results(self) -> Any:
        """Return what the page shows: the result of `load`, or else a list of all stored rows.

        Without a file of rows, the list is empty.
        """
        if self.load is not None:
            return self.load()
        return read_rows(self.rows) if self.rows.exists() else []

    def render(self, rows: Any) -> str:
        """Return the contents of the page as Markdown.

        Args:
            rows: what `results` returns.
        """
        origin = f"Made by `python -m snapkv_lab.experiments {self.name}`. {self.origin(rows)}."
        if callable(self.tables):
            parts = self.tables(rows)
        else:
            parts = itertools.chain.from_iterable(each.parts(rows) for each in self.tables or ())
        return "\n\n".join([f"# {self.title}", origin, *parts]) + "\n"

    def context(self, **parameters: Any) -> RunContext:
        """Return the settings of a run, with default values for all missing parameters.

        The run starts now, unless `started` is given.
        """
        small = parameters.get("small", False)
        own = {
            name: each[small] if isinstance(each, Size) else each
            for name, each in self.options.items()
        }
        return RunContext(**{"parts": self.parts, "started": time.monotonic(), **own, **parameters})

    def measure_rows(self, context: RunContext) -> Iterator[Row]:
        """Run the measurements of the parts of the run, and yield the rows.

        Each row is also printed to standard error. Rows of cases are also stored, if the results of
        the run are to be stored; other rows are not.
        """
        for part in context.parts or ("",):
            yield from self._measure_part(context, part)

    def _measure_part(self, context: RunContext, part: str) -> Iterator[Row]:
        """Yield the rows of one part with all of their fields, and print each to standard error.

        Rows of cases are stored here; other rows get the description of model and machine.
        """
        measure = self.measure[part] if isinstance(self.measure, Mapping) else self.measure
        assert measure is not None
        if self.cases is not None:
            rows = self._measure_cases(context, part, measure)
        else:
            fields = self._part_fields(part)
            rows = (fields | row | self.fields for row in measure(context))
        about: Row = {}
        for row in rows:
            print(row, file=sys.stderr)
            if self.cases is None:
                about = about or self.describe(context)
            yield about | row

    def _measure_cases(
        self, context: RunContext, part: str, measure: Callable[..., Iterable[Row]]
    ) -> Iterator[Row]:
        """Yield the rows of every case that has none yet, and store them case by case, unless the
        results of the run are only printed.

        Args:
            context: the run.
            part: the name of the part; empty if the experiment has no parts.
            measure: yields the rows of a case, from the run and the case.
        """
        run = ({"run": part} if part else {}) | self.describe(context)
        if context.is_stored and run not in self.results():
            self._append(run)
        for case in self.remaining(context, part):
            rows = [self._part_fields(part) | row for row in measure(context, case)]
            if context.is_stored:
                self._append(*rows)
            yield from rows

    def _append(self, *rows: Row) -> None:
        with RowFile(self.rows) as file:
            file.read()  # removes a line that was cut off
            file.add(*rows)

    def remaining(self, context: RunContext, part: str) -> Iterator[Any]:
        """Yield the cases of a part that have no stored row, or all if the run stores nothing.

        The stored rows are read again before each case, because another process may add some.
        """
        assert self.cases is not None
        for case in self.cases(context, part):
            fields = self._part_fields(part) | {"text": case.name}
            if not (context.is_stored and select_rows(self.results(), **fields)):
                yield case

    def _part_fields(self, part: str) -> Row:
        return {self.part_key: part} if part else {}

    def store(self, context: RunContext) -> None:
        """Run the measurements and store the rows of each part when it is complete.

        They replace the old rows of the part. Rows of cases are stored case by case instead, and an
        experiment with its own `load` stores its results itself.
        """
        for part in context.parts or ("",):
            rows = list(self._measure_part(context, part))
            if self.cases is None and self.load is None:  # other rows are stored already
                others = [row for row in self.results() if self._part(row) != part]
                write_rows(self.rows, sorted([*others, *rows], key=self._place))

    def _part(self, row: Row) -> str:
        return str(row[self.part_key]) if self.parts else ""

    def _place(self, row: Row) -> int:
        part = self._part(row)
        return self.parts.index(part) if part in self.parts else len(self.parts)

    def write(self) -> None:
        """Write the page from the stored results. Its folder is made if it is missing."""
        self.page.parent.mkdir(parents=True, exist_ok=True)
        self.page.write_text(self.render(self.results()), encoding="utf-8")

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Run the experiment from the command line.

        It measures and stores the rows, draws figures, and writes the page. If the results of the
        run are not to be stored, it only prints the rows. With `--render` nothing is measured.

        Args:
            arguments: the arguments after the name of the experiment; None for those of this
                process.

        Raises:
            SystemExit: an argument is wrong, or `prepare` ended the run.
        """
        options = vars(self._parser().parse_args(arguments))
        render = options.pop("render", False)
        options["parts"] = options.get("parts") or self.parts
        context = self.context(**{name: each for name, each in options.items() if each is not None})
        if self.threads is not None:
            torch.set_num_threads(self.threads)
            os.environ["OMP_NUM_THREADS"] = str(self.threads)
        if self.measure is not None and not render:
            if self.prepare is not None:
                self.prepare(self, context)
            if not context.is_stored:
                print("\n".join(map(json.dumps, self.measure_rows(context))))
                return
            self.store(context)
        if self.draw is not None:
            self.draw(self.results())
        if self.tables is not None:
            self.write()
            print(self.page.read_text(encoding="utf-8"))

    def _parser(self) -> argparse.ArgumentParser:
        """Return the parser of the experiment's options.

        There is an option for each parameter whose default is a number, a text, or a tuple of
        values of one of these types. The other options depend on what the experiment can do.
        """
        parser = argparse.ArgumentParser(
            prog=f"snapkv_lab.experiments {self.name}",
            description=f"{self.title}. It takes {self.duration}.",
        )
        if self.measure is not None:
            parser.add_argument(
                "--model", help="another model than demo: print the rows, store nothing"
            )
        if self.tables is not None:
            parser.add_argument(
                "--render", action="store_true", help="only write the page, from stored rows"
            )
        if any(isinstance(each, Size) for each in self.options.values()):
            parser.add_argument(
                "--small", action="store_true", help="measure little, and only print it"
            )
        if self.parts:
            parser.add_argument(
                "--part", action="append", dest="parts", choices=self.parts, help="by default, all"
            )
        context = self.context()
        for name in self.options:
            default = getattr(context, name)
            kinds = {type(each) for each in (default if isinstance(default, tuple) else (default,))}
            if len(kinds) == 1 and kinds <= {int, float, str}:
                several = "+" if isinstance(default, tuple) else None
                flag = f"--{name.replace('_', '-')}"
                parser.add_argument(flag, type=kinds.pop(), nargs=several, help=f"{default}")
        return parser


def load_experiments() -> dict[str, Experiment]:
    """Import all modules of this package that declare an experiment, and return the experiments.

    They are in alphabetical order by name. Without the plugin for vLLM, experiments that need it
    are left out.
    """
    experiments: dict[str, Experiment] = {}
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        if " = Experiment(" in path.read_text("utf-8"):
            try:
                module = importlib.import_module(f"{__package__}.{path.stem}")
            except ModuleNotFoundError as error:
                if error.name != "snapkv_vllm":
                    raise
                continue  # the plugin for vLLM is not installed
            own = (each for each in vars(module).values() if isinstance(each, Experiment))
            experiments |= {each.name: each for each in own}
    return dict(sorted(experiments.items()))


def _write_all(known: object) -> None:
    """Write every page of tables again, and the tables that other pages show of them.

    Pages of experiments without results are left as they are.

    Raises:
        ValueError: a page shows a line or a column that its table does not have.
    """
    for each in load_experiments().values():
        if each.tables is not None and each.results():
            each.write()
    for page in PAGES:
        page.write_text(
            refresh_tables(page.read_text("utf-8"), RESULTS / "tables"), encoding="utf-8"
        )


RESULTS_PAGES = Experiment(
    name="results",
    title="Every page of tables, and what other pages show of them",
    draw=_write_all,
)
