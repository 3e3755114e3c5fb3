"""Questions with their documents, out of a file in the form of Lost in the Middle.

Liu et al. (2023) published a JSON object per line: ``question``, ``answers`` and ``ctxs``, the
documents, each with ``title``, ``text``, ``isgold`` (it answers the question) and ``hasanswer`` (an
answer stands in it).
"""

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapkv.errors import DocumentError
from snapkv_lab.evaluate.corpora import Passage
from snapkv_lab.evaluate.json_lines import Check, is_texts, malformed, parsed, require_fields
from snapkv_lab.evaluate.metrics import normalised

_REMEDY = "correct or delete the line"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A question with its documents.

    Attributes:
        name: unique among the rows.
        question: what is asked.
        answers: right ones, at least one.
        gold: documents that answer it, at least one.
        others: documents in which no answer stands, in the order in which they are taken.
    """

    name: str
    question: str
    answers: tuple[str, ...]
    gold: tuple[Passage, ...]
    others: tuple[Passage, ...]


def read_rows(path: Path) -> list[Row]:
    """The rows of a ``.jsonl`` file, or of a ``.gz`` of one; blank lines are skipped.

    Raises:
        DocumentError: no such file, no rows in it, or a malformed one, by line and field.
    """
    lines = _text(path).split("\n")
    rows = [_row(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise DocumentError(f"data: expected rows in {path}, got none; pass another file")
    return rows


def _text(path: Path) -> str:
    try:
        data = path.expanduser().read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DocumentError(
            f"data: expected a file of JSON lines in UTF-8, or a .gz of one, got {path}: {reason}; "
            "pass another file"
        ) from None


def _row(line: str, path: Path, number: int) -> Row:
    place = f"{path}, line {number}"
    record = parsed(line, place, "correct or delete it")
    require_fields(record, _FIELDS, place, _REMEDY)
    for index, document in enumerate(record["ctxs"]):
        require_fields(document, _DOCUMENT_FIELDS, place, _REMEDY, prefix=f"ctxs[{index}].")
    gold = [document for document in record["ctxs"] if document["isgold"]]
    others = [d for d in record["ctxs"] if not d["isgold"] and not d["hasanswer"]]
    if not gold:
        raise malformed("ctxs", "documents of which one isgold", place, "none that is", _REMEDY)
    return Row(
        name=f"line {number}",
        question=record["question"],
        answers=tuple(record["answers"]),
        gold=tuple(map(_passage, gold)),
        others=tuple(map(_passage, others)),
    )


def _passage(document: dict[str, Any]) -> Passage:
    return Passage(title=document["title"], text=document["text"])


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_answers(value: Any) -> bool:
    return is_texts(value) and bool(value) and all(map(normalised, value))


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


_FIELDS: dict[str, Check] = {
    "question": ("a text", _is_text),
    "answers": ("a list of texts with words in them", _are_answers),
    "ctxs": ("a list of objects", _are_objects),
}
_DOCUMENT_FIELDS: dict[str, Check] = {
    "title": ("a text", lambda value: isinstance(value, str)),
    "text": ("a text", _is_text),
    "isgold": ("true or false", lambda value: isinstance(value, bool)),
    "hasanswer": ("true or false", lambda value: isinstance(value, bool)),
}
