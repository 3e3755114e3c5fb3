"""Writing files: whole or not at all, with one line that names the file where that fails."""

import contextlib
import os
import re
import stat
import time
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

from snapkv.errors import OutputError

_ABANDONED_SECONDS = 3600  # nothing is written for so long without a pause
_MOST_NAME_BYTES = 200  # of the 255 that file systems take


def replace_file(path: Path, content: str | bytes, *, sweep: bool = True) -> None:
    """Write a file atomically: after an error the old file or none is there, and no temporary one.

    A link stays one, and what it leads to is replaced. A device or a pipe is written into.
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
    """The name of a temporary file that replaces `path` when the block ends without error.

    What earlier writers of this file have left because they were killed is removed, which looks at
    the whole folder; `sweep=False` leaves that to its owner. Any OSError within the block is an
    OutputError.
    """
    target = Path(os.path.realpath(path))
    name = target.name if len(os.fsencode(target.name)) <= _MOST_NAME_BYTES else ""
    partial = target.with_name(f".{name}.{uuid.uuid4().hex}.partial")
    with naming(path):
        if target.is_dir() or is_stream(target):
            raise OSError("it is no regular file")
        try:
            if sweep:
                _remove_abandoned(target)
            partial.touch()
            mode = stat.S_IMODE(partial.stat().st_mode)
            yield partial
            partial.chmod(mode)  # safetensors writes for its owner alone
            _flush(partial, os.O_RDWR)
            os.replace(partial, target)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not every system can flush a folder
            _flush(target.parent, os.O_RDONLY)


def foreign_files(folder: Path, names: Collection[str]) -> list[str]:
    """The files of a folder that are not of these names, nor what a killed writer of one left."""
    own = "|".join(map(re.escape, names))
    ours = re.compile(rf"{own}|\.({own})\.[0-9a-f]{{32}}\.partial")
    files = (each.name for each in folder.iterdir() if each.is_file())
    return sorted(name for name in files if not ours.fullmatch(name))


def open_for_lines(path: Path) -> IO[bytes]:
    """A file to give `append_line`; it and its folders are made where they are not there."""
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab", buffering=0)


def append_line(file: IO[bytes], line: str, path: Path) -> None:
    """Add a line to a file opened for appending without a buffer; it is on the disk after this.

    Where that fails or is interrupted, nothing of the line stays in the file.
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
    """Whether there is a device, a pipe or a socket, which holds nothing that could be lost."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn what the system says within this block into one line about this file."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(
            f"output: expected to write {str(path)!r}, got: {error.strerror or error}; make room, "
            "or choose another place"
        ) from error


def _write_all(file: IO[bytes], data: bytes) -> None:
    """Write without a buffer, which would be tried again when the file is closed."""
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
    """Remove partial files under this name that nobody has written to for long, where it may."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{32}}\.partial")
    oldest = time.time() - _ABANDONED_SECONDS
    with contextlib.suppress(OSError):  # another's file, or another writer was faster
        for found in path.parent.iterdir():
            if name.fullmatch(found.name) and found.stat().st_mtime < oldest:
                found.unlink()
