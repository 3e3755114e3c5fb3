"""Results on disk: a folder that a killed run can be continued from.

`run.json` says what was run: model, versions, settings, data. `samples.jsonl` has a line for every
answer, written when it is known; `summary.jsonl` one for every method and cell, written at the end.
What was lost to memory has no line, so that it is asked for again when the run is continued.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from snapkv.cache.saving.writing import foreign_files, replace_file
from snapkv.errors import InvalidArgumentError, OutputError
from snapkv_lab.rows import Row, RowFile, explain_folder_errors, parse_row, write_rows

Key = tuple[str, str, str]
"""Sample, method and setting: what one answer is."""

Progress = Callable[[str, int, int], None]
"""Takes what is done now, how many steps are done, and how many there are."""

_KEY = ("sample", "method", "question")

LOST = "out of memory"
"""The status of a record without an answer, which may be had when more memory is free."""


class Store:
    """The results of one run, added to one by one, by one process at a time.

    Results of another `run` are not mixed with it; `fields` are what every record must have besides
    what it answers.
    """

    def __init__(self, folder: Path, run: Row, *, fields: Sequence[str] = ()) -> None:
        self.folder, self.run = folder, run
        with explain_folder_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._require_own()
        self._rows = RowFile(folder / "samples.jsonl")
        try:
            self._claim()
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
        """Whether that is answered, or was lost to memory since the store was opened."""
        return wanted in self._records

    def __getitem__(self, wanted: Key) -> Row:
        return self._records[wanted]

    @property
    def records(self) -> list[Row]:
        """Of everything that was asked, in that order."""
        return list(self._records.values())

    def add(self, record: Row) -> None:
        """Keep an answer; it is on the disk when this returns."""
        if record.get("status") != LOST:
            self._rows.add(record)
        self._records[record_key(record)] = record

    def complete(
        self, wanted: Sequence[Key], records: Iterable[Row], on_progress: Progress | None
    ) -> None:
        """Add each record as soon as it is made, and tell how many of the wanted ones are there.

        Args:
            wanted: the keys of the whole run.
            records: makes the missing records. A record that is already stored is skipped: a
                conversation is held again from its beginning.
            on_progress: is told the sample and the method of each new record.

        Raises:
            OutputError: a record cannot be written; those before it are stored.
        """
        tell = on_progress or (lambda *_: None)
        done = sum(one in self for one in wanted)
        tell("", done, len(wanted))
        for record in records:
            if record_key(record) not in self:
                self.add(record)
                done += 1
                tell(f"{record['sample']}, {record['method']}", done, len(wanted))

    def summarise(self, rows: Iterable[Row]) -> OutputError | None:
        """Write the summary; why not, where that fails, so that the rows can be shown first."""
        try:
            write_rows(self.folder / "summary.jsonl", rows)
        except OutputError as error:
            return error
        return None

    def _require_own(self) -> None:
        if (self.folder / "run.json").exists():
            return
        if found := foreign_files(self.folder, ("run.json", "samples.jsonl")):
            raise InvalidArgumentError(
                f"results: expected a new or empty folder, or that of the same run, got "
                f"{self.folder} with {found[0]!r} in it; choose another folder"
            )

    def _claim(self) -> None:
        """Write `run.json`, or compare with the one that is there."""
        path = self.folder / "run.json"
        if path.exists():
            differing = list(_differences(parse_row(path, 1, path.read_bytes()), self.run))
            if differing:
                raise InvalidArgumentError(
                    f"results: expected results of the same run in {self.folder}, got another "
                    f"{', another '.join(differing[:3])}; choose another folder"
                )
            return
        if self._rows.path.stat().st_size:
            raise InvalidArgumentError(
                f"results: expected the run.json that says what {self._rows.path} holds, got none; "
                "choose another folder"
            )
        with explain_folder_errors(self.folder):
            replace_file(path, json.dumps(self.run, indent=2) + "\n")


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What a run gave.

    Attributes:
        folder: where its records are.
        run: the block that says how they were made.
        rows: what they come to.
        unwritten: why the folder has no summary of them; None where it has.
    """

    folder: Path
    run: Row
    rows: list[Row]
    unwritten: OutputError | None = None

    @classmethod
    def of(cls, store: Store, rows: list[Row], **more: Any) -> Self:
        """Write the summary of a store, and give it with what else there is to say."""
        unwritten = store.summarise(rows)
        return cls(folder=store.folder, run=store.run, rows=rows, unwritten=unwritten, **more)


def record_key(record: Row) -> Key:
    sample, method, question = (str(record[name]) for name in _KEY)
    return sample, method, question


def _differences(there: Any, here: Any, name: str = "") -> Iterator[str]:
    """Every setting in which two runs differ, by its name with dots, with both values."""
    if isinstance(there, dict) and isinstance(here, dict):
        for part in here | there:
            inner = f"{name}.{part}" if name else part
            yield from _differences(there.get(part), here.get(part), inner)
    elif (one := json.dumps(there)) != (other := json.dumps(here)):
        yield f"{name}: {one[:60]} there, {other[:60]} here"
