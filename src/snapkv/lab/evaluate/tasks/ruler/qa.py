"""RULER's qa_1 and qa_2: real questions, their own documents among those of others."""

import functools
import json
import random
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from snapkv.errors import InvalidArgumentError
from snapkv.lab.evaluate.packages import package_file
from snapkv.lab.evaluate.tasks.ruler.puzzle import Generator, Puzzle, Wanted

_TASK = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\n"
)


@dataclass(frozen=True, kw_only=True)
class _Question:
    """A question of a data set.

    Attributes:
        text: as it is asked.
        answers: right ones, each once.
        own: places of the documents with the answer.
        near: places of others that were collected for this question.
    """

    text: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    near: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Collection:
    """Documents, and questions that name them by their place."""

    documents: tuple[str, ...]
    questions: tuple[_Question, ...]


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

    dataset: Literal["squad", "hotpotqa"]

    @property
    def least(self) -> int:
        """The question's own documents can stand alone."""
        return 0

    @property
    def most(self) -> int:
        """All documents."""
        return len(_collection(self.dataset).documents)

    def puzzle(self, wanted: Wanted, parts: int) -> Puzzle:
        """A question behind its documents and that many others.

        Raises:
            InvalidArgumentError: there are not so many questions.
        """
        draw, collection = wanted.draw(), _collection(self.dataset)
        if wanted.index >= len(collection.questions):
            raise InvalidArgumentError(
                f"samples_each: expected at most the {len(collection.questions)} questions of "
                f"{self.dataset} that fit, got more; pass a smaller number"
            )
        question = collection.questions[wanted.index]
        places = [*question.own, *_others(question, len(collection.documents), parts, draw)]
        draw.shuffle(places)
        text = "\n\n".join(
            f"Document {number}:\n{collection.documents[place]}"
            for number, place in enumerate(places, 1)
        )
        return Puzzle(
            context=f"{_TASK}The following are given documents.\n\n{text}",
            question=f"\n\n{_TASK}Question: {question.text}",
            answer_start="Answer:",
            references=question.answers,
        )


def _others(question: _Question, documents: int, count: int, draw: random.Random) -> list[int]:
    """Places of documents beside the question's own: near ones, then any."""
    near = draw.sample(question.near, min(count, len(question.near)))
    taken = {*question.own, *question.near}
    wanted = count - len(near)
    drawn = draw.sample(range(documents), min(wanted + len(taken), documents))
    return near + [place for place in drawn if place not in taken][:wanted]


@functools.cache
def _collection(dataset: str) -> _Collection:
    path = package_file("long_context_eval", "data", "synthetic", "json", f"{dataset}.json")
    data = json.loads(path.read_text("utf-8"))
    return _squad(data) if dataset == "squad" else _hotpotqa(data)


def _squad(data: Any) -> _Collection:
    articles = [article["paragraphs"] for article in data["data"]]
    places = _places(paragraph["context"] for article in articles for paragraph in article)
    questions = []
    for article in articles:
        whole = [places[paragraph["context"]] for paragraph in article]
        for own, paragraph in zip(whole, article, strict=True):
            questions += [
                _Question(
                    text=asked["question"],
                    answers=_once(answer["text"] for answer in asked["answers"]),
                    own=(own,),
                    near=tuple(place for place in whole if place != own),
                )
                for asked in paragraph["qas"]
                if not asked["is_impossible"]
            ]
    return _Collection(documents=tuple(places), questions=tuple(questions))


def _hotpotqa(data: Any) -> _Collection:
    places = _places(_titled(*entry) for asked in data for entry in asked["context"])
    questions = []
    for asked in data:
        facts = {title for title, _ in asked["supporting_facts"]}
        own = {places[_titled(*entry)] for entry in asked["context"] if entry[0] in facts}
        given = {places[_titled(*entry)] for entry in asked["context"]}
        questions.append(
            _Question(
                text=asked["question"],
                answers=(asked["answer"],),
                own=tuple(sorted(own)),
                near=tuple(sorted(given - own)),
            )
        )
    return _Collection(documents=tuple(places), questions=tuple(questions))


def _titled(title: str, sentences: list[str]) -> str:
    return f"{title}\n{''.join(sentences)}"


def _places(documents: Any) -> dict[str, int]:
    """Every document once, with its place in the alphabet's order."""
    return {document: place for place, document in enumerate(sorted(set(documents)))}


def _once(texts: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
