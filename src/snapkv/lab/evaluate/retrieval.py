"""Finding passages by their words: BM25 over stemmed words, as bm25s and PyStemmer compute it."""

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

from snapkv.errors import missing_package
from snapkv.lab.evaluate.corpora import CorpusName, Passage, load_corpus

_MODULES = {"bm25s": "bm25s", "Stemmer": "PyStemmer"}


class Index:
    """An index of titles and texts.

    Args:
        passages: what is searched.

    Raises:
        MissingDependencyError: bm25s or PyStemmer is not installed.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        for module, package in _MODULES.items():
            if importlib.util.find_spec(module) is None:
                raise missing_package("rag: retrieval", package)
        import bm25s
        import Stemmer

        self._passages = passages
        self._tokenize = functools.partial(
            bm25s.tokenize, stopwords="en", stemmer=Stemmer.Stemmer("english"), show_progress=False
        )
        self._bm25 = bm25s.BM25()
        texts = [f"{passage.title} {passage.text}" for passage in passages]
        self._bm25.index(self._tokenize(texts), show_progress=False)

    def ranked(self, query: str) -> Iterator[Passage]:
        """Every passage, the likeliest first; of equally likely ones the earlier first."""
        words: Any = self._tokenize([query], return_ids=False)[0]
        scores = self._bm25.get_scores_from_ids(self._bm25.get_tokens_ids(words))
        return (self._passages[place] for place in (-scores).argsort(kind="stable"))


@functools.cache
def corpus_index(name: CorpusName) -> Index:
    """The index of all paragraphs of a data set; the first call takes seconds for HotpotQA.

    Raises:
        MissingDependencyError: the data, bm25s or PyStemmer is not installed.
    """
    return Index(load_corpus(name).passages)
