"""A bound on the bytes of a library: the documents asked for longest ago make room."""

from collections.abc import Collection, Iterable

from snapkv.errors import InvalidArgumentError
from snapkv.library.folder import Folder
from snapkv.library.index import Entry
from snapkv.validation import format_bytes


class Room:
    """What a bound leaves for documents that are to come.

    By whoever is alone in changing the folder. Of documents that nobody has asked for it counts
    when they were written; the one that was asked for last never goes, nor do those that `stay`.

    Args:
        folder: of the library.
        entries: all documents of it.
        most_bytes: that all files of keys and values may take together; `math.inf` for no bound.
        stay: keys of documents that may not go.

    Attributes:
        evicted: what had to go so far.
    """

    def __init__(
        self,
        folder: Folder,
        entries: Iterable[Entry],
        most_bytes: float,
        stay: Collection[str] = (),
    ) -> None:
        self._folder, self._most_bytes, self._stay = folder, most_bytes, stay
        self._held = {entry.key: entry for entry in entries}
        self._held_bytes = sum(entry.bytes for entry in self._held.values())
        self.evicted: list[Entry] = []

    def too_many(self, size: int = 0, key: str = "") -> list[Entry]:
        """The documents that must go where that of a key takes so many bytes.

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

    def admit(self, entry: Entry) -> list[Entry]:
        """Count a document that was written, and say which have to go for it."""
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
        """Those that may go, the one asked for longest ago first."""
        asked = {key: at for key in keys if (at := self._folder.asked_at(key)) is not None}
        last = max(asked, key=asked.__getitem__, default=None)
        free = [key for key in keys if key not in self._stay and key != last]
        return sorted(free, key=lambda key: (asked.get(key) or self._folder.written_at(key), key))
