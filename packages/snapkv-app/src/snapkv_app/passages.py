"""Select the passages of long documents that match a question best, as many as fit."""

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from snapkv.errors import DocumentError, wrong
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
    """The best passages of documents, in the order of the text."""

    documents: list[Text]  # with the text of those passages alone
    read: int
    of: int
    places: list[Place]


def best_passages(
    documents: Sequence[Text], question: str, fits: Callable[[Sequence[Text]], bool]
) -> Excerpts:
    """Select the passages of 200 words that match a question best by BM25, as many as fit.

    Args:
        documents: the documents.
        question: the question.
        fits: returns whether there is room for the documents that it gets. It is called with at
            most twice as much text as there is room for, however long the documents are. One
            passage is selected in any case.

    Raises:
        DocumentError: no passage has a word of the question.
    """
    found = [
        (place, span)
        for place, document in enumerate(documents)
        for span in passages(document.text)
    ]
    texts = [documents[place].text[slice(*span)] for place, span in found]
    best = [found[place] for place in ranked(texts, question)]
    if not best:
        raise wrong(
            "question",
            f"no word of {question!r} occurs in the documents",
            "Use other words",
            DocumentError,
        )

    def is_too_much(number: int) -> bool:
        return not fits(_texts(documents, _joined(best[:number])))

    most = 1
    while most < len(best) and not is_too_much(most):
        most *= 2
    numbers = range(1, min(most, len(best)) + 1)
    read = max(1, bisect.bisect_left(numbers, True, key=is_too_much))
    parts = _joined(best[:read])
    return Excerpts(
        documents=_texts(documents, parts),
        read=read,
        of=len(found),
        places=[
            Place(document=documents[place].name, lines=lines_of(documents[place].text, span))
            for place, span in parts
        ],
    )


def _joined(chosen: Iterable[Part]) -> list[Part]:
    """Sort the parts in the order of the text, and merge those that overlap."""
    parts: list[Part] = []
    for place, (start, stop) in sorted(chosen):
        last, (begin, end) = parts[-1] if parts else (-1, (0, 0))
        if place == last and start <= end:
            parts[-1] = place, (begin, max(end, stop))
        else:
            parts.append((place, (start, stop)))
    return parts


def _texts(documents: Sequence[Text], parts: Iterable[Part]) -> list[Text]:
    """Return the documents that have parts, reduced to these."""
    found = []
    for place, own in groupby(parts, key=lambda part: part[0]):
        document = documents[place]
        texts = (document.text[start:stop] for _, (start, stop) in own)
        found.append(replace(document, text=OMITTED.join(texts)))
    return found
