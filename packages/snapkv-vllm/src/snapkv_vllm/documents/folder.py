"""A folder of documents: the cache of each, and the record behind it, as libraries have them.

They lie in a folder of their tenant; next to those lie files that users have put there.
"""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from snapkv.document_files import (
    digest_of,
    from_record,
    naming,
    record_of,
    replace_file,
    replacing,
    seal_of,
)
from snapkv.errors import CacheFileError, LibraryError
from snapkv_vllm.documents.catalogue import EVERYBODY, SharedDocument
from snapkv_vllm.names import shown, wrong

_EVERYBODY = "everybody"
_CACHE, _RECORD = ".safetensors", ".json"
_MOST_NAME_BYTES = 150  # of the 255 that file systems take
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, RecursionError, LibraryError)


@dataclass(frozen=True, kw_only=True)
class Record:
    """A document in the folder: whose it is, its name, it as a chat, and the seal of its cache."""

    tenant: str
    name: str
    messages: list[dict[str, Any]] | None
    seal: str
    created: float


def copy_file(source: Path, path: Path) -> None:
    """Copy a file, whole or not at all."""
    with replacing(path) as partial:
        shutil.copyfile(source, partial)


class DocumentFolder:
    """Where documents are kept. A document is there if and only if its record is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def cache_file(self, tenant: str, name: str) -> Path:
        """Where a document's cache is, or would be; its folder is made."""
        return self._named(tenant, name, _CACHE)

    def holds(self, tenant: str, name: str) -> bool:
        return self._named(tenant, name, _RECORD).is_file()

    def given(self, file: object) -> Path:
        """A file that lies in the folder itself, by its bare name; others are refused."""
        if not isinstance(file, str) or file != Path(file).name or not file.isprintable():
            said = f"'{shown(file)}'" if isinstance(file, str) else type(file).__name__
            remedy = "put the file there, and pass its name alone"
            raise wrong("file", "the bare name of a file in --share-folder", said, remedy)
        path = self._folder / file
        if path.resolve().parent != self._folder.resolve() or not path.is_file():
            said = f"'{shown(file)}', which is none"
            raise wrong("file", "a file in --share-folder itself", said, "put the file there")
        return path

    def record(self, document: SharedDocument) -> None:
        """Say what a document's cache is, whose file is complete by now."""
        tenant, name = document.tenant, document.name
        seal = seal_of(self.cache_file(tenant, name), checked=False)
        told = {"name": name, "messages": document.messages, "seal": seal}
        whole = record_of({**told, "created": document.created})
        replace_file(self._named(tenant, name, _RECORD), whole)

    def forget(self, tenant: str, name: str) -> None:
        """Remove a document's files where they are there, the record first."""
        for kind in (_RECORD, _CACHE):
            path = self._named(tenant, name, kind)
            with naming(path):
                path.unlink(missing_ok=True)

    def records(self) -> Iterator[Record | CacheFileError]:
        """What is wrong with records that cannot be read, then all documents, the oldest first."""
        found = []
        for path in self._folder.glob(f"*/*{_RECORD}"):
            try:
                found.append(self._read(path))
            except _UNREADABLE as error:
                yield CacheFileError(
                    f"record: expected one of a document, got {str(path)!r}: {error!r}; delete "
                    "it, and register the document again"
                )
        yield from sorted(found, key=lambda one: one.created)

    def _read(self, path: Path) -> Record:
        content = path.read_text()
        told = json.loads(content)
        if "seal" not in told:  # earlier servers wrote it bare
            told = from_record(content)
        record = Record(
            tenant=EVERYBODY if path.parent.name == _EVERYBODY else path.parent.name,
            name=str(told["name"]),
            messages=told["messages"],
            seal=str(told["seal"]),
            created=float(told["created"]),
        )
        if self._named(record.tenant, record.name, _RECORD) != path:
            raise ValueError(f"it is that of {record.name!r}")
        if not math.isfinite(record.created):
            raise ValueError(f"it was created at {record.created}")
        return record

    def _named(self, tenant: str, name: str, kind: str) -> Path:
        folder = self._folder / (tenant or _EVERYBODY)
        with naming(folder):
            folder.mkdir(exist_ok=True)
        quoted = quote(name, safe=" ")
        if len(quoted) > _MOST_NAME_BYTES:
            digest = digest_of(name)
            quoted = f"{quoted[: _MOST_NAME_BYTES - len(digest)]}-{digest}"
        return folder / f"{quoted}{kind}"
