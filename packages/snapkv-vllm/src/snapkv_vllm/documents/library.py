"""The documents of a library in a folder, which a server reads and never changes."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from snapkv.library.about import About, fingerprint_of
from snapkv.library.folder import Folder
from snapkv.library.library import Library
from snapkv.library.records import Record


class ServedLibrary:
    """Documents by name; what is added, changed or removed meanwhile is seen.

    Raises:
        LibraryError: there is no library, or one of a later version.
    """

    def __init__(self, path: Path) -> None:
        self._about: About = Library(path).required()
        self._folder = Folder(path)
        self._settled: str | None = None
        self._keys: dict[str, str] = {}  # of the documents by name
        self._one_thread = threading.RLock()

    def require_read_by(self, model: Mapping[str, Any], tokenizer: Any) -> None:
        """Refuse another model than has read the documents, or another tokenizer."""
        own = self._about
        found = replace(own, model=dict(model), tokenizer=fingerprint_of(tokenizer))
        own.require_same(found)

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """What chats about a document begin with, before what a user says."""
        return self._about.prefix_ids

    def cache_file(self, record: Record) -> Path:
        return self._folder.cache_file(record)

    def find(self, name: str) -> Record | None:
        """The document of that name as it is now; None where there is none."""
        with self._one_thread:
            key = self._all_keys().get(name)
            record = None if key is None else self._folder.record(key)
        return record if record is not None and record.name == name else None

    def records(self) -> list[Record]:
        """All documents that are whole, in the order of their names."""
        with self._one_thread:
            return list(self._folder.records()[0].values())

    def _all_keys(self) -> dict[str, str]:
        """Looked up again where a document may have come or gone since the last time."""
        settled = self._folder.settled()
        if settled is None or settled != self._settled:
            self._keys = {record.name: record.key for record in self.records()}
            self._settled = settled
        return self._keys
