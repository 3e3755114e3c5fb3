"""The record of a document: JSON with a digest of itself, next to the file of its cache."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snapkv.cache.saving.files import seal_of
from snapkv.errors import CacheFileError, LibraryError

_FORMAT = "snapkv document 1"
BEGINNING = f'{{"format": "{_FORMAT.rstrip("1")}'
"""With which every record begins, of this format or a later one."""


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def record_of(document: Mapping[str, Any]) -> str:
    """The content of a document's record, with a digest of itself."""
    return json.dumps({"format": _FORMAT, "sha256": _digest_of(document), "document": document})


def from_record(content: str) -> dict[str, Any]:
    """The document that `record_of` was given."""
    try:
        whole = json.loads(content)
        document, found, sealed = whole["document"], whole["format"], whole["sha256"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise LibraryError(f"it is no record of a document ({error!r})") from error
    if found != _FORMAT:
        raise LibraryError(f"its format is {found!r}, not {_FORMAT!r}")
    if _digest_of(document) != sealed or not isinstance(document, dict):
        raise LibraryError("it is not what was written")
    return document


def _digest_of(document: Any) -> str:
    return digest_of(json.dumps(document, sort_keys=True))


def seal_fault(path: Path, seal: str, *, checked: bool) -> str | None:
    """What is wrong with the cache's file that a record names; None where nothing is."""
    try:
        if seal_of(path, checked=checked) == seal:
            return None
    except CacheFileError as error:
        return str(error)
    return "it is another file than the one that was written"
