"""What the three experiments share: the draw of questions, numbered documents, found phrases."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from snapkv.app.settings import GenerationSettings
from snapkv.errors import InvalidArgumentError
from snapkv.validation import require_at_least, require_each_at_least
from snapkv_lab.evaluate.corpora import CorpusName, Passage, Question
from snapkv_lab.evaluate.metrics import normalised
from snapkv_lab.evaluate.retrieval import Index
from snapkv_lab.evaluate.sample import Cell, Sample
from snapkv_lab.evaluate.task import Task

_Row = TypeVar("_Row")

_INSTRUCTION = (
    "Answer the question at the end from the documents below. Only a few of them have to do with "
    "it.\n\n"
)
_EXAMPLES = (
    "\n\nQuestion: What is the capital of France?\nAnswer: Paris"
    "\n\nQuestion: Who wrote the play Hamlet?\nAnswer: William Shakespeare"
)
"""Show a model that is not given a chat template that answers are short."""

STOPS = ("\nQuestion:", "\nDocument:")
"""Where a model that goes on behind its answer is stopped."""


@dataclass(frozen=True, kw_only=True)
class RagTask(Task):
    """Questions over many documents.

    Args:
        documents: how many there are, those that answer the question included.
        samples_each: questions; all are asked with every number of documents.
        corpus: hotpotqa, or squad, whose questions one paragraph answers, for small models.
        seed: of the draw of questions.
    """

    axes: ClassVar[tuple[str, ...]] = ("documents",)
    least_documents: ClassVar[int]

    documents: tuple[int, ...] = (100,)
    samples_each: int = 100
    corpus: CorpusName = "hotpotqa"
    seed: int = 42

    def __post_init__(self) -> None:
        """Check the settings."""
        require_each_at_least("documents", self.documents, self.least_documents)
        require_at_least("samples_each", self.samples_each, 1)


@dataclass(frozen=True, kw_only=True)
class PhraseTask(RagTask):
    """Questions that a phrase of the documents answers."""

    metric: ClassVar[str] = "accuracy"

    def score(self, sample: Sample, prediction: str) -> float:
        """Whether a right answer stands in the prediction."""
        return float(found(prediction, sample.references))


def drawn(rows: Sequence[_Row], count: int, seed: int) -> list[_Row]:
    """That many rows in an order drawn from the seed; a larger count begins with the same ones.

    Raises:
        InvalidArgumentError: there are fewer.
    """
    if count > len(rows):
        raise InvalidArgumentError(
            f"samples_each: expected at most {len(rows)}, the number of questions, got "
            f"{count}; pass --samples-each {len(rows)}"
        )
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    return shuffled[:count]


def neighbours(index: Index, question: Question) -> Iterator[Passage]:
    """The passages that have most of the question's words, without those that answer it.

    Two paragraphs of one article's title are different edits of one text, so none with a title of
    those that answer it is among them.
    """
    titles = {passage.title for passage in question.gold}
    return (passage for passage in index.ranked(question.text) if passage.title not in titles)


def numbered(passages: Iterable[Passage]) -> str:
    """The documents with their numbers, from 1, a blank line between them.

    The number stands behind the title: a small model that names a document recites its title and
    then what follows it.
    """
    return "\n\n".join(
        f"Document: {passage.title} [{number}]\n{passage.text.strip()}"
        for number, passage in enumerate(passages, 1)
    )


def phrase_sample(
    name: str,
    cell: Cell,
    passages: Iterable[Passage],
    question: str,
    answers: tuple[str, ...],
) -> Sample:
    """A question that is answered by a phrase of the documents."""
    return Sample(
        name=name,
        cell=cell,
        context=_INSTRUCTION + numbered(passages),
        question=f"\n\nQuestion: {question}\nAnswer in a few words.",
        plain_question=f"{_EXAMPLES}\n\nQuestion: {question}\nAnswer:",
        references=answers,
        settings=GenerationSettings(max_new_tokens=48, stop_strings=STOPS),
    )


def phrase_questions(questions: Iterable[Question]) -> list[Question]:
    """Those whose answer is a phrase of the paragraphs that answer them.

    Left out are those of yes and no, which are found in many a text that does not answer, and the
    few whose answer the paragraphs give in other words.
    """
    return [
        question
        for question in questions
        if not set(map(str.lower, question.answers)) & {"yes", "no"}
        and any(found(passage, question.answers) for passage in question.gold)
    ]


def found(text: str | Passage, phrases: Iterable[str]) -> bool:
    """Whether any of the phrases stands in the text, as whole words.

    Both are compared in lower case without punctuation and articles, as SQuAD compares answers.
    """
    if isinstance(text, Passage):
        text = f"{text.title} {text.text}"
    words = f" {normalised(text)} "
    wanted = filter(None, map(normalised, phrases))
    return any(f" {phrase} " in words for phrase in wanted)
