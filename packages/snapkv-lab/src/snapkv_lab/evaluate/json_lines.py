"""Files of a JSON object per line: one that is malformed is named by its line and field."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from snapkv.errors import DocumentError

Check = tuple[str, Callable[[Any], bool]]
"""What a field must be, and whether it is."""


def parsed(line: str | bytes, place: str, remedy: str) -> dict[str, Any]:
    """The object of a line.

    Raises:
        DocumentError: it is none.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        found = (line if isinstance(line, str) else line.decode(errors="replace")).strip()[:40]
        raise DocumentError(f"data: expected a JSON object in {place}, got {found!r}; {remedy}")
    return record


def require_fields(
    record: dict[str, Any], checks: Mapping[str, Check], place: str, remedy: str, prefix: str = ""
) -> None:
    """Raise unless every field is what it must be; `prefix` stands before its name.

    Raises:
        DocumentError: one is missing or of another kind.
    """
    for field, (wanted, is_right) in checks.items():
        if not is_right(record.get(field)):
            got = repr(record[field])[:40] if field in record else "no such field"
            raise malformed(prefix + field, wanted, place, got, remedy)


def malformed(field: str, wanted: str, place: str, got: str, remedy: str) -> DocumentError:
    """What is wrong with a field."""
    return DocumentError(f"data: expected {field} to be {wanted} in {place}, got {got}; {remedy}")


def is_texts(value: Any) -> bool:
    """Whether it is a list of texts."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
