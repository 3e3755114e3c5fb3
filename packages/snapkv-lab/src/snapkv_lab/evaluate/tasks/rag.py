"""Answers from retrieved documents: the paper's three experiments (Sec. 5.4.2).

The paper ran them with Command-R, two of the three on other data (Cohere's own, and BioASQ). Here
all three use HotpotQA, where two paragraphs answer each question.
"""

import gzip
import itertools
import random
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from snapkv.errors import DocumentError, wrong
from snapkv_app.settings import GenerationSettings
from snapkv_lab.evaluate.corpora import (
    Check,
    CorpusName,
    Passage,
    PassageIndex,
    Question,
    corpus_index,
    is_text_list,
    load_corpus,
    parse_json_lines,
    require_fields,
)
from snapkv_lab.evaluate.metrics import normalize_answer
from snapkv_lab.evaluate.sample import Cell, Sample
from snapkv_lab.evaluate.task import Task
from snapkv_lab.rows import Row

_INSTRUCTION = "Answer the question at the end from the documents below{}. Only a few of them have "
_INSTRUCTION += "to do with it.\n\n"
_CITING = ", and say which documents the answer comes from: their numbers in square brackets"

# These examples show a model without a chat template that answers are short.
_PHRASES = (
    "\n\nQuestion: What is the capital of France?\nAnswer: Paris"
    "\n\nQuestion: Who wrote the play Hamlet?\nAnswer: William Shakespeare"
)
_CITATIONS = (
    "\n\nQuestion: What is the capital of France?\nDocuments: Paris [4]; France [7]"
    "\n\nQuestion: Who wrote the play Hamlet?\nDocuments: Hamlet [2]; William Shakespeare [6]"
)
_STOPS = ("\nQuestion:", "\nDocument:")  # a model that continues after its answer is stopped here
_POSITIONS = ("beginning", "middle", "end")


