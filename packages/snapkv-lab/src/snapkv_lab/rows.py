"""Rows of results: JSON objects, one per line of a file that only grows, and functions to group
them.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import IO, Any, Self

from snapkv.cache.saving.writing import append_line, replace_file
from snapkv.errors import OutputError, wrong

Row = dict[str, Any]


class RowFile:
    """A file that contains rows of results and that grows when rows are added.

    One process at a time can add rows. A run that was stopped can continue with the same file. A
    last line that was cut off is removed.

    Args:
        path: where the file is or will be; missing folders are made.

    Raises:
        InvalidArgumentError: the file cannot be opened or written, or another process holds it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with explain_folder_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open_file()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def read(self, fields: Collection[str] = ()) -> list[Row]:
        """Read all rows from the file, and remove the last line if it is incomplete.

        Args:
            fields: names that each row must have.

        Raises:
            InvalidArgumentError: a line is not a JSON object with these fields.
        """
        self._file.seek(0)
        data = self._file.read()
        complete = data[: data.rfind(b"\n") + 1]
        if len(complete) < len(data):
            self._file.truncate(len(complete))
        lines = enumerate(complete.split(b"\n")[:-1], 1)
        return [parse_row(self.path, number, line, fields) for number, line in lines]

    def add(self, *rows: Row) -> None:
        """Append rows that belong together. They are on the disk when this returns.

        Either all of them are written or, after an error, none.

        Raises:
            OutputError: the disk is full, or the file cannot be written.
        """
        if rows:
            append_line(self._file, to_lines(rows).removesuffix("\n"), self.path)

    def _open_file(self) -> IO[bytes]:
        """Open and lock the file, and create it if it does not exist.

        Raises:
            InvalidArgumentError: the file cannot be opened, or another process holds it.
        """
        with explain_folder_errors(self.path.parent):
            file = self.path.open("a+b", buffering=0)  # so that closing it writes nothing
        try:
            _lock(file, self.path.parent)
        except BaseException:
            file.close()
            raise
        return file


def _lock(file: IO[bytes], folder: Path) -> None:
    """Lock a file for this process until the file is closed or the process ends. This does nothing
    on Windows.

    Args:
        file: the open file.
        folder: the folder that the error message names.

    Raises:
        InvalidArgumentError: another process has locked the file.
    """
    try:
        import fcntl
    except ImportError:  # on Windows, where the user must not start two runs in one folder
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise wrong(
            "results",
            f"another run is writing to the folder {folder}",
            "Wait until it has ended, or choose another folder",
        ) from None


@contextlib.contextmanager
def explain_folder_errors(folder: Path) -> Iterator[None]:
    """Turn operating system errors of this block into one that says why a folder cannot be used.

    Raises:
        InvalidArgumentError: the block raised an `OSError` that is not an `OutputError`.
    """
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        problem = f"files cannot be written to the folder {folder}: {error.strerror}"
        raise wrong("results", problem, "Choose a different folder") from error


def parse_row(path: Path, number: int, line: bytes, names: Collection[str] = ()) -> Row:
    """Parse a line of JSON and check that it is an object with the given fields.

    Args:
        path: the file, for the error message.
        number: the line's number, for the error message.
        line: the line; a line break at its end does not matter.
        names: fields that the object must have.

    Raises:
        InvalidArgumentError: the line is not such an object.
    """
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not row.keys() >= set(names):
        raise wrong(
            "results",
            f"expected a JSON object{' with ' if names else ''}{', '.join(names)} in {path}, line "
            f"{number}, but got {line[:40].decode(errors='replace')!r}",
            f"Choose another folder{', or delete that line' if names else ''}",
        )
    return row


def to_lines(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def read_rows(path: Path) -> list[Row]:
    """Return all rows of a file. An incomplete last line is ignored, and the file is not changed.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not JSON.
    """
    complete, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in complete.splitlines()]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows to a file, which replaces its previous contents. Missing folders are made.

    Raises:
        OutputError: the file cannot be written; its previous contents are unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, to_lines(rows))


def short_hash(settings: Any, digits: int = 8) -> str:
    """Return the first hexadecimal digits of a hash of the settings, to be used as a name.

    The settings must be values for JSON. The order of keys does not matter.
    """
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:digits]


def select_rows(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """Return a new list of the rows that have all of the given values. A field that a row does not
    have counts as None.
    """
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def group_rows(rows: Iterable[Row], by: str | Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Group rows by the value of a field or of a function.

    Args:
        rows: the rows.
        by: the name of a field that every row has, or a function of a row.

    Returns:
        The rows of each value, both in order of first appearance.
    """
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[by] if isinstance(by, str) else by(row), []).append(row)
    return groups


def mean_value(rows: Sequence[Row], name: str, mean: Any = fmean) -> float | None:
    """Return the mean value of a field, or None if the value is None in all rows.

    Every row must have the field.

    Args:
        rows: the rows; those whose value is None are left out.
        name: the name of the field.
        mean: computes the mean of a list of numbers, such as `statistics.median`.
    """
    values = [row[name] for row in rows if row[name] is not None]
    return float(mean(values)) if values else None
