"""Lost in the middle: the documents with the answer before, between or behind all others."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from snapkv.errors import InvalidArgumentError
from snapkv_lab.evaluate.corpora import Passage, Question, load_corpus
from snapkv_lab.evaluate.retrieval import Index, corpus_index
from snapkv_lab.evaluate.sample import Sample
from snapkv_lab.evaluate.tasks.rag.asking import (
    PhraseTask,
    drawn,
    found,
    neighbours,
    phrase_questions,
    phrase_sample,
)
from snapkv_lab.evaluate.tasks.rag.rows import Row, read_rows

_POSITIONS = ("beginning", "middle", "end")


@dataclass(frozen=True, kw_only=True)
class RagPosition(PhraseTask):
    """Questions whose answer stands before, between or behind documents without it.

    The questions are HotpotQA's whose answer is a phrase, see `phrase_questions`; the other
    documents are those that BM25 finds nearest to the question and that do not hold the answer. An
    answer is right if the phrase is in it (paper, Sec. 5.4.2, Table 4).

    Args:
        samples_each: questions; all are asked with every number of documents and position.
        data: file of questions to ask instead, .jsonl or .jsonl.gz, in the form of Lost in the
            Middle: question, answers, ctxs.
    """

    name: ClassVar[str] = "rag-position"
    axes: ClassVar[tuple[str, ...]] = ("documents", "position")
    least_documents: ClassVar[int] = 3

    documents: tuple[int, ...] = (30, 100, 200)
    data: str | None = None

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        """Every question with every number of documents, at every position."""
        del tokenizer
        rows = self._rows()
        for documents, position, row in itertools.product(self.documents, _POSITIONS, rows):
            yield phrase_sample(
                f"{documents}/{position}/{row.name}",
                {"documents": documents, "position": position},
                _placed(row, documents, position),
                row.question,
                row.answers,
            )

    def describe(self) -> dict[str, Any]:
        """The settings; of a file its name, which takes the corpus' place."""
        own = {"corpus": None, "data": Path(self.data).name} if self.data else {}
        return super().describe() | own

    def _rows(self) -> list[Row]:
        if self.data is not None:
            return drawn(read_rows(Path(self.data)), self.samples_each, self.seed)
        questions = phrase_questions(load_corpus(self.corpus).questions)
        index = corpus_index(self.corpus)
        return [
            _row(index, question, max(self.documents))
            for question in drawn(questions, self.samples_each, self.seed)
        ]


def _row(index: Index, question: Question, others: int) -> Row:
    """A question of the corpus with that many documents that do not answer it."""
    without = (p for p in neighbours(index, question) if not found(p, question.answers))
    return Row(
        name=question.name,
        question=question.text,
        answers=question.answers,
        gold=question.gold,
        others=tuple(itertools.islice(without, others)),
    )


def _placed(row: Row, documents: int, position: str) -> list[Passage]:
    """That many documents, those with the answer together at the position."""
    wanted = documents - len(row.gold)
    if not 0 <= wanted <= len(row.others):
        raise InvalidArgumentError(
            f"documents: expected {len(row.gold)} to {len(row.gold) + len(row.others)}, which is "
            f"what {row.name} has, got {documents}; pass another --documents"
        )
    before = {"beginning": 0, "middle": wanted // 2, "end": wanted}[position]
    others = row.others[:wanted]
    return [*others[:before], *row.gold, *others[before:]]
