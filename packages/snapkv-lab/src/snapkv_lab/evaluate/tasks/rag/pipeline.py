"""From question to answer: retrieve, rerank, read."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from snapkv.errors import InvalidArgumentError
from snapkv_lab.evaluate.corpora import load_corpus
from snapkv_lab.evaluate.retrieval import corpus_index
from snapkv_lab.evaluate.sample import Sample
from snapkv_lab.evaluate.tasks.rag.asking import PhraseTask, drawn, phrase_questions, phrase_sample


@dataclass(frozen=True, kw_only=True)
class RagPipeline(PhraseTask):
    """Questions over what was retrieved for them, the nearest document first.

    BM25 retrieves out of all 66,635 paragraphs of HotpotQA, all-MiniLM-L6-v2 orders what it found,
    and the first of them are the prompt, whether or not they hold the answer: its share of right
    answers cannot exceed retrieval's. Questions and score are those of rag-position (paper, Sec.
    5.4.2, Table 3).

    Args:
        documents: how many of the retrieved ones the model reads.
        retrieve: how many are retrieved.
    """

    name: ClassVar[str] = "rag-pipeline"
    least_documents: ClassVar[int] = 1

    retrieve: int = 200

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        if self.retrieve < max(self.documents):
            raise InvalidArgumentError(
                f"retrieve: expected at least as many as documents, {max(self.documents)}, got "
                f"{self.retrieve}; retrieve more or read fewer"
            )

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        """Every question with every number of documents; reranking takes seconds for each."""
        del tokenizer
        from snapkv_lab.evaluate.reranking import Reranker

        reranker, index = Reranker(), corpus_index(self.corpus)
        questions = phrase_questions(load_corpus(self.corpus).questions)
        for question in drawn(questions, self.samples_each, self.seed):
            retrieved = list(itertools.islice(index.ranked(question.text), self.retrieve))
            passages = reranker.ranked(question.text, retrieved)
            for documents in self.documents:
                yield phrase_sample(
                    f"{documents}/{question.name}",
                    {"documents": documents},
                    passages[:documents],
                    question.text,
                    question.answers,
                )
