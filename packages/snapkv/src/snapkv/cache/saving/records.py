"""The record of a document: a JSON file, protected by a digest, next to the file of its cache."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snapkv.cache.saving.files import seal_of
from snapkv.errors import CacheFileError, LibraryError

_FORMAT = "snapkv document 1"
BEGINNING = f'{{"format": "{_FORMAT.rstrip("1")}'
"""The text with which every record begins, in this format or a later one."""


def digest_of(text: str) -> str:
    """Return the SHA-256 digest of a text as 64 hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def record_of(document: Mapping[str, Any]) -> str:
    """Return the content of the file that records a document.

    Args:
        document: the data of the document, with values that JSON can represent.

    Returns:
        The JSON text from which `from_record` restores the document.
    """
    return json.dumps({"format": _FORMAT, "sha256": _digest_of(document), "document": document})


def from_record(content: str) -> dict[str, Any]:
    """Restore the data of a document from the content of its record.

    The messages of the errors are only reasons. The caller must add the name of the file.

    Args:
        content: the text that `record_of` returned.

    Raises:
        LibraryError: the content is no record, has another format, or has changed.
    """
    try:
        record = json.loads(content)
        document, found, sealed = record["document"], record["format"], record["sha256"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise LibraryError(f"the file is not the record of a document ({error!r})") from error
    if found != _FORMAT:
        raise LibraryError(f"the format of the file is {found!r}, but {_FORMAT!r} was expected")
    if _digest_of(document) != sealed or not isinstance(document, dict):
        raise LibraryError("the content of the file has changed since it was written")
    return document


def _digest_of(document: Any) -> str:
    return digest_of(json.dumps(document, sort_keys=True))


def seal_fault(path: Path, seal: str, *, checked: bool) -> str | None:
    """Check that the cache of a record is the file that was written with it.

    Args:
        path: the file of the cache.
        seal: the seal that the record names.
        checked: whether to read the whole file and compare its bytes with its seal.

    Returns:
        What is wrong with the file, or None if it is right.
    """
    try:
        if seal_of(path, checked=checked) == seal:
            return None
    except CacheFileError as error:
        return str(error)
    return "the file is not the same as the one that was written"
