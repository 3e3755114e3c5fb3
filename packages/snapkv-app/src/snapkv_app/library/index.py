"""Keep the full-text index of a library, a SQLite file that can be built from the records."""

import contextlib
import hashlib
import re
import sqlite3
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import NamedTuple

from snapkv.errors import LibraryError, wrong
from snapkv.validation import printable
from snapkv_app.library.folder import Fault, Folder
from snapkv_app.library.records import WITHOUT_SPACES, Record, lines_of

_BUSY_SECONDS = 20
"""The longest wait for another process that is updating the index."""

_VERSION = 3

_TABLES = """
create table documents(key text primary key, stamp, name, source, tokens, bytes) without rowid;
create index documents_by_name on documents(name);
create index documents_by_source on documents(source);
create table spans(id integer primary key, key, start, stop, first_line, last_line);
create index spans_of on spans(key);
create table mark(at);
create virtual table passages using fts5(words, text unindexed, tokenize='porter unicode61');
"""
"""A row of `passages` has the id of its span, the text of the passage, and the words that find it,
which begin with the document's name.

`mark` contains the `Folder.mark` of the records if the index contains all of them.
"""

SINGLE = re.compile(f"[{WITHOUT_SPACES}]")
_APART = "\x1f\\g<0>\x1f"
"""Separates the characters of scripts without spaces, so that each of them is a word."""

