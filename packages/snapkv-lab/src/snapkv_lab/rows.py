"""Rows: JSON objects, one a line, in a file that is only added to, and what several of them say."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import IO, Any, Self

from snapkv.cache.saving.writing import append_line, replace_file
from snapkv.errors import InvalidArgumentError, OutputError

Row = dict[str, Any]


class RowFile:
    """A file that one process at a time adds rows to, and goes on with where another has stopped.

    A last line that was cut off is taken away.

    Raises:
        InvalidArgumentError: the file cannot be made or written, or another process has it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with explain_folder_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._opened()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def read(self, fields: Collection[str] = ()) -> list[Row]:
        """Those that are there, each of which must have these fields."""
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self._file.truncate(len(whole))
        lines = enumerate(whole.split(b"\n")[:-1], 1)
        return [parse_row(self.path, number, line, fields) for number, line in lines]

    def add(self, *rows: Row) -> None:
        """Append rows that belong together; they are on the disk when this returns."""
        if rows:
            append_line(self._file, to_lines(rows).removesuffix("\n"), self.path)

    def _opened(self) -> IO[bytes]:
        """The file, locked."""
        with explain_folder_errors(self.path.parent):
            file = self.path.open("a+b", buffering=0)  # closing it writes nothing
        try:
            _lock(file, self.path.parent)
        except BaseException:
            file.close()
            raise
        return file


def _lock(file: IO[bytes], folder: Path) -> None:
    """Keep other processes from adding rows too; the system takes the lock back when we end."""
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
def explain_folder_errors(folder: Path) -> Iterator[None]:
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


def parse_row(path: Path, number: int, line: bytes, names: Collection[str] = ()) -> Row:
    """A line's JSON object, which has at least those names."""
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not row.keys() >= set(names):
        raise InvalidArgumentError(
            f"results: expected a JSON object{' with ' if names else ''}{', '.join(names)} in "
            f"{path}, line {number}, got {line[:40].decode(errors='replace')!r}; choose another "
            f"folder{', or delete that line' if names else ''}"
        )
    return row


def to_lines(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def read_rows(path: Path) -> list[Row]:
    """Those of a file, without a last line that was cut off."""
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replace the file by these rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, to_lines(rows))


def short_hash(settings: Any, digits: int = 8) -> str:
    """A short name for settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:digits]


def select_rows(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """Those with these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def group_rows(rows: Iterable[Row], by: str | Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Rows by a key of theirs, or by what a function says of them, in order of appearance."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[by] if isinstance(by, str) else by(row), []).append(row)
    return groups


def mean_value(rows: Sequence[Row], name: str, mean: Any = fmean) -> float | None:
    """The mean of a number over the rows that have it; None where none has."""
    known = [row[name] for row in rows if row[name] is not None]
    return float(mean(known)) if known else None
