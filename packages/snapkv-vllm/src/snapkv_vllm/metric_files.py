"""Files for the metrics of several processes, which do not end a process when the disk is full.

prometheus_client maps the files of its multi-process mode into memory, and they are sparse. If the
disk is full, the first count on a new page ends the process with SIGBUS. Here counts are written to
the same files by system calls, which return errors. Allocating the files in advance would not help
on file systems that write every page to a new place.
"""

import errno
import logging
import os
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snapkv.validation import format_bytes
from snapkv_vllm.admission.names import RefusedError, wrong

_logger = logging.getLogger("vllm.snapkv")

_HEADER = struct.Struct("i4x")  # the bytes in use, including this header
_COUNT = struct.Struct("dd")  # a value and its time

_SECONDS_BETWEEN_TRIES = 10.0

_MIN_FREE_BYTES = 1 << 20
"""The bytes that must be free when a server starts, which are about what the files of one engine
take.
"""


def write_without_mapping() -> None:
    """Patch prometheus_client so that it writes the counts of this process to files with
    `WrittenCounts`. Files that it has opened before stay mapped into memory.
    """
    from prometheus_client import values

    values.MmapedDict = WrittenCounts


def require_writable(folder: str) -> None:
    """Check that the metrics of a server can be written to `folder`, which must exist. A temporary
    file of 1 MiB is written there for this.

    Raises:
        RefusedError: the folder cannot be written to, or less than 1 MiB is free.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_MIN_FREE_BYTES))
    except OSError as error:
        raise cannot_write(folder, error) from error


def cannot_write(folder: str, error: OSError) -> RefusedError:
    """Return the error that says that metrics cannot be written to a folder, and why, for the
    caller to raise.
    """
    size = format_bytes(_MIN_FREE_BYTES)
    problem = f"{size} of metrics could not be written to '{folder}' ({error.strerror})"
    return wrong(
        "PROMETHEUS_MULTIPROC_DIR", problem, "Free some disk space, or use a different folder"
    )


class WrittenCounts:
    """The counts of one process, which are written to a file in the format of
    `prometheus_client.mmap_dict`.

    A count that does not fit on the disk is missing from the file until it does. prometheus_client
    builds one object for each kind of metric, and holds a lock during all calls.
    """

    def __init__(self, filename: str) -> None:
        self._path, self._file, self._used = Path(filename), -1, _HEADER.size
        self._counts: dict[str, tuple[float, float]] = {}  # values and their times
        self._places: dict[str, int] = {}  # where each count lies in the file
        self._next_try, self._has_failed = 0.0, False
        self._try(self._open)

    def read_value(self, key: str) -> tuple[float, float]:
        """Return a value and the time at which it was set. A value that does not exist is created
        as 0, also in the file.
        """
        if key not in self._counts:
            self.write_value(key, 0.0, 0.0)
        return self._counts[key]

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        """Set a value and its time, and write both of them to the file if that is possible.

        No error is raised if it is not possible. A value that the file does not contain yet is
        tried again by later calls, at least 10 seconds after the last failure.
        """
        self._counts[key] = value, timestamp
        if key in self._places:
            self._try(self._write, self._places[key], _COUNT.pack(value, timestamp))
        elif time.monotonic() >= self._next_try:
            self._try(self._append_missing)

    def close(self) -> None:
        """Close the file, if it is open. It is opened again when a later value is written."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._places.clear()

    def _try(self, step: Callable[..., None], *arguments: Any) -> None:
        """Call a function, and catch an `OSError` that it raises. The first of these errors is
        logged, and every one sets the time of the next try to 10 seconds later.

        Args:
            step: the function.
            arguments: its arguments.
        """
        try:
            step(*arguments)
        except OSError as error:
            self._next_try = time.monotonic() + _SECONDS_BETWEEN_TRIES
            if not self._has_failed:
                self._has_failed = True
                message = "Metrics are missing from %s until it can be written: %s. Free space."
                _logger.warning(message, self._path, error.strerror)

    def _open(self) -> None:
        """Open the file of this process, which is created if it is missing, and read the counts
        that it contains. The file may have been left by an ended process with the same process id.

        A count that this object already has stays unchanged.

        Raises:
            OSError: the file cannot be created or read.
        """
        from prometheus_client.mmap_dict import MmapedDict

        if not self._path.exists() or not self._path.stat().st_size:
            new = self._path.with_suffix(".new")  # it must not be read without its header
            try:
                new.write_bytes(_HEADER.pack(_HEADER.size))
                new.replace(self._path)
            finally:
                new.unlink(missing_ok=True)
        self._file, self._used = os.open(self._path, os.O_RDWR), _HEADER.size
        for key, *count, place in MmapedDict.read_all_values_from_file(str(self._path)):
            self._counts.setdefault(key, (count[0], count[1]))
            self._places[key] = place
            self._used = place + _COUNT.size

    def _append_missing(self) -> None:
        """Append all counts to the file that it does not contain yet, and open it before if it is
        closed.

        Raises:
            OSError: the disk is full, or the file cannot be opened or written to. Counts before
                that are in the file.
        """
        if self._file < 0:
            self._open()
        for key in [one for one in self._counts if one not in self._places]:
            name = key.encode()
            padding = b" " * (8 - (len(name) + 4) % 8)
            entry = struct.pack("i", len(name)) + name + padding + _COUNT.pack(*self._counts[key])
            self._write(self._used, entry)
            end = self._used + len(entry)
            self._write(0, _HEADER.pack(end))  # readers see the entry from here on
            self._places[key], self._used = end - _COUNT.size, end

    def _write(self, place: int, part: bytes) -> None:
        """Write the bytes of `part` at the position `place` of the file, which must be open.

        Raises:
            OSError: the disk is full, or the file cannot be written to. A part of the bytes may
                have been written.
        """
        if os.pwrite(self._file, part, place) < len(part):  # the rest did not fit
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
