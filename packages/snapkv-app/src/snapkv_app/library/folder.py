"""Read and write the files of a library, which survive a process that is killed."""

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from snapkv.cache.saving.files import seal_of
from snapkv.cache.saving.records import BEGINNING, digest_of, seal_fault
from snapkv.cache.saving.writing import naming, replace_file
from snapkv.errors import (
    CacheFileError,
    InvalidArgumentError,
    LibraryError,
    OutputError,
    SnapKVError,
    wrong,
)
from snapkv.validation import format_bytes
from snapkv_app.library.about import About
from snapkv_app.library.records import SETTLED_NS, Record, Text, passages

_ABOUT, _LOCK, _INDEX = "library.json", "library.lock", "words.sqlite"
_DOCUMENTS, _CACHES, _ASKED = "documents", "caches", "asked"
_NAMES = {
    "": r"library\.json",
    _DOCUMENTS: r"[0-9a-f]{24}\.json",
    _CACHES: r"[0-9a-f]{24}-[0-9a-f]{16}-[0-9a-f]{8}\.safetensors",
    _ASKED: r"[0-9a-f]{24}",
}
"""The names of a library's files, as regular expressions, by folder."""

_PARTIAL = r"\.%s\.[0-9a-f]{32}\.partial"
"""The name of an incomplete file that `snapkv.cache.saving.writing` writes."""

_UNNAMED = r"\.tmp[0-9A-Za-z]{6}"
"""The name of an incomplete file that safetensors writes."""

_RECORD = re.compile(_NAMES[_DOCUMENTS])

_MOST_RECORD_BYTES = 1 << 28
"""The largest record; no model has positions for a longer text."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A damaged file of a library, and how it is damaged."""

    name: str  # of the document, or of the file if its record is damaged
    path: Path
    reason: str

    def as_notice(self) -> str:
        """Return a line that reports the damage and says what to do."""
        return (
            f"library: {str(self.path)!r} cannot be used: {self.reason}. Move it away and add its "
            "document again"
        )


