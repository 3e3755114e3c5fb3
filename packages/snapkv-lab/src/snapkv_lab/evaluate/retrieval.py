"""Finding passages of a data set by their words."""

import functools
from collections.abc import Iterator, Sequence

from snapkv.word_index import WordIndex
from snapkv_lab.evaluate.corpora import CorpusName, Passage, load_corpus


class Index:
    """An index of titles and texts.

    Args:
        passages: what is searched.

    Raises:
        MissingDependencyError: bm25s or PyStemmer is not installed.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = passages
        self._words = WordIndex([f"{passage.title} {passage.text}" for passage in passages])

    def ranked(self, query: str) -> Iterator[Passage]:
        """Every passage, the likeliest first; of equally likely ones the earlier first."""
        return (self._passages[place] for place, _ in self._words.ranked(query))


@functools.cache
def corpus_index(name: CorpusName) -> Index:
    """The index of all paragraphs of a data set; the first call takes seconds for HotpotQA.

    Raises:
        MissingDependencyError: the data, bm25s or PyStemmer is not installed.
    """
    return Index(load_corpus(name).passages)
