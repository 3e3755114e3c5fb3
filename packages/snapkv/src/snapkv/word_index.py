"""Finding texts by their words: BM25 over stemmed words, as bm25s and PyStemmer compute it."""

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

from snapkv.errors import missing_package

_MODULES = {"bm25s": "bm25s", "Stemmer": "PyStemmer"}


def require_word_index() -> None:
    """Raise where an index cannot be made, before anything else is waited for."""
    for module, package in _MODULES.items():
        if importlib.util.find_spec(module) is None:
            raise missing_package("rag: retrieval", package)


class WordIndex:
    """An index of texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        require_word_index()
        import bm25s
        import Stemmer

        self._tokenize = functools.partial(
            bm25s.tokenize, stopwords="en", stemmer=Stemmer.Stemmer("english"), show_progress=False
        )
        self._bm25 = bm25s.BM25()
        self._bm25.index(self._tokenize(texts), show_progress=False)

    def ranked(self, query: str) -> Iterator[tuple[int, float]]:
        """Every text's place and score, the likeliest first; of equals the earlier first."""
        words: Any = self._tokenize([query], return_ids=False)[0]
        scores = self._bm25.get_scores_from_ids(self._bm25.get_tokens_ids(words))
        return ((int(place), float(scores[place])) for place in (-scores).argsort(kind="stable"))