@dataclass(frozen=True, kw_only=True)
class RagTask(Task):
    """A task with questions about many documents.

    Args:
        documents: how many there are, those that answer the question included.
        samples_each: questions; all are asked with every number of documents.
        corpus: hotpotqa, or squad, whose questions one paragraph answers, for small models.
        seed: random seed for the choice of questions.
    """

    axes: ClassVar[tuple[str, ...]] = ("documents",)
    least_documents: ClassVar[int]

    documents: tuple[int, ...] = (100,)
    samples_each: int = 100
    corpus: CorpusName = "hotpotqa"
    seed: int = 42

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            InvalidArgumentError: a number is too small or too large, or `documents` is empty. The
                smallest number of documents is `least_documents`.
            InvalidTypeError: a number is not an integer.
        """
        self.require(documents=self.least_documents, samples_each=1)


@dataclass(frozen=True, kw_only=True)
class RagCitation(RagTask):
    """Which of many documents on one topic answer a question.

    Two documents answer each question of HotpotQA. The others are those that BM25 ranks nearest to
    the question, and the order of all is drawn. The score is the F1 of the numbers that the model
    gives, see `cited_numbers` (paper, Sec. 5.4.2, Table 3). Among N documents, two guessed numbers
    have an expected F1 of 2 / N, and all numbers have 4 / (N + 2). So a model that lists numbers
    without end looks good if there are few documents.

    Args:
        seed: random seed for the choice of questions and the order of documents.
    """

    name: ClassVar[str] = "rag-citation"
    metric: ClassVar[str] = "citation F1"
    least_documents: ClassVar[int] = 2

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        del tokenizer
        index = corpus_index(self.corpus)
        questions = draw_questions(load_corpus(self.corpus).questions, self.samples_each, self.seed)
        for documents, question in itertools.product(self.documents, questions):
            yield self._sample(index, question, documents)

    def score(self, sample: Sample, prediction: str) -> float:
        """Return the F1 score of the document numbers that the answer cites, from 0 to 1."""
        right, predicted = set(map(int, sample.references)), cited_numbers(prediction)
        return 2 * len(right & predicted) / (len(right) + len(predicted))

    def _sample(self, index: PassageIndex, question: Question, documents: int) -> Sample:
        """Return the sample of a question among `documents` documents in random order.

        The references are the numbers of the documents that answer the question, in ascending
        order. The order depends only on the seed, the number of documents and the question.

        Raises:
            InvalidArgumentError: the data set has fewer than `documents` documents.
        """
        name = f"{documents}/{question.name}"
        others = itertools.islice(nearest_passages(index, question), documents - len(question.gold))
        passages = [*question.gold, *others]
        _require_documents(documents, len(passages))
        random.Random(f"{self.seed}/{name}").shuffle(passages)
        numbers = [passages.index(passage) + 1 for passage in question.gold]
        return Sample(
            name=name,
            cell={"documents": documents},
            context=_INSTRUCTION.format(_CITING) + _number_passages(passages),
            question=(
                f"\n\nQuestion: {question.text}\nAnswer in one sentence, and end it with the "
                "numbers of the documents that it comes from, such as [2][5]."
            ),
            plain_question=f"{_CITATIONS}\n\nQuestion: {question.text}\nDocuments:",
            references=tuple(map(str, sorted(numbers))),
            settings=GenerationSettings(max_new_tokens=64, stop_strings=_STOPS),
        )


def cited_numbers(text: str) -> set[int]:
    """Return the numbers of the documents that are cited in the text.

    These are numbers in square brackets, with or without the word document before them: [3],
    [3][7], [3, 7], [documents 3 and 7]. A bracket need not be closed. If no bracket has a number,
    they are the numbers directly after the word: document 3, documents 3, 5 and 7. Numbers of
    documents that do not exist count as wrong.
    """
    word = r"doc(?:ument)?s?\.?:?\s*"
    some = r"(\d+(?:(?:\s*[,;&]\s*|\s+)(?:and\s+)?\d+)*)"
    lists = re.findall(rf"\[\s*(?:{word})?{some}", text, re.IGNORECASE)
    lists = lists or re.findall(rf"\b{word}{some}", text, re.IGNORECASE)
    return {int(number) for numbers in lists for number in re.findall(r"\d+", numbers)}


@dataclass(frozen=True, kw_only=True)
class PhraseTask(RagTask):
    """A task with questions that can be answered by a phrase from the documents."""

    metric: ClassVar[str] = "accuracy"

    def score(self, sample: Sample, prediction: str) -> float:
        """Return 1 if the prediction contains one of the right answers, and 0 if it does not."""
        return float(contains_phrase(prediction, sample.references))


@dataclass(frozen=True, kw_only=True)
class RagPosition(PhraseTask):
    """Questions whose answer stands before, between or after documents without it.

    The test is Lost in the middle (Liu et al., 2023). The questions are those of HotpotQA whose
    answer is a phrase, see `phrase_questions`. The other documents are those that BM25 ranks
    nearest to the question and that do not contain the answer. An answer is right if it contains
    the phrase (paper, Sec. 5.4.2, Table 4).

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
        del tokenizer
        rows = self._rows()
        for documents, position, row in itertools.product(self.documents, _POSITIONS, rows):
            yield phrase_sample(
                f"{documents}/{position}/{row.name}",
                {"documents": documents, "position": position},
                _place_gold(row, documents, position),
                row.text,
                row.answers,
            )

    def describe(self) -> dict[str, Any]:
        own = {"corpus": None, "data": Path(self.data).name} if self.data else {}
        return super().describe() | own

    def _rows(self) -> list[Question]:
        """Draw `samples_each` questions, from the file `data` or else from the corpus.

        For a question from the corpus, `near` is replaced by the passages that BM25 ranks nearest
        to it and that do not contain the answer, the nearest first.

        Raises:
            InvalidArgumentError: there are fewer than `samples_each` questions.
            DocumentError: the file `data` cannot be read, or a line has another form.
        """
        if self.data is not None:
            return draw_questions(read_rows(Path(self.data)), self.samples_each, self.seed)
        questions = phrase_questions(load_corpus(self.corpus).questions)
        questions_with_others, index = [], corpus_index(self.corpus)
        for question in draw_questions(questions, self.samples_each, self.seed):
            without = (
                p
                for p in nearest_passages(index, question)
                if not contains_phrase(p, question.answers)
            )
            near = tuple(itertools.islice(without, max(self.documents)))
            questions_with_others.append(replace(question, near=near))
        return questions_with_others


