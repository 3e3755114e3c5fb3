"""Which documents there are, whose they are, and which ones go when room is needed.

A document is in one of three states: it stands under its name; it was deleted while requests were
under way, and takes its bytes until the last of them has ended; or it is gone.
"""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from snapkv.validation import format_bytes
from snapkv_vllm.documents.refused import NO_ROOM, TAKEN, UNKNOWN, RefusedError
from snapkv_vllm.names import DOCUMENT, PREFIX, shown

PATH = "/v1/snapkv/documents"
"""Where documents are registered, listed and deleted."""


@dataclass(kw_only=True)
class SharedDocument:
    """A document that the engine keeps.

    Attributes:
        document_id: the engine's name for it, which no client learns.
        tenant: whose it is.
        name: what its tenant calls it.
        token_ids: what prompts that name it begin with.
        messages: it as a chat, of which `token_ids` are the rendering; None for plain text.
        kept_tokens: per KV head and layer.
        bytes: what it takes of the engine's cache.
        created: seconds since the epoch.
        last_used: when a request named it last, or `created`.
        requests: under way.
    """

    document_id: str
    tenant: str
    name: str
    token_ids: tuple[int, ...]
    messages: tuple[dict[str, Any], ...] | None
    kept_tokens: int
    bytes: int
    created: float = field(default_factory=time.time)
    last_used: float = 0.0
    requests: int = 0

    def __post_init__(self) -> None:
        """It was last used when it was made."""
        self.last_used = self.last_used or self.created

    @property
    def kind(self) -> str:
        """The field of a request's body that it is the beginning of."""
        return "prompt" if self.messages is None else "messages"


class Catalogue:
    """Documents by tenant and name, within a number of bytes."""

    def __init__(self) -> None:
        self._standing: dict[tuple[str, str], SharedDocument] = {}  # least recently used first
        self._deleted: dict[str, SharedDocument] = {}

    @property
    def bytes(self) -> int:
        """What all documents take."""
        return sum(one.bytes for one in (*self._standing.values(), *self._deleted.values()))

    def __len__(self) -> int:
        return len(self._standing)

    def of(self, tenant: str) -> list[SharedDocument]:
        """A tenant's documents by name."""
        own = [one for one in self._standing.values() if one.tenant == tenant]
        return sorted(own, key=lambda one: one.name)

    def find(self, tenant: str, name: str) -> SharedDocument:
        """A tenant's document.

        Raises:
            RefusedError: the tenant has none of that name.
        """
        found = self._standing.get((tenant, name))
        if found is None:
            raise RefusedError(
                f"{PREFIX}{DOCUMENT}: expected one of this key's documents, got '{shown(name)}'; "
                f"register it with POST {PATH}",
                UNKNOWN,
            )
        return found

    def stands(self, tenant: str, name: str) -> bool:
        """Whether a tenant has a document of this name."""
        return (tenant, name) in self._standing

    def require_free(self, tenant: str, name: str) -> None:
        """Raise where a name stands for a document already.

        Raises:
            RefusedError: it does.
        """
        if (tenant, name) in self._standing:
            raise RefusedError(
                f"name: expected one that is free, got '{shown(name)}', which is a document "
                f"already; delete it first, with DELETE {PATH}/{shown(name)}",
                TAKEN,
            )

    def make_room(self, tenant: str, needed_bytes: int, most_bytes: int) -> list[SharedDocument]:
        """Forget as many documents as it takes: of the tenant that has most, the least used first.

        A tenant's share is an equal part for each who has documents, this one among them. It may
        take what others leave; what is within another's share stays, and so does what is in use.

        Args:
            tenant: whose the document is that is to come.
            needed_bytes: of that document.
            most_bytes: that all may take together, deleted ones in use among them.

        Returns:
            What was forgotten, for the engine to drop.

        Raises:
            RefusedError: even then there is too little room; nothing was forgotten.
        """
        taken = Counter({tenant: needed_bytes})
        for one in (*self._standing.values(), *self._deleted.values()):
            taken[one.tenant] += one.bytes
        share, leaving = most_bytes / len(taken), []
        idle = [one for one in self._standing.values() if not one.requests]
        while taken.total() > most_bytes:
            going = [one for one in idle if taken[one.tenant] > share]
            if not going:
                raise _no_room(needed_bytes, most_bytes, taken.total() - needed_bytes)
            leaving.append(max(going, key=lambda one: taken[one.tenant]))  # of equals the first
            idle.remove(leaving[-1])
            taken[leaving[-1].tenant] -= leaving[-1].bytes
        for one in leaving:
            del self._standing[one.tenant, one.name]
        return leaving

    def add(self, document: SharedDocument) -> None:
        """Put a document under its name, which is free, where there is room for it."""
        key = document.tenant, document.name
        assert key not in self._standing
        self._standing[key] = document

    def begin(self, document: SharedDocument) -> None:
        """A request that stands on a document begins."""
        key = document.tenant, document.name
        document.requests += 1
        document.last_used = time.time()
        self._standing[key] = self._standing.pop(key)  # as the most recently used

    def end(self, document: SharedDocument) -> bool:
        """Such a request has ended.

        Returns:
            Whether the document is gone with it, for the engine to drop.
        """
        document.requests -= 1
        deleted = self._deleted.get(document.document_id)
        if deleted is None or document.requests:
            return False
        del self._deleted[document.document_id]
        return True

    def delete(self, tenant: str, name: str) -> SharedDocument | None:
        """Take a document's name away.

        Returns:
            It, for the engine to drop; None where the last of its requests will do that.

        Raises:
            RefusedError: the tenant has none of that name.
        """
        document = self.find(tenant, name)
        del self._standing[tenant, name]
        if not document.requests:
            return document
        self._deleted[document.document_id] = document
        return None


def _no_room(needed_bytes: int, most_bytes: int, kept_bytes: int) -> RefusedError:
    return RefusedError(
        f"document: expected at most {format_bytes(most_bytes - kept_bytes)}, what is left of "
        f"--share-bytes {format_bytes(most_bytes)} beside documents in use and those within other "
        f"keys' shares, got {format_bytes(needed_bytes)}; wait for requests to end, register a "
        "shorter one, or start the server with more --share-bytes",
        NO_ROOM,
    )
