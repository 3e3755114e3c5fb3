"""Results on disk: a folder that a killed run can be continued from.

`run.json` says what was run: model, versions, settings, data. `samples.jsonl` has a line for every
answer, written when it is known; `summary.jsonl` one for every method and cell, written at the end.
"""

import contextlib
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from snapkv.errors import InvalidArgumentError, OutputError
from snapkv.writing import append_line, replace_file

Record = dict[str, Any]

Key = tuple[str, str, str]
"""Sample, method and setting: what one answer is."""

_KEY = ("sample", "method", "question")


class Store:
    """The results of one run, added to one by one, by one process at a time.

    Args:
        folder: made where it does not exist.
        run: what was run. Results of another run are not mixed with it.
        fields: what every record has beside what it answers.

    Raises:
        InvalidArgumentError: the folder holds another run or a damaged one, another process writes
            into it, or it cannot be written.
    """

    def __init__(self, folder: Path, run: Record, *, fields: Sequence[str] = ()) -> None:
        self.folder = folder
        self.run = run
        self._fields = fields
        self._path = folder / "samples.jsonl"
        with _needing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+b", buffering=0)
        try:
            _lock(self._file, folder)
            self._claim()
            self.records = self._read()
        except BaseException:
            self._file.close()
            raise
        self._done = {key(record) for record in self.records}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def __contains__(self, wanted: Key) -> bool:
        return wanted in self._done

    def add(self, record: Record) -> None:
        """Append an answer; it is on the disk when this returns.

        Raises:
            OutputError: it cannot be written; the folder holds all answers before it.
        """
        append_line(self._file, json.dumps(record), self._path)
        self.records.append(record)
        self._done.add(key(record))

    def summarise(self, rows: Iterable[Record]) -> OutputError | None:
        """Write the summary, whole or not at all; why not, where it cannot be written.

        An error is not raised, so that the rows, which are known, can be shown first.
        """
        text = "".join(json.dumps(row) + "\n" for row in rows)
        try:
            replace_file(self.folder / "summary.jsonl", text)
        except OutputError as error:
            return error
        return None

    def _claim(self) -> None:
        """Write `run.json`, or compare with the one that is there."""
        path = self.folder / "run.json"
        if not path.exists():
            if self._path.stat().st_size:
                raise InvalidArgumentError(
                    f"output: expected the run.json that says what {self._path} holds, got none; "
                    "choose another folder"
                )
            replace_file(path, json.dumps(self.run, indent=2) + "\n")
            return
        found = _parsed(path, 1, path.read_bytes())
        differing = list(_differences(found, self.run))
        if differing:
            raise InvalidArgumentError(
                f"output: expected results of the same run in {self.folder}, got another "
                f"{', another '.join(differing[:3])}; choose another folder"
            )

    def _read(self) -> list[Record]:
        """The answers that are there; a last line that was cut off is taken away."""
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self._file.truncate(len(whole))
        return [
            _parsed(self._path, number, line, (*_KEY, *self._fields))
            for number, line in enumerate(whole.split(b"\n")[:-1], 1)
        ]


def key(record: Record) -> Key:
    """What a record answers."""
    sample, method, question = (str(record[name]) for name in _KEY)
    return sample, method, question


def short_hash(settings: Record) -> str:
    """A short name for settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


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
            f"output: expected a folder that no other run is writing to, got {folder}; wait for "
            "the other one, or choose another folder"
        ) from None


@contextlib.contextmanager
def _needing(folder: Path) -> Iterator[None]:
    """Say of a folder that cannot be made or written why it cannot."""
    try:
        yield
    except OSError as error:
        raise InvalidArgumentError(
            f"output: expected a folder that can be written, got {folder}: {error.strerror}; "
            "choose another folder"
        ) from error


def _parsed(path: Path, number: int, line: bytes, names: Collection[str] = ()) -> Record:
    """A line's JSON object, which has at least those names; without any, the file's one object."""
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not record.keys() >= set(names):
        raise InvalidArgumentError(
            f"output: expected a JSON object{' with ' if names else ''}{', '.join(names)} in "
            f"{path}, line {number}, got {line[:40].decode(errors='replace')!r}; choose another "
            f"folder{', or delete that line' if names else ''}"
        )
    return record


def _differences(there: Any, here: Any, name: str = "") -> Iterator[str]:
    """Every setting in which two runs differ, by its name with dots, with both values."""
    if isinstance(there, dict) and isinstance(here, dict):
        for part in here | there:
            yield from _differences(
                there.get(part), here.get(part), f"{name}.{part}" if name else part
            )
    elif json.dumps(there) != json.dumps(here):
        yield f"{name}: {_short(there)} there, {_short(here)} here"


def _short(value: Any, shown: int = 60) -> str:
    text = json.dumps(value)
    return text if len(text) <= shown else f"{text[:shown]}..."
