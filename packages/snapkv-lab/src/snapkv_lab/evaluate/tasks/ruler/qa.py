"""RULER's qa_1 and qa_2: real questions, their own documents among those of others."""

import functools
import random
from dataclasses import dataclass
from typing import ClassVar

from snapkv.errors import InvalidArgumentError
from snapkv_lab.evaluate.corpora import CorpusName, Passage, load_corpus
from snapkv_lab.evaluate.tasks.ruler.puzzle import Generator, Puzzle, Wanted

_TASK = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\n"
)


@dataclass(frozen=True, kw_only=True)
class Answering(Generator):
    """Questions in the order of their file.

    A part of the text is a document beside those with the answer: first those collected for the
    question, then any.

    Args:
        dataset: SQuAD 2.0 (its answerable questions) or HotpotQA (the distractor setting).
    """

    new_tokens: ClassVar[int] = 32
    any_reference: ClassVar[bool] = True

    dataset: CorpusName

    @property
    def least(self) -> int:
        """The question's own documents can stand alone."""
        return 0

    @property
    def most(self) -> int:
        """All documents."""
        return len(_places(self.dataset))

    def puzzle(self, wanted: Wanted, parts: int) -> Puzzle:
        """A question behind its documents and that many others.

        Raises:
            InvalidArgumentError: there are not so many questions.
        """
        draw, questions = wanted.draw(), load_corpus(self.dataset).questions
        if wanted.index >= len(questions):
            raise InvalidArgumentError(
                f"samples_each: expected at most the {len(questions)} questions of "
                f"{self.dataset} that fit, got more; pass a smaller number"
            )
        question, places = questions[wanted.index], _places(self.dataset)
        own, near = ([places[one] for one in some] for some in (question.gold, question.near))
        if self.dataset == "hotpotqa":  # as the official suite draws from them
            own, near = sorted(own), sorted(near)
        shown = own + _others(own, near, len(places), parts, draw)
        draw.shuffle(shown)
        text = "\n\n".join(
            f"Document {number}:\n{_text(self.dataset, _documents(self.dataset)[place])}"
            for number, place in enumerate(shown, 1)
        )
        return Puzzle(
            context=f"{_TASK}The following are given documents.\n\n{text}",
            question=f"\n\n{_TASK}Question: {question.asked}",
            answer_start="Answer:",
            references=question.answers,
        )


def _others(
    own: list[int], near: list[int], documents: int, count: int, draw: random.Random
) -> list[int]:
    """Places of documents beside the question's own: near ones, then any."""
    first = draw.sample(near, min(count, len(near)))
    taken = {*own, *near}
    wanted = count - len(first)
    drawn = draw.sample(range(documents), min(wanted + len(taken), documents))
    return first + [place for place in drawn if place not in taken][:wanted]


@functools.cache
def _documents(dataset: CorpusName) -> list[Passage]:
    """Every document, in the alphabet's order."""
    return sorted(load_corpus(dataset).passages, key=functools.partial(_text, dataset))


@functools.cache
def _places(dataset: CorpusName) -> dict[Passage, int]:
    return {document: place for place, document in enumerate(_documents(dataset))}


def _text(dataset: CorpusName, document: Passage) -> str:
    return document.text if dataset == "squad" else f"{document.title}\n{document.text}"