@dataclass(frozen=True, kw_only=True)
class RagPipeline(PhraseTask):
    """Questions over what was retrieved for them, the nearest document first.

    BM25 retrieves from all 66,635 paragraphs of HotpotQA, all-MiniLM-L6-v2 orders the results, and
    the first of them form the prompt, whether or not they contain the answer. So the share of right
    answers cannot exceed the retrieval's. Questions and score are those of rag-position (paper,
    Sec. 5.4.2, Table 3).

    Args:
        documents: how many of the retrieved ones the model reads.
        retrieve: how many are retrieved.
    """

    name: ClassVar[str] = "rag-pipeline"
    least_documents: ClassVar[int] = 1

    retrieve: int = 200

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            InvalidArgumentError: a number is out of range, or more documents are read than are
                retrieved.
            InvalidTypeError: a number is not an integer.
        """
        super().__post_init__()
        if self.retrieve < max(self.documents):
            problem = (
                f"expected at least the {max(self.documents)} documents, but got {self.retrieve}"
            )
            raise wrong("retrieve", problem, "Retrieve more documents, or read fewer documents")

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        del tokenizer
        from snapkv_lab.evaluate.embeddings import TextEmbeddings  # imports torch

        embeddings, index = TextEmbeddings(), corpus_index(self.corpus)
        questions = phrase_questions(load_corpus(self.corpus).questions)
        for question in draw_questions(questions, self.samples_each, self.seed):
            retrieved = list(itertools.islice(index.rank(question.text), self.retrieve))
            texts = [f"{passage.title}. {passage.text}" for passage in retrieved]
            passages = [retrieved[place] for place in embeddings.nearest(question.text, texts)]
            for documents in self.documents:
                _require_documents(documents, len(passages))
                yield phrase_sample(
                    f"{documents}/{question.name}",
                    {"documents": documents},
                    passages[:documents],
                    question.text,
                    question.answers,
                )


def _require_documents(documents: int, found: int) -> None:
    """Check that there are enough documents for the prompt.

    Raises:
        InvalidArgumentError: fewer than `documents` were found.
    """
    if found < documents:
        problem = f"expected at most {found}, as many as there are, but got {documents}"
        raise wrong("documents", problem, f"For example, use --documents {found}")


def draw_questions(rows: Sequence[Question], count: int, seed: int) -> list[Question]:
    """Return `count` different questions in random order, which the seed decides. With a larger
    count the list begins with the same questions.

    Raises:
        InvalidArgumentError: there are fewer than `count` rows.
    """
    if count > len(rows):
        problem = f"expected at most {len(rows)}, the number of questions, but got {count}"
        raise wrong("samples_each", problem, f"For example, use --samples-each {len(rows)}")
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    return shuffled[:count]


def nearest_passages(index: PassageIndex, question: Question) -> Iterator[Passage]:
    """Yield the passages that do not answer the question, the most relevant by BM25 first.

    Two paragraphs with the same title are different edits of one text, so passages with the title
    of an answering one are left out too.
    """
    titles = {passage.title for passage in question.gold}
    return (passage for passage in index.rank(question.text) if passage.title not in titles)


def phrase_questions(questions: Iterable[Question]) -> list[Question]:
    """Return the questions whose answer is a phrase of the paragraphs that answer them.

    Questions of yes and no are left out, because these words are found in many texts that do not
    answer. So are the few questions whose paragraphs give the answer in other words.
    """
    return [
        question
        for question in questions
        if not set(map(str.lower, question.answers)) & {"yes", "no"}
        and any(contains_phrase(passage, question.answers) for passage in question.gold)
    ]


def phrase_sample(
    name: str, cell: Cell, passages: Iterable[Passage], question: str, answers: tuple[str, ...]
) -> Sample:
    """Return a sample for a question that can be answered by a phrase from the passages.

    Args:
        name: the name of the sample.
        cell: the group to which it belongs.
        passages: the documents in the prompt, in this order.
        question: the question.
        answers: the right answers, each of which is accepted.
    """
    return Sample(
        name=name,
        cell=cell,
        context=_INSTRUCTION.format("") + _number_passages(passages),
        question=f"\n\nQuestion: {question}\nAnswer in a few words.",
        plain_question=f"{_PHRASES}\n\nQuestion: {question}\nAnswer:",
        references=answers,
        settings=GenerationSettings(max_new_tokens=48, stop_strings=_STOPS),
    )


def _number_passages(passages: Iterable[Passage]) -> str:
    """Return the text of the documents with their numbers from 1, and blank lines between them.

    The number follows the title, because a small model that names a document recites its title and
    then what follows.
    """
    return "\n\n".join(
        f"Document: {passage.title} [{number}]\n{passage.text.strip()}"
        for number, passage in enumerate(passages, 1)
    )


def contains_phrase(text: str | Passage, phrases: Iterable[str]) -> bool:
    """Return whether a text contains any of the phrases as whole words.

    Both are normalized as SQuAD does: lower case, without punctuation and articles.
    """
    if isinstance(text, Passage):
        text = f"{text.title} {text.text}"
    words = f" {normalize_answer(text)} "
    return any(f" {phrase} " in words for phrase in filter(None, map(normalize_answer, phrases)))


def _place_gold(row: Question, documents: int, position: str) -> list[Passage]:
    """Return a list of documents with those that answer the question at the given position.

    Args:
        row: the question; the first of its `near` passages are the other documents.
        documents: the length of the list.
        position: "beginning", "middle" or "end".

    Raises:
        InvalidArgumentError: `documents` is smaller than the number of answering documents, or the
            question has too few others.
    """
    other_count = documents - len(row.gold)
    if not 0 <= other_count <= len(row.near):
        most = len(row.gold) + len(row.near)
        problem = f"expected {len(row.gold)} to {most}, which {row.name} has, but got {documents}"
        raise wrong("documents", problem, "Use a different value for --documents")
    before = {"beginning": 0, "middle": other_count // 2, "end": other_count}[position]
    others = row.near[:other_count]
    return [*others[:before], *row.gold, *others[before:]]


_REMEDY = "Correct or delete the line"


def read_rows(path: Path) -> list[Question]:
    """Read the questions from a file in the format of Lost in the Middle.

    Blank lines are skipped. Liu et al. (2023) published one JSON object per line: ``question``,
    ``answers`` and ``ctxs``, which are documents with ``title``, ``text``, ``isgold`` (it answers
    the question) and ``hasanswer`` (it contains an answer).

    Raises:
        DocumentError: the file cannot be read, has only blank lines, or a line has another form.
    """
    try:
        data = path.expanduser().read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        problem = (
            f"expected a file of JSON lines in UTF-8, or a .gz of one, but got {path}: {reason}"
        )
        raise wrong("data", problem, "Use a different file", DocumentError) from None
    records = parse_json_lines(text.split("\n"), _FIELDS, path, _REMEDY)
    return [_parse_question(record, path, f"line {number}") for number, record in records.items()]


def _parse_question(record: Row, path: Path, name: str) -> Question:
    """Convert a record from the file to a question. Documents that contain an answer without
    answering the question are left out.

    Args:
        record: the record, whose fields except those of the documents in "ctxs" were checked.
        path: the file, for error messages.
        name: the line, such as "line 3", which becomes the name of the question.

    Raises:
        DocumentError: a document has another form, or none answers the question.
    """
    place = f"{path}, {name}"
    for index, document in enumerate(record["ctxs"]):
        require_fields(document, _DOCUMENT_FIELDS, place, _REMEDY, prefix=f"ctxs[{index}].")
    passages = [
        (document, Passage(title=document["title"], text=document["text"]))
        for document in record["ctxs"]
    ]
    gold = tuple(passage for document, passage in passages if document["isgold"])
    if not gold:
        problem = f"expected a document with isgold in the ctxs of {place}, but got none"
        raise wrong("data", problem, _REMEDY, DocumentError)
    return Question(
        name=name,
        text=record["question"],
        raw_text=record["question"],
        answers=tuple(record["answers"]),
        gold=gold,
        near=tuple(p for d, p in passages if not d["isgold"] and not d["hasanswer"]),
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_answers(value: Any) -> bool:
    return is_text_list(value) and bool(value) and all(map(normalize_answer, value))


_BOOL: Check = ("true or false", lambda value: isinstance(value, bool))
_FIELDS: dict[str, Check] = {
    "question": ("a text", _is_text),
    "answers": ("a list of texts with words in them", _are_answers),
    "ctxs": (
        "a list of objects",
        lambda value: isinstance(value, list) and all(isinstance(each, dict) for each in value),
    ),
}
_DOCUMENT_FIELDS: dict[str, Check] = {
    "title": ("a text", lambda value: isinstance(value, str)),
    "text": ("a text", _is_text),
    "isgold": _BOOL,
    "hasanswer": _BOOL,
}
