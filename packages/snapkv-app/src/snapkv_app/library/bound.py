"""Limit the bytes of a library, by evicting the least recently used documents."""

from collections.abc import Collection, Iterable

from snapkv.errors import wrong
from snapkv.validation import format_bytes
from snapkv_app.library.folder import Folder
from snapkv_app.library.index import DocumentEntry


class SizeLimit:
    """A limit on the bytes of a library, which selects the documents to evict for a new one.

    The caller must hold the lock of the folder. The least recently used documents are evicted
    first. A document that no question has used counts as used when it was written. The most
    recently used document is never evicted, and neither are those in `stay`.

    Args:
        folder: the folder of the library.
        entries: all documents of the library.
        most_bytes: the most bytes that all cache files may take together; `math.inf` for no limit.
        stay: the keys of documents that must not be evicted.

    Attributes:
        evicted: all documents that `admit` has returned so far.
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
        """Return the documents that must be evicted for a new document, without evicting them.

        By default there is no new document, and the stored ones alone must fit below the limit.

        Args:
            size: the bytes of the file of the new document.
            key: the key of the new document. A document with this key is replaced, so its bytes do
                not count.

        Returns:
            The documents to evict, the least recently used first; empty if all of them fit.

        Raises:
            InvalidArgumentError: the limit would be exceeded even if all documents were evicted
                that may be evicted.
        """
        excess = self._held_bytes - self._bytes_of(key) + size - self._most_bytes
        if excess <= 0:
            return []  # without looking up when each document was used
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
            raise wrong(
                "max_bytes",
                f"the limit is {got}, but the last used document and the documents that are being "
                f"added take {least}",
                "Use snapkv library limit to increase the limit, or remove some of the documents",
            )
        return going

    def admit(self, entry: DocumentEntry) -> list[DocumentEntry]:
        """Count a document that was written, and return the documents to evict for it.

        From now on the returned documents do not count any more, and the caller must remove them.
        They are also added to `evicted`. The least recently used one comes first.

        Raises:
            InvalidArgumentError: the document does not fit, as for `too_many`; it is not counted.
        """
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
        """Return the keys that may be evicted, the least recently used first.

        The most recently used document and those that must stay are left out.
        """
        uses = {key: time for key in keys if (time := self._folder.last_used_at(key)) is not None}
        last = max(uses, key=uses.__getitem__, default=None)
        free = [key for key in keys if key not in self._stay and key != last]
        return sorted(free, key=lambda key: (uses.get(key) or self._folder.written_at(key), key))
