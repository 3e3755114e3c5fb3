"""Results on disk: a folder that a killed run can be continued from.

`run.json` says what was run: model, versions, settings, data. `samples.jsonl` has a line for every
answer, written when it is known; `summary.jsonl` one for every method and cell, written at the end.
An answer that was lost to memory is asked for again when the run is continued. The newer line is
appended, and counts; when the run ends, the file is written anew without the older one.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Self

from snapkv.cache.saving.writing import append_line, foreign_files, replace_file
from snapkv.errors import InvalidArgumentError, OutputError

Record = dict[str, Any]

Key = tuple[str, str, str]
"""Sample, method and setting: what one answer is."""

Progress = Callable[[str, int, int], None]
"""Takes what is done now, how many steps are done, and how many there are."""

_KEY = ("sample", "method", "question")

LOST = "out of memory"
"""The status of a record without an answer, which may be had when more memory is free."""


class Store:
    """The results of one run, added to one by one, by one process at a time.

    Results of another `run` are not mixed with it; `fields` are what every record must have beside
    what it answers.
    """

    def __init__(self, folder: Path, run: Record, *, fields: Sequence[str] = ()) -> None:
        self.folder, self.run = folder, run
        self._path = folder / "samples.jsonl"
        with _needing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._require_own()
        self._file = self._opened()
        try:
            self._claim()
            lines = _records(self._path, self._whole_lines(), fields)
        except BaseException:
            self._file.close()
            raise
        self._lines = len(lines)
        self._records = {key(record): record for record in lines}
        self._done = {each for each, of in self._records.items() if of.get("status") != LOST}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._lines > len(self._records):  # lines that newer ones replace; those count anyway
            with contextlib.suppress(OutputError):
                replace_file(self._path, _as_lines(self.records))
        self._file.close()

    def __contains__(self, wanted: Key) -> bool:
        """Whether that is answered, or was lost to memory since the store was opened."""
        return wanted in self._done

    def __getitem__(self, wanted: Key) -> Record:
        return self._records[wanted]

    @property
    def records(self) -> list[Record]:
        """The newest record of everything that was asked, in the order of the first ones."""
        return list(self._records.values())

    def add(self, record: Record) -> None:
        """Append an answer; it is on the disk when this returns."""
        append_line(self._file, json.dumps(record), self._path)
        self._lines += 1
        self._records[key(record)] = record
        self._done.add(key(record))

    def summarise(self, rows: Iterable[Record]) -> OutputError | None:
        """Write the summary; why not, where that fails, so that the rows can be shown first."""
        try:
            replace_file(self.folder / "summary.jsonl", _as_lines(rows))
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

    def _opened(self) -> IO[bytes]:
        """The file of the answers, locked; not one that another run has just replaced."""
        while True:
            with _needing(self.folder):
                file = self._path.open("a+b", buffering=0)  # closing it writes nothing
            try:
                _lock(file, self.folder)
                if os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                    return file
            except BaseException:
                file.close()
                raise
            file.close()

    def _claim(self) -> None:
        """Write `run.json`, or compare with the one that is there."""
        path = self.folder / "run.json"
        if path.exists():
            differing = list(_differences(_parsed(path, 1, path.read_bytes()), self.run))
            if differing:
                raise InvalidArgumentError(
                    f"results: expected results of the same run in {self.folder}, got another "
                    f"{', another '.join(differing[:3])}; choose another folder"
                )
            return
        if self._path.stat().st_size:
            raise InvalidArgumentError(
                f"results: expected the run.json that says what {self._path} holds, got none; "
                "choose another folder"
            )
        with _needing(self.folder):
            replace_file(path, json.dumps(self.run, indent=2) + "\n")

    def _whole_lines(self) -> bytes:
        """The answers that are there; a last line that was cut off is taken away."""
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self._file.truncate(len(whole))
        return whole


def key(record: Record) -> Key:
    sample, method, question = (str(record[name]) for name in _KEY)
    return sample, method, question


def short_hash(settings: Record, digits: int = 8) -> str:
    """A short name for settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:digits]


def _as_lines(records: Iterable[Record]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def _records(path: Path, data: bytes, fields: Sequence[str]) -> list[Record]:
    lines = enumerate(data.split(b"\n")[:-1], 1)
    return [_parsed(path, number, line, (*_KEY, *fields)) for number, line in lines]


def _parsed(path: Path, number: int, line: bytes, names: Collection[str] = ()) -> Record:
    """A line's JSON object, which has at least those names; without any, the file's one object."""
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not record.keys() >= set(names):
        raise InvalidArgumentError(
            f"results: expected a JSON object{' with ' if names else ''}{', '.join(names)} in "
            f"{path}, line {number}, got {line[:40].decode(errors='replace')!r}; choose another "
            f"folder{', or delete that line' if names else ''}"
        )
    return record


def _lock(file: IO[bytes], folder: Path) -> None:
    """Keep other processes from adding answers too; the system takes the lock back when we end."""
    try:
        import fcntl
    except ImportError:  # on Windows, where two runs in one folder are up to the user
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InvalidArgumentError(
            f"results: expected a folder that no other run is writing to, got {folder}; wait for "
            "the other one, or choose another folder"
        ) from None


@contextlib.contextmanager
def _needing(folder: Path) -> Iterator[None]:
    """Say of a folder that cannot be made or written why it cannot."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise InvalidArgumentError(
            f"results: expected a folder that can be written, got {folder}: {error.strerror}; "
            "choose another folder"
        ) from error


def _differences(there: Any, here: Any, name: str = "") -> Iterator[str]:
    """Every setting in which two runs differ, by its name with dots, with both values."""
    if isinstance(there, dict) and isinstance(here, dict):
        for part in here | there:
            inner = f"{name}.{part}" if name else part
            yield from _differences(there.get(part), here.get(part), inner)
    elif (one := json.dumps(there)) != (other := json.dumps(here)):
        yield f"{name}: {one[:60]} there, {other[:60]} here"
