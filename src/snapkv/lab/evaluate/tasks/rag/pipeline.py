"""From question to answer: retrieve, rerank, read."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from snapkv.errors import InvalidArgumentError
from snapkv.lab.evaluate.corpora import CorpusName, load_corpus
from snapkv.lab.evaluate.retrieval import corpus_index
from snapkv.lab.evaluate.sample import Sample
from snapkv.lab.evaluate.task import Task
from snapkv.lab.evaluate.tasks.rag.asking import drawn, found, phrase_questions, phrase_sample
from snapkv.validation import require_at_least, require_each_at_least


@dataclass(frozen=True, kw_only=True)
class RagPipeline(Task):
    """Questions over what was retrieved for them, the nearest document first.

    BM25 retrieves out of all 66,635 paragraphs of HotpotQA, all-MiniLM-L6-v2 orders what it found,
    and the first of them are the prompt, whether or not they hold the answer: its share of right
    answers cannot exceed retrieval's. Questions and score are those of rag-position (paper, Sec.
    5.4.2, Table 3).

    Args:
        documents: how many of the retrieved ones the model reads.
        retrieve: how many are retrieved.
        samples_each: questions; all are asked with every number of documents.
        corpus: hotpotqa, or squad, whose questions one paragraph answers, for small models.
        seed: of the draw of questions.
    """

    name: ClassVar[str] = "rag-pipeline"
    metric: ClassVar[str] = "accuracy"
    axes: ClassVar[tuple[str, ...]] = ("documents",)

    documents: tuple[int, ...] = (100,)
    retrieve: int = 200
    samples_each: int = 100
    corpus: CorpusName = "hotpotqa"
    seed: int = 42

    def __post_init__(self) -> None:
        """Check the settings."""
        require_each_at_least("documents", self.documents, 1)
        require_at_least("samples_each", self.samples_each, 1)
        if self.retrieve < max(self.documents):
            raise InvalidArgumentError(
                f"retrieve: expected at least as many as documents, {max(self.documents)}, got "
                f"{self.retrieve}; retrieve more or read fewer"
            )

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        """Every question with every number of documents; reranking takes seconds for each."""
        del tokenizer
        from snapkv.lab.evaluate.reranking import Reranker

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

    def score(self, sample: Sample, prediction: str) -> float:
        """Whether the answer stands in the prediction."""
        return float(found(prediction, sample.references))
