"""Which documents there are, whose they are, and which ones go when room is needed.

A document is in one of three states: it stands under its name; it was deleted while requests were
under way, and takes its bytes until the last of them has ended; or it is gone.
"""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from snapkv.library.records import Record
from snapkv.validation import format_bytes
from snapkv_vllm.documents.prefix import CachedPrefix
from snapkv_vllm.names import DOCUMENT, NO_ROOM, PREFIX, TAKEN, UNKNOWN, shown, wrong
from snapkv_vllm.shares import going
from snapkv_vllm.visits import EVERYBODY

PATH = "/v1/snapkv/documents"
"""Where documents are registered, listed and deleted."""

LIBRARY = "library"
"""The tenant whose documents are those of a library, which everybody may name."""


def shown_tenant(tenant: str) -> str:
    """A tenant in the log: the first digits of its hash, since a key itself is a secret."""
    names = {EVERYBODY: "everybody", LIBRARY: "the library"}
    return names.get(tenant, f"key {tenant[:8]}")


@dataclass(kw_only=True, eq=False)
class SharedDocument:
    """A document that the engine keeps."""

    document_id: str  # the engine's name for it, which no client learns
    tenant: str  # whose it is
    name: str  # what its tenant calls it
    prefix: CachedPrefix  # what prompts that name it begin with
    bytes: int  # what it takes of the engine's cache
    messages: list[dict[str, Any]] | None = None  # it as a chat; None for plain text
    rendered_ids: tuple[int, ...] = ()  # of a chat about it, for which the prefix stands
    source: Record | None = None  # where it is a library's
    created: float = field(default_factory=time.time)  # seconds since the epoch
    last_used: float = 0.0  # when a request named it last, or `created`
    requests: int = 0  # under way

    def __post_init__(self) -> None:
        self.last_used = self.last_used or self.created

    @property
    def kind(self) -> str:
        """The field of a request's body that it is the beginning of; of a library's either."""
        if self.source is not None:
            return LIBRARY
        return "prompt" if self.messages is None else "messages"

    @property
    def described(self) -> dict[str, Any]:
        """What its tenant is told of it, ready for JSON."""
        return {
            "name": self.name,
            "kind": self.kind,
            "tokens": len(self.prefix.token_ids),
            "kept_tokens": self.prefix.kept_tokens,
            "bytes": self.bytes,
            "requests": self.requests,
            "created": int(self.created),
            "last_used": int(self.last_used),
        }


class Catalogue:
    """Documents by tenant and name, within a number of bytes."""

    def __init__(self) -> None:
        self._standing: dict[tuple[str, str], SharedDocument] = {}  # least recently used first
        self._deleted: list[SharedDocument] = []  # under which requests are under way

    @property
    def _held(self) -> list[SharedDocument]:
        return [*self._standing.values(), *self._deleted]

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self._held)

    def __len__(self) -> int:
        return len(self._standing)

    def get(self, tenant: str, name: str) -> SharedDocument | None:
        """A tenant's document; None where there is none of that name."""
        return self._standing.get((tenant, name))

    def all_of(self, tenant: str) -> list[SharedDocument]:
        own = [one for one in self._standing.values() if one.tenant == tenant]
        return sorted(own, key=lambda one: one.name)

    def find(self, tenant: str, name: str) -> SharedDocument:
        """A tenant's document; a RefusedError where there is none of that name."""
        if (found := self.get(tenant, name)) is not None:
            return found
        asked, remedy = f"'{shown(name)}'", f"register it with POST {PATH}"
        raise wrong(PREFIX + DOCUMENT, "one of this key's documents", asked, remedy, status=UNKNOWN)

    def require_free(self, tenant: str, name: str) -> None:
        if self.get(tenant, name) is not None:
            stands = f"'{shown(name)}', which is a document already"
            remedy = f"delete it first, with DELETE {PATH}/{shown(name)}"
            raise wrong("name", "one that is free", stands, remedy, status=TAKEN)

    def make_room(self, tenant: str, needed_bytes: int, most_bytes: int) -> list[SharedDocument]:
        """Forget as many documents as it takes, see `going`; what is in use stays.

        Where even then there is too little room, nothing is forgotten, and the document refused.
        """
        taken = Counter({tenant: needed_bytes})
        for one in self._held:
            taken[one.tenant] += one.bytes
        idle = [one for one in self._standing.values() if not one.requests]
        leaving, lacking = going(idle, taken, most_bytes, lambda one: one.bytes)
        if lacking:
            left = format_bytes(needed_bytes - lacking)
            raise wrong(
                "document",
                f"at most {left}, what is left of --share-bytes {format_bytes(most_bytes)} "
                "without documents in use and those within other keys' shares",
                format_bytes(needed_bytes),
                "wait for requests to end, register a shorter one, or start the server with "
                "more --share-bytes",
                status=NO_ROOM,
            )
        for one in leaving:
            del self._standing[one.tenant, one.name]
        return leaving

    def add(self, document: SharedDocument) -> None:
        assert self.get(document.tenant, document.name) is None
        self._standing[document.tenant, document.name] = document

    def begin(self, document: SharedDocument) -> None:
        """A request stands on it from now on, which makes it the most recently used."""
        document.requests += 1
        document.last_used = time.time()
        whose = document.tenant, document.name
        self._standing[whose] = self._standing.pop(whose)

    def end(self, document: SharedDocument) -> bool:
        """Such a request has ended; whether the document is gone with it, to be dropped."""
        document.requests -= 1
        is_gone = document in self._deleted and not document.requests
        if is_gone:
            self._deleted.remove(document)
        return is_gone

    def delete(self, document: SharedDocument) -> bool:
        """Take its name away; whether it is gone with that, or else with its last request."""
        del self._standing[document.tenant, document.name]
        if document.requests:
            self._deleted.append(document)
        return not document.requests
