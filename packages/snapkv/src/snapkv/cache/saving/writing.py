"""Writing files completely or not at all, with errors that name the file."""

import contextlib
import os
import re
import stat
import time
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

from snapkv.errors import OutputError, wrong

_ABANDONED_SECONDS = 3600  # no writer pauses for that long
_MOST_NAME_BYTES = 200  # file systems allow 255, and the temporary name is longer


def replace_file(path: Path, content: str | bytes, *, sweep: bool = True) -> None:
    """Write a file atomically: after an error, the old file is unchanged and no other file is left.

    If `path` is a link, the file that it points to is replaced. If it is a device or a pipe, the
    content is written into it.

    Args:
        path: the name of the file.
        content: text, which is written in UTF-8, or bytes.
        sweep: whether to remove temporary files of this name that killed processes have left.

    Raises:
        OutputError: the file cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    if is_stream(path):
        with naming(path), path.open("wb", buffering=0) as file:
            _write_all(file, data)
        return
    with replacing(path, sweep=sweep) as partial:
        partial.write_bytes(data)


@contextlib.contextmanager
def replacing(path: Path, *, sweep: bool = True) -> Iterator[Path]:
    """Yield the name of a temporary file, which replaces `path` if the block ends without an error.

    Args:
        path: the file to replace.
        sweep: whether to remove temporary files of this name that killed processes have left, for
            which the whole folder is listed.

    Raises:
        OutputError: `path` is not a regular file, or an OSError was raised within the block.
    """
    target = Path(os.path.realpath(path))
    name = target.name if len(os.fsencode(target.name)) <= _MOST_NAME_BYTES else ""
    partial = target.with_name(f".{name}.{uuid.uuid4().hex}.partial")
    with naming(path):
        if target.is_dir() or is_stream(target):
            raise OSError("this is not a regular file")
        try:
            if sweep:
                _remove_abandoned(target)
            partial.touch()
            mode = stat.S_IMODE(partial.stat().st_mode)
            yield partial
            partial.chmod(mode)  # safetensors makes files that only their owner can read
            _flush(partial, os.O_RDWR)
            os.replace(partial, target)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not every system can flush a folder
            _flush(target.parent, os.O_RDONLY)


def foreign_files(folder: Path, names: Collection[str]) -> list[str]:
    """Return the sorted names of the files in a folder that have none of the given names.

    A temporary file that a killed process has left counts as a file of the name it was written for.

    Args:
        folder: the folder to list.
        names: the names of the files that belong there.
    """
    own = "|".join(map(re.escape, names))
    ours = re.compile(rf"{own}|\.({own})\.[0-9a-f]{{32}}\.partial")
    files = (each.name for each in folder.iterdir() if each.is_file())
    return sorted(name for name in files if not ours.fullmatch(name))


def open_for_lines(path: Path) -> IO[bytes]:
    """Open a file for `append_line`, and make it and its folders if they do not exist.

    Raises:
        OutputError: the file cannot be opened.
    """
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab", buffering=0)


def append_line(file: IO[bytes], line: str, path: Path) -> None:
    """Append a line to a file and flush it to the disk.

    If this fails or is interrupted, no part of the line stays in the file.

    Args:
        file: what `open_for_lines` has returned.
        line: the line, without its end.
        path: the name of the file, for the error.

    Raises:
        OutputError: the line cannot be written.
    """
    descriptor = file.fileno()
    status = os.fstat(descriptor)
    regular, size = stat.S_ISREG(status.st_mode), status.st_size
    with naming(path):
        try:
            _write_all(file, line.encode() + b"\n")
            if regular:
                os.fsync(descriptor)
        except BaseException:
            if regular:
                os.ftruncate(descriptor, size)
            raise


def is_stream(path: Path) -> bool:
    """Return whether `path` is a device, a pipe or a socket, which has no content to protect."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an OSError within this block into an error that names the file.

    Raises:
        OutputError: an OSError was raised within the block.
    """
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise wrong(
            "output",
            f"the file {str(path)!r} could not be written: {error.strerror or error}",
            "Free some disk space, or choose a different folder",
            OutputError,
        ) from error


def _write_all(file: IO[bytes], data: bytes) -> None:
    """Write all bytes to an unbuffered file."""
    # A buffer that could not be written would be written again when the file is closed.
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _flush(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(path: Path) -> None:
    """Remove temporary files for `path` that nothing was written to for an hour, if possible."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{32}}\.partial")
    oldest = time.time() - _ABANDONED_SECONDS
    with contextlib.suppress(OSError):  # the file belongs to somebody else, or is already gone
        for found in path.parent.iterdir():
            if name.fullmatch(found.name) and found.stat().st_mtime < oldest:
                found.unlink()