class Folder:
    """The folder with the files of a library.

    ``library.json`` says how the documents were read. Each document has a record in ``documents``,
    and a file with its cache in ``caches``, with a name that no file had before. The record is
    written after the cache file is complete, so a document exists if and only if its record exists.
    Readers need no lock: if a cache file is missing, the new record names the file that replaces
    it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, tuple[str, Record | Fault]] = {}  # with the record's stamp
        self._changed: set[str] = set()

    def about(self) -> About | None:
        """Read the description of the library; None if there is no library yet.

        Raises:
            LibraryError: the folder cannot be read, contains files that are not a library's, or has
                another format.
        """
        file = self.path / _ABOUT
        try:
            return About.from_json(file.read_bytes(), str(file))
        except FileNotFoundError:
            self._require_free()
            return None
        except OSError as error:
            raise wrong(
                "library",
                f"the folder {str(self.path)!r} could not be read: {error.strerror}",
                "Choose a different folder",
                LibraryError,
            ) from error

    @property
    def was_begun(self) -> bool:
        """Whether a process has ever begun to change the library, even if it was stopped early."""
        return (self.path / _LOCK).exists()

    def begin(self, about: About) -> None:
        """Write the description of the library; the caller must hold the lock.

        Raises:
            OutputError: the file cannot be written.
        """
        replace_file(self.path / _ABOUT, about.as_json())

    def _require_free(self) -> None:
        """Raise if the folder contains files of somebody else.

        Raises:
            LibraryError: a file in it does not belong to a library.
        """
        if not self.path.is_dir():
            return
        strangers = sorted(file.name for file in self.path.iterdir() if not self._is_own(file))
        if strangers:
            raise wrong(
                "library",
                f"the folder {str(self.path)!r} is not a library, because it contains the file "
                f"{strangers[0]!r}",
                "Use the folder of a library, or use a new or empty folder to add documents to",
                LibraryError,
            )

    def _is_own(self, file: Path) -> bool:
        """Return whether a file may belong to a library whose first document was not finished.

        Such files are the lock, if it contains only the id of a process, and an incomplete
        ``library.json``.
        """
        if file.name == _LOCK:
            return file.is_file() and not file.read_bytes()[:20].strip(b"0123456789\n")
        return re.fullmatch(_PARTIAL % _NAMES[""], file.name) is not None

    # Reading.

    def records(self) -> tuple[dict[str, Record], list[Fault]]:
        """Read all records.

        Returns:
            The undamaged records by the keys of their documents, sorted by name, and the faults of
            the damaged ones.
        """
        stamps = self.stamps()
        entries = [self._entry(key, stamps[key]) for key in sorted(stamps)]
        found = [entry for entry in entries if entry is not None]
        self._known = {key: known for key, known in self._known.items() if key in stamps}
        undamaged = [entry for entry in found if isinstance(entry, Record)]
        named = {record.key: record for record in sorted(undamaged, key=lambda each: each.name)}
        return named, [entry for entry in found if isinstance(entry, Fault)]

    def record(self, key: str) -> Record | None:
        """Return the current record of a document; None if it was removed or is damaged."""
        entry = self.entry(key)
        return entry if isinstance(entry, Record) else None

    def entry(self, key: str) -> Record | Fault | None:
        """Return the current record of a document, or its fault; None if it was removed."""
        return self._entry(key, self.stamp_of(key))

    def stamps(self) -> dict[str, str]:
        """Return the stamp of every record by the key of its document; empty without a library.

        A stamp is a text that changes whenever the record is written. Damaged records have one,
        too.
        """
        found = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for file in os.scandir(self.path / _DOCUMENTS):
                if _RECORD.fullmatch(file.name):
                    with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                        found[file.name.removesuffix(".json")] = _stamp(file.stat())
        return found

    def stamp_of(self, key: str) -> str | None:
        """Return a text that changes whenever a record is written.

        None if the document was removed.
        """
        try:
            return _stamp(self._record_file(key).stat())
        except FileNotFoundError:
            return None

    def mark(self) -> str | None:
        """Return a text that changes whenever a record is created or removed.

        It consists of the inode and the modification time of the folder of records. None if that
        folder does not exist.
        """
        try:
            status = (self.path / _DOCUMENTS).stat()
        except FileNotFoundError:
            return None
        return f"{status.st_ino} {status.st_mtime_ns}"

    def settled(self) -> str | None:
        """Return the `mark` if no later change can get the same mark.

        None if there is no mark, or if a record was created or removed in the last two seconds.
        """
        mark = self.mark()
        is_old = mark and int(mark.split()[1]) < time.time_ns() - SETTLED_NS
        return mark if is_old else None

    def new_mark(self) -> str | None:
        """Set the modification time of the folder of records to now, and return its new mark.

        The caller must hold the lock.

        Returns:
            The mark, which no earlier change has had; None if the times of the file system are too
            coarse.
        """
        now = time.time_ns()
        with contextlib.suppress(OSError):
            os.utime(self.path / _DOCUMENTS, ns=(now, now))
        mark = self.mark()
        return mark if mark and int(mark.split()[1]) == now else None

    @property
    def index_file(self) -> Path:
        """The path of the full-text index, which can be created again from the records."""
        return self.path / _INDEX

    def _entry(self, key: str, stamp: str | None) -> Record | Fault | None:
        """Return a record or its fault; the file is read only if its stamp has changed.

        Args:
            key: the key of the document.
            stamp: the current stamp of the record; None if the document was removed.

        Returns:
            The record or its fault; None if the document was removed.
        """
        if stamp is None:
            return None
        if self._known.get(key, ("",))[0] != stamp:
            try:
                self._known[key] = stamp, _read_record(self._record_file(key))
            except FileNotFoundError:
                return None
        return self._known[key][1]

    def cache_file(self, record: Record) -> Path:
        return self.path / _CACHES / record.cache

    def fault_of(self, record: Record, *, checked: bool) -> Fault | None:
        """Return the fault of the cache file of a document; None if it is undamaged.

        A missing file counts as damaged, and so does a file other than the one that was written
        with the record.

        Args:
            record: the document.
            checked: whether to read every byte of the file, or only its header.
        """
        path = self.cache_file(record)
        reason = seal_fault(path, record.seal, checked=checked)
        return None if reason is None else Fault(name=record.name, path=path, reason=reason)

    # The last use of a document is the time of an empty file.

    def record_use(self, key: str) -> None:
        """Store that a question uses a document now; if that is impossible, nothing is stored."""
        place, now = self.path / _ASKED / key, time.time_ns()
        with contextlib.suppress(OSError):
            place.parent.mkdir(exist_ok=True)
            place.touch()
            os.utime(place, ns=(now, now))

    def last_used_at(self, key: str) -> int | None:
        """Return the time of the last question that used a document, in nanoseconds since 1970.

        None if no question has used it.
        """
        return _time_of(self.path / _ASKED / key)

    def written_at(self, key: str) -> int:
        """Return the time at which a record was written, in nanoseconds since 1970.

        0 if there is no record.
        """
        return _time_of(self._record_file(key)) or 0

    # Changing, under a lock.

    @contextlib.contextmanager
    def changing(self) -> Iterator[set[str]]:
        """Hold the lock of the library within this block, and create the folder if necessary.

        Until the block ends, the lock file contains the id of this process. So the next process
        knows whether this one was killed or the block has raised, and removes the incomplete files
        that are left.

        Yields:
            The keys of the documents that have been written or removed in this block so far. It is
            empty at first, and `write` and `remove` add to it.

        Raises:
            LibraryError: another process holds the lock.
            OutputError: the folder cannot be written.
        """
        path = self.path / _LOCK
        with naming(path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = path.open("a+b", buffering=0)
        with lock:
            self._lock(lock.fileno(), path)
            with naming(path):
                lock.seek(0)
                is_left = bool(lock.read(1))
                lock.truncate(0)
                _write_unless_full(lock, b"%d\n" % os.getpid())
            if is_left:
                self._remove_leftovers()
            self._changed = set()
            yield self._changed
            with naming(path):
                lock.truncate(0)

    def require_unlocked(self) -> None:
        """Raise if another process is changing the library now, without writing anything.

        Raises:
            LibraryError: another process holds the lock.
            OutputError: the file system cannot lock files.
        """
        path = self.path / _LOCK
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), path.open("rb") as lock:
            self._lock(lock.fileno(), path)

    def _lock(self, descriptor: int, path: Path) -> None:
        """Lock an open file without waiting; closing the file releases the lock.

        Raises:
            LibraryError: another process has locked the file.
            OutputError: the file cannot be locked.
        """
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            who = path.read_text(errors="replace").strip()
            raise wrong(
                "library",
                f"only one process at a time can change {str(self.path)!r}, and process "
                f"{who or 'unknown'} is changing it now",
                "Wait until this process has finished",
                LibraryError,
            ) from error
        except OSError as error:
            with naming(path):
                raise error

    def write(
        self, text: Text, tokens: int, save: Callable[[Path], None], before: Record | None
    ) -> Record:
        """Write the cache and the record of a document, which replace those of `before`.

        If writing fails, the earlier document is unchanged. A new cache file that is left then is
        removed by the next process that changes the library. The caller must hold the lock.

        Args:
            text: the document.
            tokens: the number of its tokens, without the prefix.
            save: writes the cache to the path that it is called with.
            before: the record of the document that is replaced. None if the document is new, or if
                its record is damaged.

        Returns:
            The new record.

        Raises:
            InvalidArgumentError: `save` has raised it.
            LibraryError: a file that no library has written has the name of the record.
            OutputError: a file cannot be written, or `save` has raised a CacheFileError.
        """
        self._changed.add(text.key)
        sha256 = digest_of(text.text)
        file = self.path / _CACHES / f"{text.key}-{sha256[:16]}-{uuid.uuid4().hex[:8]}.safetensors"
        place = self._record_file(text.key)
        is_damaged = before is None and os.path.lexists(place)
        _require_own_record(place)
        for folder in (file.parent, place.parent):
            with naming(folder):
                folder.mkdir(exist_ok=True)
        try:
            save(file)
        except CacheFileError as error:
            raise OutputError(f"output: {str(error).removeprefix('path: ')}") from error
        except InvalidArgumentError:
            _unlink(file)
            raise
        record = Record(
            name=text.name,
            source=text.source,
            size=len(text.text.encode("utf-8", "surrogatepass")),
            sha256=sha256,
            text=text.text,
            stamp=text.stamp,
            chunks=tuple(passages(text.text)),
            tokens=tokens,
            bytes=file.stat().st_size,
            cache=file.name,
            seal=seal_of(file, checked=False),
        )
        replace_file(place, record.as_json(), sweep=False)
        if before is not None:
            _unlink(self.cache_file(before))
        elif is_damaged:
            self._remove_caches(text.key, kept=file.name)
        return record

    def remove(self, keys: Iterable[str]) -> list[Record]:
        """Remove documents, and return their records in the order of the keys.

        Every record is removed before its cache file, so that no reader looks for a missing file.
        The cache file and the time of the last question stay if they cannot be removed. Unknown
        keys and damaged records are ignored. The caller must hold the lock, and must not pass a key
        twice.

        Raises:
            OutputError: a record cannot be removed; the documents before it are gone already.
        """
        keys = list(keys)
        self._changed.update(keys)
        records = [record for record in map(self.record, keys) if record is not None]
        for record in records:
            place = self._record_file(record.key)
            with naming(place):
                place.unlink(missing_ok=True)
            _unlink(self.cache_file(record))
            _unlink(self.path / _ASKED / record.key)
        return records

    def _remove_leftovers(self) -> None:
        """Remove the files that killed processes have left, if they have names of a library.

        The caller must hold the lock. The files of documents with damaged records stay.
        """
        records, damaged = self.records()
        unsure = {fault.path.stem for fault in damaged}
        used = {record.cache for record in records.values()}
        for file in _files(self.path / _CACHES, f"{_NAMES[_CACHES]}|{_UNNAMED}"):
            if file.name not in used and file.name.partition("-")[0] not in unsure:
                _unlink(file)
        for folder, name in _NAMES.items():
            for file in _files(self.path / folder, _PARTIAL % name):
                _unlink(file)
        for file in _files(self.path / _ASKED, _NAMES[_ASKED]):
            if file.name not in records and file.name not in unsure:
                _unlink(file)

    def _record_file(self, key: str) -> Path:
        return self.path / _DOCUMENTS / f"{key}.json"

    def _remove_caches(self, key: str, kept: str) -> None:
        """Remove all cache files of a document except the one with the name `kept`."""
        for file in _files(self.path / _CACHES, _NAMES[_CACHES]):
            if file.name.partition("-")[0] == key and file.name != kept:
                _unlink(file)


def _files(folder: Path, name: str) -> list[Path]:
    """Return the files of a folder whose names match a regular expression, in order.

    Empty if the folder is missing.
    """
    try:
        return sorted(file for file in folder.iterdir() if re.fullmatch(name, file.name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _unlink(file: Path) -> None:
    """Remove a file that is not needed any more; if that is impossible, the file stays."""
    with contextlib.suppress(OSError):
        file.unlink()


def _write_unless_full(file: IO[bytes], data: bytes) -> None:
    """Write data to a file, and ignore a full disk, so that documents can still be removed."""
    try:
        file.write(data)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def _time_of(file: Path) -> int | None:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None


def _stamp(status: os.stat_result) -> str:
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"


def _read_record(file: Path) -> Record | Fault:
    """Read a record from its file; return a fault if the file is damaged.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_RECORD_BYTES:
            most = format_bytes(_MOST_RECORD_BYTES)
            raise LibraryError(f"the file is not a regular file with a size of at most {most}")
        record = Record.from_json(file.read_text("utf-8", "replace"))
        if record.key == file.stem and re.fullmatch(_NAMES[_CACHES], record.cache):
            return record
        reason = "the file is the record of a different document"
    except FileNotFoundError:
        raise
    except (SnapKVError, OSError) as error:
        reason = str(error)
    return Fault(name=file.name, path=file, reason=reason)


def _require_own_record(file: Path) -> None:
    """Raise if a file exists that does not begin as the records of a library do.

    An empty file may be replaced.

    Raises:
        LibraryError: no library has written the file.
        OutputError: the file cannot be read.
    """
    if not os.path.lexists(file):
        return
    with naming(file):
        beginning = file.read_bytes()[: len(BEGINNING)]
    if beginning and beginning != BEGINNING.encode():
        raise wrong(
            "library",
            f"the file {str(file)!r} was not written by a library, so it cannot be replaced",
            "Move this file to a different folder",
            LibraryError,
        )
