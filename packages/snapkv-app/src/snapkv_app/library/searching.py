"""Find the documents of a library that match a question."""

import contextlib
import math
import re
import sqlite3
import threading
import unicodedata
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

from snapkv_app.library.folder import Folder
from snapkv_app.library.index import (
    INSERT_PASSAGE,
    SINGLE,
    Index,
    as_indexed,
    cannot_be_written,
    explained,
    folded,
    opened,
)
from snapkv_app.library.records import WITHOUT_SPACES, Span

Found = TypeVar("Found")

_COMMON = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then "
    "there these they this to was will with"
)
_STOPWORDS = frozenset(_COMMON.split())
"""Words that are too common to search for, as in Lucene."""


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A document that matches a question, with the passage that matches best."""

    key: str  # of the document in the library
    name: str  # of the document in answers
    score: float  # BM25; a better match has a larger score
    span: Span  # of the passage, in characters of the text
    lines: Span  # the first and the last line of the passage, counted from 1
    passage: str
    tokens: int  # of the whole document


class Passages:
    """The full-text index of a library, in a file of its folder.

    If that file cannot be written or is damaged, an index in memory is used from then on. Several
    threads may search at the same time.

    Args:
        folder: the folder of the library.
        on_notice: called with a line about every file that cannot be used.
    """

    def __init__(self, folder: Folder, on_notice: Callable[[str], None]) -> None:
        self._folder, self._on_notice = folder, on_notice
        self._memory: Index | None = None
        self._lock = threading.Lock()  # for the index in memory; SQLite locks files itself

    def find_documents(self, question: str, documents: int) -> list[Hit]:
        """Return the documents that match a question best, each with its best passage.

        Args:
            question: the question.
            documents: the largest number of documents to return.

        Returns:
            The documents with a word of the question, the best first.

        Raises:
            LibraryError: this Python's SQLite has no full-text search.
        """

        def search(index: Index) -> list[Hit]:
            hits = _best(index, question, documents)
            if all(index.is_current(hit.key) for hit in hits):
                return hits
            index.update(anew=True)  # a record was overwritten, or changed during the search
            return _best(index, question, documents)

        return self.query(search)

    def query(self, ask: Callable[[Index], Found]) -> Found:
        """Update the index, and return the result of calling `ask` with it.

        If the index file cannot be used, `ask` is called with an index in memory instead, perhaps
        for the second time, and so it is at all later calls. The caller must not use an index after
        the call.

        Raises:
            LibraryError: this Python's SQLite has no full-text search. Errors of `ask` are raised
                unchanged, except those of SQLite.
        """
        file = self._folder.index_file
        if self._memory is None:
            try:
                with closing(Index(str(file), self._folder, self._on_notice)) as index:
                    index.update()
                    return ask(index)
            except sqlite3.Error as error:
                if not cannot_be_written(error):
                    self._on_notice(
                        f"library: {str(file)!r} cannot be used: {error}. Delete it, and the next "
                        "search will create it again"
                    )
        with self._lock, explained():
            if self._memory is None:
                self._memory = Index(":memory:", self._folder, self._on_notice)
                weakref.finalize(self, self._memory.close)  # or Python 3.13 and newer warn
            self._memory.update()
            return ask(self._memory)

    def follow(self, keys: Iterable[str]) -> None:
        """Update the index file for documents that this process has just changed.

        `keys` must contain the keys of all documents that have changed since the last update.
        The caller must hold the lock of the folder. If updating fails, or an index in memory is
        used, the next search updates the index.
        """
        with contextlib.suppress(sqlite3.Error):
            if self._memory is not None:
                return
            with closing(Index(str(self._folder.index_file), self._folder, self._on_notice)) as own:
                own.follow(keys)


_FOUND = "select rowid, bm25(passages) from passages where passages match ?"
_HIT = (
    "select key, name, start, stop, first_line, last_line, text, tokens from spans "
    "join documents using (key) join passages on passages.rowid = spans.id where id = ?"
)


def _best(index: Index, question: str, documents: int) -> list[Hit]:
    """Return the documents that match a question best, as `index` is now, without updating it.

    There are at most `documents` of them, the best first, each with its best passage.
    """
    with index.changes_prevented():
        hits: dict[str, Hit] = {}
        for place, score in _ranked(index.connection, question, index.place_of):
            if len(hits) == documents:
                break
            row = index.connection.execute(_HIT, (place,)).fetchone()
            if row is not None and row[0] not in hits:
                hits[row[0]] = _hit(row, score)
        return list(hits.values())


def ranked(passages: Sequence[str], question: str) -> list[int]:
    """Sort passages by how well they match a question, measured by BM25.

    Returns:
        The indices of the passages that contain a word of the question, the best first and equally
        good ones in order; empty if no passage contains one.

    Raises:
        LibraryError: this Python's SQLite has no full-text search.
    """
    rows = [(place, as_indexed(text), text) for place, text in enumerate(passages)]
    with explained(), closing(opened(":memory:")) as index:
        index.executemany("insert into spans(id) values (?)", [(place,) for place, *_ in rows])
        index.executemany(INSERT_PASSAGE, rows)
        return [place for place, _ in _ranked(index, question, int)]


def _ranked(
    index: sqlite3.Connection, question: str, order: Callable[[int], Any]
) -> list[tuple[int, float]]:
    """Return the row ids and BM25 scores of the passages with a word of the question.

    The best passage, which has the largest score, comes first. Passages with equal scores are
    sorted by the value that `order` returns for their row ids, so that the result does not depend
    on when a document was added. The caller must prevent changes of the index meanwhile.
    """
    (total,) = index.execute("select count(*) from spans").fetchone()
    scores: dict[int, float] = defaultdict(float)
    # SQLite's weight of a word that is in half of the passages or more is nearly zero, and in a
    # library of a few documents most words are. Lucene's weight, log(1 + (N - n + 0.5) / (n +
    # 0.5)), is always positive. So each word is searched for separately and weighted again.
    for word in _words(question):
        rows = index.execute(_FOUND, (f'"{as_indexed(word)}"',)).fetchall()
        odds = (total - len(rows) + 0.5) / (len(rows) + 0.5)
        weight = math.log1p(odds) / max(math.log(odds), 1e-6)
        for place, score in rows:
            scores[place] -= weight * score
    ranked = sorted(scores.items(), key=lambda each: -each[1])
    found: list[tuple[int, float]] = []
    for _, equal in groupby(ranked, key=lambda each: each[1]):
        tied = list(equal)
        found += tied if len(tied) == 1 else sorted(tied, key=lambda each: order(each[0]))
    return found


def _words(question: str) -> list[str]:
    """Return the words of a question to search for, without repetitions and stopwords.

    A word is a run of letters, digits, `_` and marks on letters, such as the vowels of Hindi. In
    Chinese, Japanese and Korean, which put no spaces between words, every pair of neighbouring
    characters is a word. The letter after an apostrophe, as in "what's", is not a word.
    """
    text = _CONTRACTED.sub(" ", folded(question).lower())
    kept = (each if each == "_" or unicodedata.category(each)[0] in "LNM" else " " for each in text)
    runs = _RUN.findall("".join(kept))
    words = dict.fromkeys(word for run in runs for word in _words_of(run))
    return [word for word in words if word not in _STOPWORDS]


_CONTRACTED = re.compile(r"(?<=\w)['\u2019]\w\b")
_RUN = re.compile(f"[{WITHOUT_SPACES}]+|[^\\s{WITHOUT_SPACES}]+")


def _words_of(run: str) -> Iterator[str]:
    """Yield the words of a run of letters: the run itself, or pairs of neighbouring characters.

    Pairs are for scripts that put no spaces between words. A single character of such a script is
    yielded alone.
    """
    if not SINGLE.match(run):
        yield run
        return
    for start in range(max(len(run) - 1, 1)):
        yield run[start : start + 2]


def _hit(row: tuple[str, str, int, int, int, int, str, int], score: float) -> Hit:
    key, name, start, stop, first_line, last_line, text, tokens = row
    return Hit(
        key=key,
        name=name,
        score=score,
        span=(start, stop),
        lines=(first_line, last_line),
        passage=text,
        tokens=tokens,
    )
