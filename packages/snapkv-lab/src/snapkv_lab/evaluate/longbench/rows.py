"""LongBench's rows: out of its archive, a folder, or the archive on the hub."""

import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from snapkv.errors import DocumentError
from snapkv_lab.evaluate.json_lines import Check, is_texts, parsed, require_fields
from snapkv_lab.evaluate.longbench.sets import DataSet
from snapkv_lab.evaluate.metrics import PARAGRAPH

HUB = "zai-org/LongBench"
"""The hub's data set that holds `data.zip`; THUDM/LongBench before it was renamed."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One question of LongBench.

    Attributes:
        context: the long text.
        input: the question, or what stands for one; empty for a few sets.
        answers: right ones, at least one.
        length: of the text in words, as published.
        all_classes: that a classification chooses from; empty elsewhere.
    """

    context: str
    input: str
    answers: tuple[str, ...]
    length: int
    all_classes: tuple[str, ...]


def read_rows(data: Path, data_set: DataSet, *, extended: bool) -> list[Row]:
    """The rows of a set in the file's order.

    Args:
        data: the archive, or a folder with the ``.jsonl`` files or a folder ``data`` of them.
        data_set: which set.
        extended: those of LongBench-E.

    Raises:
        DocumentError: no such file, no rows in it, or one that is malformed, by line and field.
    """
    name = f"{data_set.name}_e.jsonl" if extended else f"{data_set.name}.jsonl"
    lines = _zipped_lines(data, name) if data.is_file() else _lines(data, name)
    rows = [
        _row(line, data_set, f"{data / name}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not rows:
        raise DocumentError(f"data: expected rows in {data / name}, got none; {_REMEDY}")
    return rows


def hub_archive() -> Path:
    """LongBench's `data.zip`, downloaded from the hub where it is not in the cache.

    Raises:
        DocumentError: the hub cannot be reached; the message has the command for where it can.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(HUB, "data.zip", repo_type="dataset"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DocumentError(
            f"data: expected LongBench's archive from the hub, got {reason[:120]!r}; where there "
            f"is a network run hf download {HUB} data.zip --repo-type dataset --local-dir . and "
            "pass --data data.zip"
        ) from None


def _lines(folder: Path, name: str) -> Iterator[bytes]:
    for path in (folder / name, folder / "data" / name):
        if path.is_file():
            with path.open("rb") as file:
                yield from file
            return
    raise _missing(folder, name)


def _zipped_lines(archive: Path, name: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(archive) as opened:
            members = [m for m in opened.namelist() if _is_file(m, name)]
            if not members:
                raise _missing(archive, name)
            with opened.open(members[0]) as file:
                yield from file
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DocumentError(
            f"data: expected LongBench's data.zip or a folder, got {archive}, of which no archive "
            f"can be read ({error}); download it again"
        ) from None


def _is_file(member: str, name: str) -> bool:
    path = PurePosixPath(member)
    return path.name == name and "__MACOSX" not in path.parts


def _missing(place: Path, name: str) -> DocumentError:
    return DocumentError(
        f"data: expected {name} in {place}, got no such file; name the sets that are there with "
        "--datasets, or pass LongBench's data.zip"
    )


def _row(line: bytes, data_set: DataSet, place: str) -> Row:
    """A line as a row.

    Raises:
        DocumentError: it is no JSON object, or a field is missing or of another kind.
    """
    record = parsed(line, place, _REMEDY)
    require_fields(record, _FIELDS, place, _REMEDY)
    if data_set.metric == "classification":
        require_fields(record, {"all_classes": ("a list of texts", bool)}, place, _REMEDY)
    if data_set.metric == "retrieval":
        require_fields(
            record, {"answers": ('texts like "Paragraph 3"', _are_paragraphs)}, place, _REMEDY
        )
    return Row(
        context=record["context"],
        input=record["input"],
        answers=tuple(record["answers"]),
        length=record["length"],
        all_classes=tuple(record.get("all_classes") or ()),
    )


def _are_paragraphs(answers: list[str]) -> bool:
    return all(re.search(PARAGRAPH, answer) for answer in answers)


_REMEDY = "get the archive anew"

_FIELDS: dict[str, Check] = {
    "context": ("a text", lambda value: isinstance(value, str) and bool(value)),
    "input": ("a text", lambda value: isinstance(value, str)),
    "answers": ("a list of texts", lambda value: is_texts(value) and bool(value)),
    "length": ("a whole number", lambda value: type(value) is int),
    "all_classes": ("a list of texts or null", lambda value: value is None or is_texts(value)),
}