_INVISIBLE = re.compile("[\u00ad\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
"""Soft hyphens, zero-width spaces and joiners, and marks of the writing direction."""

_HYPHENATED = re.compile(r"(\w+)[-\u2010][ \t]*\n\s*(\w+)")


class DocumentEntry(NamedTuple):
    """A document of a library, without its text."""

    key: str
    name: str  # in answers
    source: str | None  # the file from which it was read; None for a text without a file
    bytes: int  # of the file with its cache

    @property
    def where(self) -> str:
        """The file from which the document was read, or the name of a text without a file."""
        return self.source or self.name


_ENTRIES = "select key, name, source, bytes from documents"


class Index:
    """The documents and passages of a library, in a file or in memory.

    The records are authoritative. If their folder has changed, `update` compares the stamps of all
    records with those in the index. So it does not matter which process has added, changed or
    removed documents, or was killed.

    Args:
        place: the file of the index, or ":memory:".
        folder: the folder of the library.
        on_notice: called with a line about every damaged record.

    Raises:
        sqlite3.Error: the file cannot be opened, or SQLite has no full-text search. All methods
            raise it, too, if the file is damaged or another process writes to it for too long.
    """

    def __init__(self, place: str, folder: Folder, on_notice: Callable[[str], None]) -> None:
        self._folder, self._on_notice = folder, on_notice
        self.connection = opened(place)

    def close(self) -> None:
        self.connection.close()

    # Looking up documents.

    def entries(self, where: str = "", values: Iterable[str] = ()) -> list[DocumentEntry]:
        """Return the documents that meet a condition, sorted by name.

        Args:
            where: an SQL condition; empty for all documents.
            values: the values of its placeholders.
        """
        query = f"{_ENTRIES} {where and 'where ' + where} order by name"
        return [
            DocumentEntry(*row)
            for row in self.connection.execute(query, tuple(map(printable, values)))
        ]

    def named(self, name: str) -> list[DocumentEntry]:
        """Return the documents with a name."""
        return self.entries("name = ?", [name])

    def read_from(self, *sources: str) -> list[DocumentEntry]:
        """Return the documents that were read from one of these files."""
        return self.entries(f"source in ({', '.join('?' * len(sources))})", sources)

    def below(self, place: str) -> list[DocumentEntry]:
        """Return the documents that were read from the file `place`, or from files below it.

        Sources are absolute paths, so `place` must be one, too.
        """
        inside = place.rstrip("/") + "/"
        until = inside[:-1] + chr(ord("/") + 1)
        return self.entries("source = ? or source >= ? and source < ?", [place, inside, until])

    def place_of(self, passage: int) -> tuple[str, int]:
        """Return the key of the document of a passage, and the position where the passage starts.

        ("", 0) if there is no passage with that id.
        """
        return self.connection.execute(_PLACE, (passage,)).fetchone() or ("", 0)

    def is_current(self, key: str) -> bool:
        """Return whether the index contains the current record of a document."""
        known: tuple[str] | None = self.connection.execute(_STAMP, (key,)).fetchone()
        return known == (self._folder.stamp_of(key),)

    # Updating.

    def update(self, *, anew: bool = False) -> None:
        """Add new and changed records to the index, and remove deleted ones from it.

        A damaged record is reported, and the index does not contain its document.

        Args:
            anew: whether to compare the stamps of all records even if no record was created or
                removed since the last update.
        """
        mark = self._folder.mark()  # taken before the records are read
        if not anew and mark and self.connection.execute(_MARK).fetchall() == [(mark,)]:
            return
        settled, stamps = self._folder.settled(), self._folder.stamps()
        if settled is None and stamps == dict(self.connection.execute(_KNOWN)):
            return
        with self._changing():
            known = dict(self.connection.execute(_KNOWN))  # another one may have been faster
            changed = {key for key, stamp in known.items() if stamps.get(key) != stamp}
            changed |= stamps.keys() - known.keys()
            self._follow(changed, stamps.get)
            self._store_mark(settled)

    def follow(self, keys: Iterable[str]) -> None:
        """Update the index for documents that this process has just changed.

        `keys` must contain the keys of all documents that have changed since the last update. The
        caller must hold the lock of the folder.
        """
        mark = self._folder.new_mark()
        with self._changing():
            self._follow(keys, self._folder.stamp_of)
            self._store_mark(mark)

    def _follow(self, keys: Iterable[str], stamp_of: Callable[[str], str | None]) -> None:
        """Replace the rows of some documents by those of their current records.

        A document without a record loses its rows. So does one whose record is damaged, which is
        also reported. The caller must have begun a transaction.
        """
        for key in keys:
            self.connection.execute(_FORGET_WORDS, (key,))
            self.connection.execute("delete from spans where key = ?", (key,))
            self.connection.execute("delete from documents where key = ?", (key,))
            stamp = stamp_of(key)
            entry = None if stamp is None else self._folder.entry(key)
            if stamp is not None and isinstance(entry, Record):
                self._insert(stamp, entry)
            elif isinstance(entry, Fault):
                self._on_notice(entry.as_notice())

    def _insert(self, stamp: str, record: Record) -> None:
        """Add a document, which must not be in the tables yet, and its passages to them."""
        about = (record.key, stamp, record.name, record.source, record.tokens, record.bytes)
        self.connection.execute("insert into documents values (?, ?, ?, ?, ?, ?)", about)
        for *span, words, text in _rows(record):
            own = (record.key, *span)
            place = self.connection.execute("insert into spans values (null, ?, ?, ?, ?, ?)", own)
            row = (place.lastrowid, words, text)
            self.connection.execute(INSERT_PASSAGE, row)

    def _store_mark(self, mark: str | None) -> None:
        """Replace the stored mark of the folder, which says that the index has all its records.

        With None, no mark is stored, and the next `update` compares the stamps of all records.
        """
        self.connection.execute("delete from mark")
        if mark is not None:
            self.connection.execute("insert into mark values (?)", (mark,))

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Commit all changes of this block together, or none of them if it raises."""
        self.connection.execute("begin immediate")
        try:
            yield
            self.connection.execute("commit")
        except BaseException:
            self.connection.rollback()
            raise

    @contextlib.contextmanager
    def changes_prevented(self) -> Iterator[None]:
        """Prevent other connections from changing the index within this block.

        Otherwise another passage could get the same row id between two queries.
        """
        self.connection.execute("begin")
        try:
            yield
        finally:
            self.connection.rollback()

    # Checking.

    def agrees_with_records(self) -> bool:
        """Return whether the index agrees with all records that are unchanged since `update`.

        It does not agree if it contains passages without a document. Damaged records are skipped.
        """
        stamps, known = self._folder.stamps(), dict(self.connection.execute(_KNOWN))
        for key in (key for key, stamp in known.items() if stamps.get(key) == stamp):
            record = self._folder.record(key)
            if record is None:
                continue  # a damaged record is reported by itself
            about = self.connection.execute(_ABOUT, (key,)).fetchall()
            own = self.connection.execute(_ROWS, (key,)).fetchall()
            expected = (record.name, record.source, record.tokens, record.bytes)
            if about != [expected] or own != _rows(record):
                return False
        (lone,) = self.connection.execute(_LONE).fetchone()
        return not lone


_MARK = "select at from mark"
_PLACE = "select key, start from spans where id = ?"
_STAMP = "select stamp from documents where key = ?"
_KNOWN = "select key, stamp from documents"
_ABOUT = "select name, source, tokens, bytes from documents where key = ?"
_FORGET_WORDS = "delete from passages where rowid in (select id from spans where key = ?)"
INSERT_PASSAGE = "insert into passages(rowid, words, text) values (?, ?, ?)"
_ROWS = (
    "select start, stop, first_line, last_line, words, text from spans join passages "
    "on passages.rowid = spans.id where key = ? order by start"
)
_LONE = (
    "select (select count(*) from spans where key not in (select key from documents)) "
    "+ (select count(*) from passages where rowid not in (select id from spans))"
)


def fault_of(folder: Folder) -> Fault | None:
    """Check the full-text index of a library, and return how it is damaged.

    None if the index file is missing or undamaged. The file is not changed. A file of another
    version counts as undamaged, because the next search replaces it. So does a file that cannot be
    opened now, see `cannot_be_written`.
    """
    file = folder.index_file
    if not file.exists():
        return None
    reason = None
    try:
        with closing(Index(":memory:", folder, lambda _: None)) as index:
            copied = index.connection
            with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as own:
                if _version_of(own) != _VERSION:
                    return None  # the next search creates it again
                own.backup(copied)
            copied.execute("insert into passages(passages) values ('integrity-check')")
            (result,) = copied.execute("pragma integrity_check").fetchone()
            words = _digest_of_words(copied)
            copied.execute("insert into passages(passages) values ('rebuild')")
            is_sound = result == "ok" and words == _digest_of_words(copied)
            if not is_sound or not index.agrees_with_records():
                reason = "the content of the file has changed since it was written"
    except sqlite3.Error as error:
        reason = None if cannot_be_written(error) else str(error)
    if reason is None:
        return None
    remedy = f"{reason}; delete it, and the next search will create it again"
    return Fault(name=file.name, path=file, reason=remedy)


def _digest_of_words(index: sqlite3.Connection) -> str:
    """Return a digest of all indexed words with their positions.

    It is compared before and after the words are built again from the texts, because the integrity
    check of SQLite does not notice all words that were changed into others.
    """
    index.execute("create virtual table temp.words using fts5vocab(main, passages, instance)")
    digest = hashlib.sha256()
    for row in index.execute("select term, doc, offset from words"):
        digest.update(repr(row).encode())
    index.execute("drop table temp.words")
    return digest.hexdigest()


def cannot_be_written(error: sqlite3.Error) -> bool:
    """Return whether an error means that the index cannot be opened or written at the moment.

    The causes are a missing permission, another process that is writing, or a full disk. Other
    errors mean that the file is damaged or that SQLite has no full-text search.
    """
    kind = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return kind in (
        *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_FULL),
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED),
    )


def opened(place: str) -> sqlite3.Connection:
    """Open an index, and create its tables if it has none or those of another version.

    Args:
        place: the file of the index, or ":memory:".

    Raises:
        sqlite3.Error: the file cannot be opened, or SQLite has no full-text search.
    """
    index = sqlite3.connect(
        place, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        if _version_of(index) != _VERSION:
            _make(index)
    except sqlite3.Error:
        index.close()
        raise
    return index


def _version_of(index: sqlite3.Connection) -> int:
    (version,) = index.execute("pragma user_version").fetchone()
    return int(version)


def _make(index: sqlite3.Connection) -> None:
    """Create the tables, and drop those of another version.

    Nothing is changed if another process has created them meanwhile.
    """
    index.execute("begin immediate")
    try:
        if _version_of(index) != _VERSION:  # another one may have been faster
            for table in ("documents", "spans", "settled", "mark", "passages"):
                index.execute(f"drop table if exists {table}")
            for statement in _TABLES.strip().rstrip(";").split(";"):
                index.execute(statement)
            index.execute(f"pragma user_version = {_VERSION}")
        index.execute("commit")
    except BaseException:
        index.rollback()
        raise


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn errors of SQLite within this block into an error that names the remedy.

    Raises:
        LibraryError: SQLite has raised an error.
    """
    try:
        yield
    except sqlite3.Error as error:
        raise wrong(
            "library",
            "the search needs a version of SQLite that supports full-text search (FTS5), but "
            f"SQLite has reported: {error}",
            "Install a version of Python with an sqlite3 module that supports FTS5",
            LibraryError,
        ) from error


def folded(text: str) -> str:
    """Return `text` in the form in which passages and questions are compared.

    Ligatures and full-width letters become plain letters (NFKC), and invisible marks are removed.
    If a word is hyphenated at the end of a line, the joined word is added after its two parts. So
    "termi-", "nation" and "termination" are found, and so are both parts of "well-known".
    """
    plain = unicodedata.normalize("NFKC", _INVISIBLE.sub("", text))
    return _HYPHENATED.sub(r"\1 \2 \1\2", plain)


def as_indexed(text: str) -> str:
    """Return `text` in the form in which the full-text index stores its words.

    It is `folded`, and every character of a script without spaces becomes a word of its own.
    """
    return SINGLE.sub(_APART, folded(text))


def _rows(record: Record) -> list[tuple[int, int, int, int, str, str]]:
    """Return a row for every passage of a document, in order.

    A row has the first character of the passage and the first one after it, the first and the last
    line, the words as the index stores them, and the text.
    """
    rows = []
    for start, stop in record.chunks:
        text = record.text[start:stop]
        words = as_indexed(f"{record.name} {text}")
        rows.append((start, stop, *lines_of(record.text, (start, stop)), words, text))
    return rows
