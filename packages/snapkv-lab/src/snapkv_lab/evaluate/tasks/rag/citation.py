"""Naming the documents that an answer comes from."""

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from snapkv.app.settings import GenerationSettings
from snapkv_lab.evaluate.corpora import Question, load_corpus
from snapkv_lab.evaluate.retrieval import Index, corpus_index
from snapkv_lab.evaluate.sample import Sample
from snapkv_lab.evaluate.tasks.rag.asking import STOPS, RagTask, drawn, neighbours, numbered

_INSTRUCTION = (
    "Answer the question at the end from the documents below, and say which documents the answer "
    "comes from: their numbers in square brackets. Only a few of them have to do with it.\n\n"
)
_EXAMPLES = (
    "\n\nQuestion: What is the capital of France?\nDocuments: Paris [4]; France [7]"
    "\n\nQuestion: Who wrote the play Hamlet?\nDocuments: Hamlet [2]; William Shakespeare [6]"
)


@dataclass(frozen=True, kw_only=True)
class RagCitation(RagTask):
    """Which of many documents on one topic answer a question.

    Two documents answer each question of HotpotQA; the others are those that BM25 finds nearest to
    the question, and the order of all is drawn. The score is the F1 of the numbers that the model
    gives, see `cited` (paper, Sec. 5.4.2, Table 3). Of N documents, two guessed ones have an
    expected F1 of 2 / N, and all of them one of 4 / (N + 2): among few documents a model that lists
    numbers without end looks good.

    Args:
        seed: of the draw of questions and of the documents' orders.
    """

    name: ClassVar[str] = "rag-citation"
    metric: ClassVar[str] = "citation F1"
    least_documents: ClassVar[int] = 2

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        """Every question with every number of documents."""
        del tokenizer
        index = corpus_index(self.corpus)
        questions = drawn(load_corpus(self.corpus).questions, self.samples_each, self.seed)
        for documents, question in itertools.product(self.documents, questions):
            yield self._sample(index, question, documents)

    def score(self, sample: Sample, prediction: str) -> float:
        """F1 of the numbers that are cited."""
        right = set(map(int, sample.references))
        said = cited(prediction)
        return 2 * len(right & said) / (len(right) + len(said))

    def _sample(self, index: Index, question: Question, documents: int) -> Sample:
        name = f"{documents}/{question.name}"
        others = itertools.islice(neighbours(index, question), documents - len(question.gold))
        passages = [*question.gold, *others]
        random.Random(f"{self.seed}/{name}").shuffle(passages)
        numbers = [passages.index(passage) + 1 for passage in question.gold]
        return Sample(
            name=name,
            cell={"documents": documents},
            context=_INSTRUCTION + numbered(passages),
            question=(
                f"\n\nQuestion: {question.text}\nAnswer in one sentence, and end it with the "
                "numbers of the documents that it comes from, such as [2][5]."
            ),
            plain_question=f"{_EXAMPLES}\n\nQuestion: {question.text}\nDocuments:",
            references=tuple(map(str, sorted(numbers))),
            settings=GenerationSettings(max_new_tokens=64, stop_strings=STOPS),
        )


def cited(text: str) -> set[int]:
    """The numbers of documents that an answer gives.

    Those in square brackets, with or without the word document before them: [3], [3][7], [3, 7],
    [documents 3 and 7]; a bracket need not be closed. Where no bracket has a number, those right
    behind the word: document 3, documents 3, 5 and 7. Numbers of documents that there are not
    count, as wrong ones.
    """
    lists = re.findall(rf"\[\s*(?:{_WORD})?({_NUMBERS})", text, re.IGNORECASE)
    lists = lists or re.findall(rf"\b{_WORD}({_NUMBERS})", text, re.IGNORECASE)
    return {int(number) for numbers in lists for number in re.findall(r"\d+", numbers)}


_WORD = r"doc(?:ument)?s?\.?:?\s*"
_NUMBERS = r"\d+(?:(?:\s*[,;&]\s*|\s+)(?:and\s+)?\d+)*"
