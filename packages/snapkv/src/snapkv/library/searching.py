"""Finding the documents of a library that fit a question."""

import contextlib
import math
import sqlite3
import threading
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from snapkv.errors import LibraryError
from snapkv.library.embeddings import TextEmbeddings
from snapkv.library.folder import Fault, Folder
from snapkv.library.records import Record, Span, lines_of

_REORDERED = 200
"""So many passages at most are put in the order of their meaning."""

_BUSY_SECONDS = 20
"""So long at most a search waits for another one that brings the index up to date."""

_TABLES = """
create table if not exists documents(key text primary key, stamp, name, tokens) without rowid;
create table if not exists spans(
    id integer primary key, key, start, stop, first_line, last_line);
create index if not exists spans_of on spans(key);
create table if not exists settled(at);
create virtual table if not exists passages using fts5(words, tokenize='porter unicode61');
"""
"""A row of `passages` has the id of its span; its words begin with the document's name.

`settled` has what `Folder.settled` says of the records, where the index knows them all.
"""

_COMMON = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then "
    "there these they this to was will with"
)
_STOPWORDS = frozenset(_COMMON.split())
"""Lucene's, which nothing is found by."""


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A document that was found, by the passage that fits best."""

    key: str  # what the library knows it by
    name: str  # what answers call it
    score: float  # BM25, or the nearness of the passage's meaning in [-1, 1]
    span: Span  # of the passage, in characters of the text
    lines: Span  # its first and last line, counted from 1
    passage: str
    tokens: int  # of the whole document


class Passages:
    """An index of all passages of a library's documents: SQLite's full-text search, in a file.

    The records are what holds. Where their folder has changed, a search compares their stamps with
    those in the index and brings it up to date, whoever has added, changed or removed documents, or
    was killed doing so. Where it cannot be written or is damaged, an index in memory does.
    """

    def __init__(self, folder: Folder, on_notice: Callable[[str], None]) -> None:
        self._folder, self._on_notice = folder, on_notice
        self._memory: sqlite3.Connection | None = None
        self._lock = threading.Lock()  # of that in memory; a file has its own

    def best(self, question: str, documents: int, *, by_meaning: bool = False) -> list[Hit]:
        """The best passage of each of the best documents, of those that have a word of it.

        By meaning, the first passages that were found by their words are put in another order.
        """
        asked = question, documents, by_meaning
        file = self._folder.index_file
        if self._memory is None:
            try:
                with closing(_opened(str(file))) as index:
                    return self._best(index, *asked)
            except sqlite3.Error as error:
                if not _cannot_be_written(error):
                    self._on_notice(
                        f"library: {str(file)!r} cannot be used, {error}; delete it, and the next "
                        "search makes it again"
                    )
        with self._lock, _explained():
            self._memory = self._memory or _opened(":memory:")
            return self._best(self._memory, *asked)

    def _best(
        self, index: sqlite3.Connection, question: str, documents: int, by_meaning: bool
    ) -> list[Hit]:
        settled = self._folder.settled()
        if settled is None or index.execute(_SETTLED).fetchall() != [(settled,)]:
            self._update(index)
        hits = _best(index, question, documents, by_meaning)
        for hit in hits:
            known = index.execute(_STAMP, (hit.key,)).fetchone()
            if known != (self._folder.stamp_of(hit.key),):  # changed in its place, or meanwhile
                self._update(index)
                return _best(index, question, documents, by_meaning)
        return hits

    def fault(self) -> Fault | None:
        """What is wrong with the file of the index; None where there is none, or nothing."""
        file = self._folder.index_file
        if not file.exists():
            return None
        reason = None
        try:
            with closing(_opened(":memory:")) as index:
                with closing(
                    sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)
                ) as own:
                    own.backup(index)
                index.execute("insert into passages(passages) values ('integrity-check')")
                (said,) = index.execute("pragma integrity_check").fetchone()
                if said != "ok" or not self._holds_what_is_there(index):
                    reason = "it is not what was written"
        except sqlite3.Error as error:
            reason = str(error)
        if reason is None:
            return None
        remedy = f"{reason}; delete it, and the next search makes it again"
        return Fault(name=file.name, path=file, reason=remedy)

    def _holds_what_is_there(self, index: sqlite3.Connection) -> bool:
        """Whether the index says of every record that has not changed since what that says."""
        stamps, known = self._folder.stamps(), dict(index.execute(_KNOWN))
        for key in (key for key, stamp in known.items() if stamps.get(key) == stamp):
            record = self._folder.record(key)
            if record is None:
                continue  # it is named itself
            about = index.execute("select name, tokens from documents where key = ?", (key,))
            own = index.execute(_ROWS, (key,)).fetchall()
            if about.fetchall() != [(record.name, record.tokens)] or own != _rows(record):
                return False
        (lone,) = index.execute(_LONE).fetchone()
        return not lone

    def _update(self, index: sqlite3.Connection) -> None:
        """Read the records that are new or have changed, and forget those that are gone."""
        settled = self._folder.settled()  # before they are looked at
        stamps = self._folder.stamps()
        if settled is None and stamps == dict(index.execute(_KNOWN)):
            return
        index.execute("begin immediate")
        try:
            known = dict(index.execute(_KNOWN))  # another search may have been faster
            for key in (key for key, stamp in known.items() if stamps.get(key) != stamp):
                index.execute(_FORGET_WORDS, (key,))
                index.execute("delete from spans where key = ?", (key,))
                index.execute("delete from documents where key = ?", (key,))
            for key in (key for key, stamp in stamps.items() if known.get(key) != stamp):
                entry = self._folder.entry(key)
                if isinstance(entry, Record):
                    _insert(index, stamps[key], entry)
                elif isinstance(entry, Fault):
                    self._on_notice(entry.as_notice())
            index.execute("delete from settled")
            if settled is not None:
                index.execute("insert into settled values (?)", (settled,))
            index.execute("commit")
        except BaseException:
            index.rollback()
            raise


_SETTLED = "select at from settled"
_STAMP = "select stamp from documents where key = ?"
_KNOWN = "select key, stamp from documents"
_FORGET_WORDS = "delete from passages where rowid in (select id from spans where key = ?)"
_ROWS = (
    "select start, stop, first_line, last_line, words from spans join passages "
    "on passages.rowid = spans.id where key = ? order by start"
)
_LONE = (
    "select (select count(*) from spans where key not in (select key from documents)) "
    "+ (select count(*) from passages where rowid not in (select id from spans))"
)
_HIT = (
    "select key, name, start, stop, first_line, last_line, words, tokens from spans "
    "join documents using (key) join passages on passages.rowid = spans.id where id = ?"
)


def _cannot_be_written(error: sqlite3.Error) -> bool:
    """Whether nothing is wrong with the file itself: others own it or write to it, or no room."""
    kind = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return kind in (
        *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_FULL),
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED),
    )


def _opened(name: str) -> sqlite3.Connection:
    index = sqlite3.connect(
        name, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        index.executescript(_TABLES)
    except sqlite3.Error:
        index.close()
        raise
    return index


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise LibraryError(
            f"library: expected an SQLite with full-text search (FTS5), got {error}; install a "
            "Python whose sqlite3 has it"
        ) from error


def _rows(record: Record) -> list[tuple[int, int, int, int, str]]:
    """Of every passage its span, its lines and its words."""
    rows = []
    for start, stop in record.chunks:
        words = f"{record.name} {record.text[start:stop]}"
        rows.append((start, stop, *lines_of(record.text, (start, stop)), words))
    return rows


def _insert(index: sqlite3.Connection, stamp: str, record: Record) -> None:
    about = (record.key, stamp, record.name, record.tokens)
    index.execute("insert into documents values (?, ?, ?, ?)", about)
    for *span, words in _rows(record):
        place = index.execute("insert into spans values (null, ?, ?, ?, ?, ?)", (record.key, *span))
        row = (place.lastrowid, words)
        index.execute("insert into passages(rowid, words) values (?, ?)", row)


def _best(index: sqlite3.Connection, question: str, documents: int, by_meaning: bool) -> list[Hit]:
    with _unchanging(index):
        found = _ranked(index, question)
        if by_meaning:
            found = _by_meaning(index, question, found[:_REORDERED])
        hits: dict[str, Hit] = {}
        for place, score in found:
            if len(hits) == documents:
                break
            row = index.execute(_HIT, (place,)).fetchone()
            if row is not None and row[0] not in hits:
                hits[row[0]] = _hit(row, score)
        return list(hits.values())


@contextlib.contextmanager
def _unchanging(index: sqlite3.Connection) -> Iterator[None]:
    """Within this block other searches do not write; a row may get another passage by that."""
    index.execute("begin")
    try:
        yield
    finally:
        index.rollback()


def _ranked(index: sqlite3.Connection, question: str) -> list[tuple[int, float]]:
    """The passages that have a word of the question, and their BM25, the best first.

    SQLite weighs a word that is in half of the passages or more with nothing, which in a few
    documents is most of them; Lucene's weight, log(1 + (N - n + 0.5) / (n + 0.5)), is always above
    zero. So every word is asked for by itself, and its share weighed again.
    """
    (total,) = index.execute("select count(*) from spans").fetchone()
    scores: dict[int, float] = defaultdict(float)
    for word in _words(question):
        rows = index.execute(
            "select rowid, bm25(passages) from passages where passages match ?", (f'"{word}"',)
        ).fetchall()
        odds = (total - len(rows) + 0.5) / (len(rows) + 0.5)
        weight = math.log1p(odds) / max(math.log(odds), 1e-6)
        for place, score in rows:
            scores[place] -= weight * score
    return sorted(scores.items(), key=lambda each: (-each[1], each[0]))


def _words(question: str) -> list[str]:
    """Runs of two or more letters, digits, `_` and marks on them, such as the vowels of Hindi."""
    text = unicodedata.normalize("NFC", question).lower()
    kept = (each if each == "_" or unicodedata.category(each)[0] in "LNM" else " " for each in text)
    words = dict.fromkeys("".join(kept).split())
    return [word for word in words if len(word) > 1 and word not in _STOPWORDS]


def _by_meaning(
    index: sqlite3.Connection, question: str, found: Sequence[tuple[int, float]]
) -> list[tuple[int, float]]:
    places = [place for place, _ in found]
    asked = "select words from passages where rowid = ?"
    texts = [index.execute(asked, (place,)).fetchone()[0] for place in places]
    near = TextEmbeddings().nearest(question, texts)
    return [(places[place], score) for place, score in near]


def _hit(row: tuple[str, str, int, int, int, int, str, int], score: float) -> Hit:
    key, name, start, stop, first_line, last_line, words, tokens = row
    return Hit(
        key=key,
        name=name,
        score=score,
        span=(start, stop),
        lines=(first_line, last_line),
        passage=words[len(name) + 1 :],
        tokens=tokens,
    )
