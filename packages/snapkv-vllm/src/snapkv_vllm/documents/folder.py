"""A folder of documents: one file of keys and values for each, and one that says what it is.

They lie in a folder of their tenant; next to those lie files that users have put there.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from snapkv.document_files import (
    from_record,
    naming,
    record_of,
    replace_file,
    replacing,
    seal_of,
)
from snapkv.errors import CacheFileError, LibraryError
from snapkv_vllm.documents.catalogue import SharedDocument
from snapkv_vllm.documents.refused import RefusedError
from snapkv_vllm.documents.tenants import EVERYBODY
from snapkv_vllm.names import shown

_EVERYBODY = "everybody"
_STATES, _NOTE = ".safetensors", ".json"
_MOST_NAME_BYTES = 150  # of the 255 that file systems take


@dataclass(frozen=True, kw_only=True)
class Noted:
    """A document in the folder.

    Attributes:
        tenant: whose it is.
        name: what its tenant calls it.
        messages: it as a chat; None for plain text.
        seal: of its file.
        created: seconds since the epoch.
    """

    tenant: str
    name: str
    messages: list[dict[str, Any]] | None
    seal: str
    created: float


class DocumentFolder:
    """Where documents are kept. A document is there once it is noted, behind its other file.

    Args:
        folder: which is there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def place(self, tenant: str, name: str) -> Path:
        """Where a document's keys and values are, or would be; its folder is made."""
        return self._named(tenant, name, _STATES)

    def holds(self, tenant: str, name: str) -> bool:
        """Whether a document is there."""
        return self._named(tenant, name, _NOTE).is_file()

    def given(self, file: object) -> Path:
        """A file that lies in the folder itself.

        Args:
            file: its bare name.

        Raises:
            RefusedError: another name, or a link that leads elsewhere.
        """
        if not isinstance(file, str) or file != Path(file).name or not file.isprintable():
            said = f"'{shown(file)}'" if isinstance(file, str) else type(file).__name__
            raise RefusedError(
                f"file: expected the bare name of a file in --share-folder, got {said}; put the "
                "file there, and pass its name alone"
            )
        path = self._folder / file
        if path.resolve().parent != self._folder.resolve() or not path.is_file():
            raise RefusedError(
                f"file: expected a file in --share-folder itself, got '{shown(file)}', which is "
                "none; put the file there"
            )
        return path

    def copy(self, source: Path, tenant: str, name: str) -> Path:
        """Take a file over as that of a document, which is not noted yet.

        Raises:
            OutputError: it cannot be written.
        """
        path = self.place(tenant, name)
        with replacing(path) as partial:
            shutil.copyfile(source, partial)
        return path

    def note(self, document: SharedDocument) -> None:
        """Say what the file of a document is, which is complete by now.

        Raises:
            SnapKVError: the file cannot be read, or the note not be written.
        """
        tenant, name = document.tenant, document.name
        messages = None if document.messages is None else list(document.messages)
        seal = seal_of(self.place(tenant, name), checked=False)
        said = {"name": name, "messages": messages, "seal": seal, "created": document.created}
        replace_file(self._named(tenant, name, _NOTE), record_of(said))

    def forget(self, tenant: str, name: str) -> None:
        """Remove a document's files where they are there, the note first.

        Raises:
            OutputError: they cannot be removed.
        """
        for kind in (_NOTE, _STATES):
            path = self._named(tenant, name, kind)
            with naming(path):
                path.unlink(missing_ok=True)

    def noted(self) -> Iterator[Noted | CacheFileError]:
        """What is wrong with notes that cannot be read, then all documents, the oldest first."""
        found = []
        for path in self._folder.glob(f"*/*{_NOTE}"):
            try:
                found.append(self._read(path))
            except (OSError, ValueError, TypeError, KeyError, LibraryError) as error:
                yield CacheFileError(
                    f"note: expected one of a document, got {str(path)!r}: {error!r}; delete it, "
                    "and register the document again"
                )
        yield from sorted(found, key=lambda one: one.created)

    def _read(self, path: Path) -> Noted:
        content = path.read_text()
        said: Mapping[str, Any] = json.loads(content)
        if "seal" not in said:  # earlier servers wrote it bare
            said = from_record(content)
        tenant = EVERYBODY if path.parent.name == _EVERYBODY else path.parent.name
        messages, created = said["messages"], float(said["created"])
        name, seal = str(said["name"]), str(said["seal"])
        if self._named(tenant, name, _NOTE) != path:
            raise ValueError(f"it is that of {name!r}")
        return Noted(tenant=tenant, name=name, messages=messages, seal=seal, created=created)

    def _named(self, tenant: str, name: str, kind: str) -> Path:
        folder = self._folder / (tenant or _EVERYBODY)
        with naming(folder):
            folder.mkdir(exist_ok=True)
        quoted = quote(name, safe=" ")
        if len(quoted) > _MOST_NAME_BYTES:
            digest = hashlib.sha256(name.encode()).hexdigest()
            quoted = f"{quoted[: _MOST_NAME_BYTES - len(digest)]}-{digest}"
        return folder / f"{quoted}{kind}"
