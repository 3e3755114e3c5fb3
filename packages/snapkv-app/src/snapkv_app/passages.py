"""Select the passages of long documents that match a question best, as many as fit."""

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from snapkv.errors import DocumentError, wrong
from snapkv_app.answering import MOST_CHARACTERS_PER_TOKEN
from snapkv_app.library.records import Span, Text, lines_of, passages
from snapkv_app.library.searching import ranked

Part = tuple[int, Span]
"""The number of a document, and a range of characters in its text."""

OMITTED = "\n\n[...]\n\n"
"""The text between passages that are not adjacent."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The location of a passage in a document, or of several passages without a gap."""

    document: str
    lines: Span  # its first and last line, counted from 1


@dataclass(frozen=True, kw_only=True)
class Excerpts:
    """The passages of documents that were chosen to be read, or the whole documents."""

    documents: Sequence[Text]  # with the text of those passages alone
    tokens: int  # to read, as `count_tokens` of `PassageChoice` counts them
    read: int = 0  # the number of chosen passages; 0 for whole documents
    of: int = 0  # the number of all passages; 0 for whole documents
    places: Sequence[Place] = ()  # empty for whole documents


class PassageChoice:
    """A choice of what to read of documents: all, or the passages that match a question best.

    Args:
        documents: the documents.
        question: the question.
        count_tokens: counts the tokens to read for the documents that it gets. It is called with at
            most twice as much text as there is room for, however long the documents are.

    Attributes:
        chosen: the results of all calls of `choose`, in order.
    """

    def __init__(
        self,
        documents: Sequence[Text],
        question: str,
        count_tokens: Callable[[Sequence[Text]], int],
    ) -> None:
        self._documents, self._question, self._count = documents, question, count_tokens
        self.chosen: list[Excerpts] = []

    def choose(self, most: int) -> Excerpts:
        """Choose what to read of the documents, with at most `most` tokens.

        If even the best passage has more tokens, it is chosen alone.

        Returns:
            The whole documents if they have at most `most` tokens. Otherwise the passages that
            match the question best, in the order of the text. It is appended to `chosen`.

        Raises:
            DocumentError: the documents have more tokens, and contain no word of the question.
            LibraryError: this Python's SQLite has no full-text search.
        """
        if (tokens := self._counted(self._documents, most)) is not None:
            self.chosen.append(Excerpts(documents=self._documents, tokens=tokens))
        else:
            self.chosen.append(self._best(most))
        return self.chosen[-1]

    def _best(self, most_tokens: int) -> Excerpts:
        """Choose the best passages by BM25, as many as fit into `most_tokens`, but at least one.

        Raises:
            DocumentError: no passage contains a word of the question.
            LibraryError: this Python's SQLite has no full-text search.
        """

        def is_too_much(number: int) -> bool:
            return self._counted(self._texts(_joined(best[:number])), most_tokens) is None

        best = self._ranked
        most = 1
        while most < len(best) and not is_too_much(most):
            most *= 2
        numbers = range(1, min(most, len(best)) + 1)
        read = max(1, bisect.bisect_left(numbers, True, key=is_too_much))
        parts = _joined(best[:read])
        documents = self._texts(parts)
        return Excerpts(
            documents=documents,
            tokens=self._count(documents),
            read=read,
            of=len(self._parts),
            places=[
                Place(
                    document=self._documents[place].name,
                    lines=lines_of(self._documents[place].text, span),
                )
                for place, span in parts
            ],
        )

    def _counted(self, read: Sequence[Text], most: int) -> int | None:
        """Return the number of tokens of documents, or None for more than `most`.

        A text of very many characters counts as more, without being tokenized.
        """
        if sum(len(each.text) for each in read) > MOST_CHARACTERS_PER_TOKEN * most:
            return None
        tokens = self._count(read)
        return tokens if tokens <= most else None

    @cached_property
    def _parts(self) -> list[Part]:
        return [
            (place, span)
            for place, document in enumerate(self._documents)
            for span in passages(document.text)
        ]

    @cached_property
    def _ranked(self) -> list[Part]:
        """The passages with a word of the question, the best first; at least one.

        Raises:
            DocumentError: no passage contains a word of the question.
            LibraryError: this Python's SQLite has no full-text search.
        """
        texts = [self._documents[place].text[slice(*span)] for place, span in self._parts]
        if best := ranked(texts, self._question):
            return [self._parts[place] for place in best]
        raise wrong(
            "question",
            f"no word of {self._question!r} occurs in the documents",
            "Use different words",
            DocumentError,
        )

    def _texts(self, parts: Iterable[Part]) -> list[Text]:
        """Return copies of the documents that have parts, with the text of these parts alone.

        The parts must be sorted. `OMITTED` is between the parts of a document.
        """
        found = []
        for place, own in groupby(parts, key=lambda part: part[0]):
            document = self._documents[place]
            texts = (document.text[start:stop] for _, (start, stop) in own)
            found.append(replace(document, text=OMITTED.join(texts)))
        return found


def _joined(chosen: Iterable[Part]) -> list[Part]:
    """Sort parts by document and position, and merge those that overlap or touch each other."""
    parts: list[Part] = []
    for place, (start, stop) in sorted(chosen):
        last, (begin, end) = parts[-1] if parts else (-1, (0, 0))
        if place == last and start <= end:
            parts[-1] = place, (begin, max(end, stop))
        else:
            parts.append((place, (start, stop)))
    return parts
