"""Finding the documents of a library that fit a question."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from snapkv.library.embeddings import TextEmbeddings
from snapkv.library.records import Record, Span, lines_of
from snapkv.word_index import WordIndex

_REORDERED = 200
"""So many passages at most are put in the order of their meaning."""


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
    """An index of all passages of some documents."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._places = [(record, span) for record in records for span in record.chunks]
        self._texts = [
            f"{record.name} {record.text[slice(*span)]}" for record, span in self._places
        ]
        self._index = WordIndex(self._texts) if self._texts else None

    def best(self, question: str, documents: int, *, by_meaning: bool = False) -> list[Hit]:
        """The best passage of each of the best documents, of those that have a word of it.

        By meaning, the first passages that were found by their words are put in another order.
        """
        ranked = self._index.ranked(question) if self._index else iter(())
        found = itertools.takewhile(lambda each: each[1] > 0, ranked)
        ordered = self._by_meaning(question, found) if by_meaning else found
        hits: dict[str, Hit] = {}
        for place, score in ordered:
            if len(hits) == documents:
                break
            record, span = self._places[place]
            if record.key not in hits:
                hits[record.key] = _hit(record, span, score)
        return list(hits.values())

    def _by_meaning(
        self, question: str, found: Iterable[tuple[int, float]]
    ) -> list[tuple[int, float]]:
        places = [place for place, _ in itertools.islice(found, _REORDERED)]
        texts = [self._texts[place] for place in places]
        near = TextEmbeddings().nearest(question, texts)
        return [(places[place], score) for place, score in near]


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
