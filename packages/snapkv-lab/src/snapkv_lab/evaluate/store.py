"""The folder that holds the results of a run, from which a run that was killed can continue.

`run.json` describes the run: model, versions, settings and data. `samples.jsonl` has one line for
every answer, which is written as soon as the answer is known. `summary.jsonl` has one line for
every method and cell, and is written at the end. An answer that was lost to a lack of memory has no
line, so that a continued run asks for it again.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from snapkv.cache.saving.writing import foreign_files, replace_file
from snapkv.errors import OutputError, wrong
from snapkv_lab.rows import Row, RowFile, explain_folder_errors, parse_row, write_rows

Key = tuple[str, str, str]
"""The names of a sample, a method and a setting, which identify an answer."""

Progress = Callable[[str, int, int], None]
"""Takes a description of the current step, how many steps are done, and how many there are."""

_KEY = ("sample", "method", "question")

LOST = "out of memory"
"""The status of a record whose answer is missing because memory ran out."""


class Store:
    """The results of one run in a folder. One process at a time adds to them.

    The file of the answers is locked until the end of the `with` block in which the caller must use
    the store. Answers that are in the folder already are read.

    Args:
        folder: where the results are or will be; it is made if it is missing.
        run: the description of the run. A folder with the results of another run is refused.
        fields: fields that every record must have besides its key.

    Raises:
        InvalidArgumentError: the folder cannot be written, is used by another process, or holds
            other files, the results of another run, or damaged lines.
    """

    def __init__(self, folder: Path, run: Row, *, fields: Sequence[str] = ()) -> None:
        self.folder, self.run = folder, run
        with explain_folder_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._require_no_other_files()
        self._rows = RowFile(folder / "samples.jsonl")
        try:
            self._write_or_compare_run()
            lines = self._rows.read((*_KEY, *fields))
        except BaseException:
            self._rows.__exit__()
            raise
        self._records = {record_key(each): each for each in lines if each.get("status") != LOST}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._rows.__exit__()

    def __contains__(self, wanted: Key) -> bool:
        """Return whether the answer is stored, or was lost to a lack of memory in this run."""
        return wanted in self._records

    def __getitem__(self, wanted: Key) -> Row:
        return self._records[wanted]

    @property
    def records(self) -> list[Row]:
        """All records, in the order in which they were added."""
        return list(self._records.values())

    def add(self, record: Row) -> None:
        """Store a record. It is on the disk when this returns.

        A record with the status `LOST` is only kept in memory. A record with the same key is
        replaced in `records`, but its line stays in the file.

        Raises:
            OutputError: the record cannot be written.
        """
        if record.get("status") != LOST:
            self._rows.add(record)
        self._records[record_key(record)] = record

    def complete(
        self, wanted: Sequence[Key], records: Iterable[Row], on_progress: Progress | None
    ) -> None:
        """Add each new record as soon as it is made, and report how many of the wanted records
        exist.

        A record with a stored key is skipped: `records` may hold a conversation again from its
        beginning, of which only some answers are missing. A record that was lost to a lack of
        memory counts as done, although only `records` of the store has it, and not the file.

        Args:
            wanted: the keys of the whole run, from which the reports count done and all records.
            records: makes the missing records, in any order. What it raises passes through.
            on_progress: receives an empty text before the first record, then "SAMPLE, METHOD" after
                each new one, each time with the number of done and of all records; None for no
                reports.

        Raises:
            OutputError: a record cannot be written; those before it are stored.
        """
        report = on_progress or (lambda *_: None)
        done = sum(one in self for one in wanted)
        report("", done, len(wanted))
        for record in records:
            if record_key(record) not in self:
                self.add(record)
                done += 1
                report(f"{record['sample']}, {record['method']}", done, len(wanted))

    def summarise(self, rows: Iterable[Row]) -> OutputError | None:
        """Write the rows of the summary to `summary.jsonl` in the folder.

        Returns:
            The error if it cannot be written, so that the caller can show the rows first; else
                None.
        """
        try:
            write_rows(self.folder / "summary.jsonl", rows)
        except OutputError as error:
            return error
        return None

    def _require_no_other_files(self) -> None:
        """Check that a folder without `run.json` does not contain files of something else.

        Raises:
            InvalidArgumentError: it holds other files and no `run.json`.
        """
        if (self.folder / "run.json").exists():
            return
        if foreign := foreign_files(self.folder, ("run.json", "samples.jsonl")):
            problem = (
                f"the folder {self.folder} holds {foreign[0]!r}, which does not belong to a run"
            )
            raise wrong("results", problem, "Choose a new or empty folder")

    def _write_or_compare_run(self) -> None:
        """Write the description of the run, or compare it with the one in the folder.

        Raises:
            InvalidArgumentError: it describes another run, or it is missing next to stored answers.
        """
        path = self.folder / "run.json"
        if path.exists():
            differing = list(_differences(parse_row(path, 1, path.read_bytes()), self.run))
            if differing:
                which = ", another ".join(differing[:3])
                problem = (
                    f"the folder {self.folder} holds results of another run, with another {which}"
                )
                raise wrong("results", problem, "Choose a different folder")
            return
        if self._rows.path.stat().st_size:
            problem = f"the run.json that describes {self._rows.path} is missing"
            raise wrong("results", problem, "Choose a different folder")
        with explain_folder_errors(self.folder):
            replace_file(path, json.dumps(self.run, indent=2) + "\n")


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The result of a run.

    Attributes:
        folder: where its records are.
        run: the description of how they were made.
        rows: the summary of the records.
        unwritten: the error if the summary could not be written into the folder, else None.
    """

    folder: Path
    run: Row
    rows: list[Row]
    unwritten: OutputError | None = None

    @classmethod
    def of(cls, store: Store, rows: list[Row], **more: Any) -> Self:
        """Write the summary of a run, and return the result of the run.

        A summary that cannot be written is not raised, but is in the field `unwritten`.

        Args:
            store: the store with the records.
            rows: the summary of the records.
            more: the further fields of a subclass.
        """
        unwritten = store.summarise(rows)
        return cls(folder=store.folder, run=store.run, rows=rows, unwritten=unwritten, **more)


def record_key(record: Row) -> Key:
    """Return the key of a record, which must have the fields sample, method and question."""
    sample, method, question = (str(record[name]) for name in _KEY)
    return sample, method, question


def key_fields(key: Key) -> Row:
    """Return the fields of a record that hold its key, as a new dictionary with the keys "sample",
    "method" and "question". `record_key` is the inverse.
    """
    return dict(zip(_KEY, key, strict=True))


def _differences(old: Any, new: Any, name: str = "") -> Iterator[str]:
    """Yield a text about each setting in which two descriptions of a run differ, such as
    "model.name: "a" there, "b" here".

    Args:
        old: the description in the folder, or a part of it.
        new: the description of this run, or the same part of it.
        name: the dotted name of this part; empty for the whole.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for part in new | old:
            inner = f"{name}.{part}" if name else part
            yield from _differences(old.get(part), new.get(part), inner)
    elif (one := json.dumps(old)) != (other := json.dumps(new)):
        yield f"{name}: {one[:60]} there, {other[:60]} here"
