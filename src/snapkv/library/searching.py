"""Finding the documents of a library that fit a question."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from snapkv.errors import LibraryError
from snapkv.library.bm25 import WordIndex
from snapkv.library.passages import Span, lines_of
from snapkv.library.records import Record


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A document that was found.

    Attributes:
        key: what the library knows it by.
        name: what answers call it.
        score: BM25 of the passage that fits best.
        span: where that passage stands in the text, in characters; half-open.
        lines: the first and the last line of it, counted from 1.
        passage: its text.
        tokens: of the whole document.
    """

    key: str
    name: str
    score: float
    span: Span
    lines: Span
    passage: str
    tokens: int


class Passages:
    """An index of all passages of some documents."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._places = [(record, span) for record in records for span in record.chunks]
        texts = [f"{record.name} {record.text[slice(*span)]}" for record, span in self._places]
        self._index = WordIndex(texts) if texts else None

    def best(self, question: str, documents: int) -> list[Hit]:
        """The best passage of each of the best documents."""
        found: dict[str, Hit] = {}
        for place, score in self._index.ranked(question) if self._index else ():
            if score <= 0 or len(found) == documents:
                break
            record, span = self._places[place]
            if record.key not in found:
                found[record.key] = _hit(record, span, score)
        return list(found.values())


def _hit(record: Record, span: Span, score: float) -> Hit:
    return Hit(
        key=record.key,
        name=record.name,
        score=score,
        span=span,
        lines=lines_of(record.text, span),
        passage=record.text[slice(*span)],
        tokens=record.tokens,
    )


def require_some(hits: Sequence[Hit]) -> None:
    """Refuse to ask no document at all.

    Raises:
        LibraryError: there is no hit.
    """
    if not hits:
        raise LibraryError(
            "hits: expected at least one document, got none; ask with words that stand in the "
            "library's documents"
        )


def gone(hit: Hit) -> LibraryError:
    """What to raise where a document that was found is not there any more."""
    return LibraryError(
        f"library: expected the document {hit.name!r} to be there, got none, since it was removed "
        "or its record damaged meanwhile; search again"
    )
