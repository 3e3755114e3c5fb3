"""A limit on the bytes of a library: the least recently used documents are evicted."""

from collections.abc import Collection, Iterable

from snapkv.errors import InvalidArgumentError
from snapkv.validation import format_bytes
from snapkv_app.library.folder import Folder
from snapkv_app.library.index import DocumentEntry


class SizeLimit:
    """The room that a limit leaves for new documents.

    The caller must hold the folder's lock. A document that was never asked for counts from when it
    was written. The one that was asked for last is never evicted, nor are those in `stay`.

    Args:
        folder: of the library.
        entries: all documents of it.
        most_bytes: that all files of keys and values may take together; `math.inf` for no bound.
        stay: keys of documents that must stay.

    Attributes:
        evicted: the documents evicted so far.
    """

    def __init__(
        self,
        folder: Folder,
        entries: Iterable[DocumentEntry],
        most_bytes: float,
        stay: Collection[str] = (),
    ) -> None:
        self._folder, self._most_bytes, self._stay = folder, most_bytes, stay
        self._held = {entry.key: entry for entry in entries}
        self._held_bytes = sum(entry.bytes for entry in self._held.values())
        self.evicted: list[DocumentEntry] = []

    def too_many(self, size: int = 0, key: str = "") -> list[DocumentEntry]:
        """The documents to evict for a document of that many bytes.

        Raises:
            InvalidArgumentError: they may not.
        """
        excess = self._held_bytes - self._bytes_of(key) + size - self._most_bytes
        if excess <= 0:
            return []  # no file is looked at
        going = []
        for other in self._by_last_use(self._held.keys() - {key}):
            if excess <= 0:
                break
            going.append(self._held[other])
            excess -= self._held[other].bytes
        if excess > 0:
            least, got = (
                format_bytes(int(n)) for n in (self._most_bytes + excess, self._most_bytes)
            )
            raise InvalidArgumentError(
                f"max_bytes: expected at least {least}, what the document that was asked for last "
                f"and all that is added take, got {got}; raise it with snapkv library limit, or "
                "remove documents"
            )
        return going

    def admit(self, entry: DocumentEntry) -> list[DocumentEntry]:
        """Count a written document; the documents to evict for it."""
        going = self.too_many(entry.bytes, entry.key)
        self._held_bytes += entry.bytes - self._bytes_of(entry.key)
        self._held[entry.key] = entry
        for other in going:
            self._held_bytes -= self._held.pop(other.key).bytes
        self.evicted += going
        return going

    def _bytes_of(self, key: str) -> int:
        return self._held[key].bytes if key in self._held else 0

    def _by_last_use(self, keys: Collection[str]) -> list[str]:
        """Documents that may be evicted, the least recently used first."""
        asked = {key: at for key in keys if (at := self._folder.asked_at(key)) is not None}
        last = max(asked, key=asked.__getitem__, default=None)
        free = [key for key in keys if key not in self._stay and key != last]
        return sorted(free, key=lambda key: (asked.get(key) or self._folder.written_at(key), key))
