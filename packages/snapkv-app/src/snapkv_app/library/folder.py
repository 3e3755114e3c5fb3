"""A library's files: what is there is whole, whoever was killed while writing."""

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
"""Of our files, by the folder they lie in."""

_PARTIAL = r"\.%s\.[0-9a-f]{32}\.partial"
"""What `snapkv.cache.saving.writing` writes before a file has its name."""

_UNNAMED = r"\.tmp[0-9A-Za-z]{6}"
"""What safetensors writes before that."""

_RECORD = re.compile(_NAMES[_DOCUMENTS])

_MOST_RECORD_BYTES = 1 << 28
"""Of a text and what is known of it; any model's positions are fewer."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong with a document."""

    name: str  # of the document, or where its record is damaged, of that file
    path: Path
    reason: str

    def as_notice(self) -> str:
        """A line for a damaged record."""
        return (
            f"library: {str(self.path)!r} cannot be used, {self.reason}; move it away and add its "
            "document again"
        )


class Folder:
    """The files of a library.

    ``library.json`` says how documents were read. Each document has a record in ``documents``, and
    a file with its cache in ``caches``, under a name that nothing has had before. The record
    is written when that file is complete, so a document is there if and only if its record is.
    Readers need no lock: a file that is gone has a successor, which the record names.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, tuple[str, Record | Fault]] = {}  # with the record's stamp
        self._changed: set[str] = set()

    def about(self) -> About | None:
        """How documents were read; None where there is no library yet."""
        file = self.path / _ABOUT
        try:
            return About.from_json(file.read_bytes(), str(file))
        except FileNotFoundError:
            self._require_free()
            return None
        except OSError as error:
            raise wrong(
                "library",
                f"the folder {str(self.path)!r} cannot be read: {error.strerror}",
                "Choose another place",
                LibraryError,
            ) from error

    @property
    def was_begun(self) -> bool:
        """Whether anybody has begun to add documents."""
        return (self.path / _LOCK).exists()

    def begin(self, about: About) -> None:
        """Make it the folder of a library; who does so must be the only one who changes it."""
        replace_file(self.path / _ABOUT, about.as_json())

    def _require_free(self) -> None:
        """Refuse a folder in which somebody else's files are."""
        if not self.path.is_dir():
            return
        strangers = sorted(file.name for file in self.path.iterdir() if not self._is_own(file))
        if strangers:
            raise wrong(
                "library",
                f"the folder {str(self.path)!r} is not a library, and it contains {strangers[0]!r}",
                "Name a library, or a new or empty folder to add documents to",
                LibraryError,
            )

    def _is_own(self, file: Path) -> bool:
        """Whether an adder that was killed may have left the file before there was a library."""
        if file.name == _LOCK:
            return file.is_file() and not file.read_bytes()[:20].strip(b"0123456789\n")
        return re.fullmatch(_PARTIAL % _NAMES[""], file.name) is not None

    # Readers.

    def records(self) -> tuple[dict[str, Record], list[Fault]]:
        """All documents by their keys, in the order of their names; and damaged records."""
        stamps = self.stamps()
        entries = [self._entry(key, stamps[key]) for key in sorted(stamps)]
        found = [entry for entry in entries if entry is not None]
        self._known = {key: known for key, known in self._known.items() if key in stamps}
        whole = [entry for entry in found if isinstance(entry, Record)]
        named = {record.key: record for record in sorted(whole, key=lambda each: each.name)}
        return named, [entry for entry in found if isinstance(entry, Fault)]

    def record(self, key: str) -> Record | None:
        """The document of that key as it is now; None where it is gone, or damaged."""
        entry = self.entry(key)
        return entry if isinstance(entry, Record) else None

    def entry(self, key: str) -> Record | Fault | None:
        """The document of that key, or what is wrong with its record; None where it is gone."""
        return self._entry(key, self.stamp_of(key))

    def stamps(self) -> dict[str, str]:
        """Of every record, by the document's key, what changes when it is written again."""
        found = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for file in os.scandir(self.path / _DOCUMENTS):
                if _RECORD.fullmatch(file.name):
                    with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                        found[file.name.removesuffix(".json")] = _said(file.stat())
        return found

    def stamp_of(self, key: str) -> str | None:
        """That of one record; None where it is gone."""
        try:
            return _said(self._record_file(key).stat())
        except FileNotFoundError:
            return None

    def mark(self) -> str | None:
        """The folder of records and when one came or went last; of another folder it is another."""
        try:
            status = (self.path / _DOCUMENTS).stat()
        except FileNotFoundError:
            return None
        return f"{status.st_ino} {status.st_mtime_ns}"

    def settled(self) -> str | None:
        """The mark, if no other change can get the same one; else None."""
        mark = self.mark()
        is_old = mark and int(mark.split()[1]) < time.time_ns() - SETTLED_NS
        return mark if is_old else None

    def new_mark(self) -> str | None:
        """A mark that no change gets: a time that no clock of a file system has shown.

        By whoever is alone in changing it; None where times are too coarse for that.
        """
        now = time.time_ns()
        with contextlib.suppress(OSError):
            os.utime(self.path / _DOCUMENTS, ns=(now, now))
        mark = self.mark()
        return mark if mark and int(mark.split()[1]) == now else None

    @property
    def index_file(self) -> Path:
        """What all records say, and where words are found, see `index`."""
        return self.path / _INDEX

    def _entry(self, key: str, stamp: str | None) -> Record | Fault | None:
        """What a record says, read again where its stamp has changed; None where it is gone."""
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
        """What is wrong with a document's cache, by every byte if checked, or by its header."""
        path = self.cache_file(record)
        reason = seal_fault(path, record.seal, checked=checked)
        return None if reason is None else Fault(name=record.name, path=path, reason=reason)

    # When a document was asked for last: the time of an empty file.

    def note_asked(self, key: str) -> None:
        """Somebody asks for a document; where the folder cannot be written, nobody learns of it."""
        place, now = self.path / _ASKED / key, time.time_ns()
        with contextlib.suppress(OSError):
            place.parent.mkdir(exist_ok=True)
            place.touch()
            os.utime(place, ns=(now, now))

    def asked_at(self, key: str) -> int | None:
        """When, in nanoseconds; None where nobody has."""
        return _time_of(self.path / _ASKED / key)

    def written_at(self, key: str) -> int:
        return _time_of(self._record_file(key)) or 0

    # Who changes it is alone.

    @contextlib.contextmanager
    def changing(self) -> Iterator[set[str]]:
        """Within this block nobody else changes the library; the folder is made.

        The lock says who changes it until all is done: so what a killed one has left is known.
        Yields the keys of documents that have been written or removed so far.
        """
        path = self.path / _LOCK
        with naming(path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = path.open("a+b", buffering=0)
        with lock:
            self._take(lock.fileno(), path)
            with naming(path):
                lock.seek(0)
                is_left = bool(lock.read(1))
                lock.truncate(0)
                _write_if_room(lock, b"%d\n" % os.getpid())
            if is_left:
                self._clean()
            self._changed = set()
            yield self._changed
            with naming(path):
                lock.truncate(0)

    def require_unlocked(self) -> None:
        """Raise if another process changes the library now; nothing is written."""
        path = self.path / _LOCK
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), path.open("rb") as lock:
            self._take(lock.fileno(), path)

    def _take(self, descriptor: int, path: Path) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            who = path.read_text(errors="replace").strip()
            raise wrong(
                "library",
                f"only one process at a time can change {str(self.path)!r}, and process "
                f"{who or 'unknown'} is changing it now",
                "Wait until it has ended",
                LibraryError,
            ) from error
        except OSError as error:
            with naming(path):
                raise error

    def write(
        self, text: Text, tokens: int, save: Callable[[Path], None], before: Record | None
    ) -> Record:
        """Add a document, whose cache `save` writes to a file, or replace the one from `before`.

        Where that fails, what was there still is, and what was written of the file goes.
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
        """Forget documents; records go first, so that nobody looks for a cache that is gone."""
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

    def _clean(self) -> None:
        """Remove what killed adders have left, under names of ours only."""
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
        for file in _files(self.path / _CACHES, _NAMES[_CACHES]):
            if file.name.partition("-")[0] == key and file.name != kept:
                _unlink(file)


def _files(folder: Path, name: str) -> list[Path]:
    """The files of a folder with such names, sorted; none where there is no folder."""
    try:
        return sorted(file for file in folder.iterdir() if re.fullmatch(name, file.name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _unlink(file: Path) -> None:
    """Remove a file that nobody needs."""
    with contextlib.suppress(OSError):
        file.unlink()


def _write_if_room(file: IO[bytes], data: bytes) -> None:
    """Write what can be missed: on a full disk, documents can still be removed."""
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


def _said(status: os.stat_result) -> str:
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"


def _read_record(file: Path) -> Record | Fault:
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_RECORD_BYTES:
            most = format_bytes(_MOST_RECORD_BYTES)
            raise LibraryError(f"it is not a regular file of at most {most}")
        record = Record.from_json(file.read_text("utf-8", "replace"))
        if record.key == file.stem and re.fullmatch(_NAMES[_CACHES], record.cache):
            return record
        reason = "it is the record of another document"
    except FileNotFoundError:
        raise
    except (SnapKVError, OSError) as error:
        reason = str(error)
    return Fault(name=file.name, path=file, reason=reason)


def _require_own_record(file: Path) -> None:
    """Refuse to replace a file that no library has written."""
    if not os.path.lexists(file):
        return
    with naming(file):
        beginning = file.read_bytes()[: len(BEGINNING)]
    if beginning and beginning != BEGINNING.encode():
        raise wrong(
            "library",
            f"no library has written the file {str(file)!r}, so it is not replaced",
            "Move it away",
            LibraryError,
        )
