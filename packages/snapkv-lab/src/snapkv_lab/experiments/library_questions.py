"""What is asked of documents that were read once: Python's own, and paragraphs of SQuAD.

The thirty questions about Python were written by hand; each answer stands in one docstring of the
standard library, word for word. SQuAD's are drawn; its own answers stand in one paragraph.
"""

import importlib
import inspect
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from snapkv_lab.evaluate.corpora import load_corpus

QUESTIONS = Path(__file__).with_suffix(".jsonl")

SEED = 19

PREFIX = "Answer the question at the end from the documents below.\n\n"

_EXAMPLES = (
    "Question: What is the capital of France?\nAnswer: Paris\n\n"
    "Question: Who wrote the play Hamlet?\nAnswer: William Shakespeare\n\n"
)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question over several documents.

    Attributes:
        group: "python" or "squad".
        documents: as they stand in the prompt, one behind the other.
        question: what stands behind them, up to where the answer begins.
        answer: how it has to go on.
    """

    group: str
    documents: tuple[str, ...]
    question: str
    answer: str


def python_documents() -> dict[str, str]:
    """The ten documents by their modules' names."""
    names = dict.fromkeys(row["document"] for row in _rows())
    texts = {name: inspect.getdoc(importlib.import_module(name)) for name in names}
    return {name: _document(f"the module {name}", text or "") for name, text in texts.items()}


def python_questions(documents_each: int = 4) -> list[Asked]:
    """The thirty questions, each over the document that answers it and others, in drawn order."""
    texts, drawn = python_documents(), random.Random(SEED)
    asked = []
    for row in _rows():
        others = drawn.sample(
            [name for name in texts if name != row["document"]], documents_each - 1
        )
        names = drawn.sample([row["document"], *others], documents_each)
        asked.append(_asked("python", [texts[name] for name in names], row))
    return asked


def squad_questions(count: int, documents_each: int = 4) -> list[Asked]:
    """Questions of SQuAD over the paragraph that answers each and others of its article."""
    drawn = random.Random(SEED)
    fitting = [each for each in load_corpus("squad").questions if len(each.near) >= documents_each]
    asked = []
    for question in drawn.sample(fitting, count):
        passages = [question.gold[0], *question.near[: documents_each - 1]]
        texts = [_document(each.title, each.text) for each in drawn.sample(passages, len(passages))]
        row = {"question": question.text, "lead": "", "answer": question.answers[0]}
        asked.append(_asked("squad", texts, row))
    return asked


def _asked(group: str, documents: Sequence[str], row: dict[str, str]) -> Asked:
    lead = f" {row['lead']}" if row["lead"] else ""
    return Asked(
        group=group,
        documents=tuple(documents),
        question=f"{_EXAMPLES}Question: {row['question']}\nAnswer:{lead}",
        answer=f" {row['answer']}",
    )


def _document(title: str, text: str) -> str:
    return f"Document: {title}\n{text.strip()}\n\n"


def _rows() -> list[dict[str, str]]:
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    rows: list[dict[str, str]] = [json.loads(line) for line in lines]
    return rows
