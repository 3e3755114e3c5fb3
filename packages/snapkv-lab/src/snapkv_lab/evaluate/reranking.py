"""Ordering passages of a data set by their meaning."""

from collections.abc import Sequence

from snapkv.library.embeddings import TextEmbeddings
from snapkv_lab.evaluate.corpora import Passage


class Reranker(TextEmbeddings):
    """The embedding model, for passages."""

    def ranked(self, query: str, passages: Sequence[Passage]) -> list[Passage]:
        """The passages, the nearest to the query first; equally near ones stay in order."""
        texts = [f"{passage.title}. {passage.text}" for passage in passages]
        return [passages[place] for place, _ in self.nearest(query, texts)]
