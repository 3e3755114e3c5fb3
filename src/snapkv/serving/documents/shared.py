"""The documents of a server: registered, named by requests, deleted."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from snapkv.policies.kvzip import INSTRUCTION
from snapkv.serving.documents.catalogue import Catalogue, SharedDocument
from snapkv.serving.documents.engine import EngineDocuments
from snapkv.serving.documents.refused import BUSY, RefusedError
from snapkv.serving.documents.rewriting import (
    Prompts,
    ids_of_messages,
    ids_of_text,
    require_base_model,
)
from snapkv.serving.names import require_document_name, shown
from snapkv.validation import require_int

_FIELDS = ("name", "prompt", "messages", "budget", "model")

_MOST_UNDER_WAY = 64
"""Registrations, whose bodies are held until their turn comes, also if their clients go away."""


class Counts(Protocol):
    """What is counted of documents, see `snapkv.serving.metrics.DocumentMetrics`."""

    def standing(self, documents: int, document_bytes: int) -> None:
        """How many there are now, and what all of them take."""

    def asked(self, tokens_not_read: int) -> None:
        """One request was answered from a document."""

    def dropped(self, reason: str) -> None:
        """One document went: deleted, or least_used."""


class SharedDocuments:
    """Keeps the catalogue and the engine in step.

    Args:
        engine: holds the documents' blocks.
        prompts: makes their tokens.
        counts: what happens.
    """

    def __init__(self, engine: EngineDocuments, prompts: Prompts, counts: Counts) -> None:
        self.prompts = prompts
        self.catalogue = Catalogue()
        self._engine = engine
        self._counts = counts
        self._one_at_a_time = asyncio.Lock()
        self._registrations: set[asyncio.Task[SharedDocument]] = set()
        self._count()

    async def register(self, tenant: str, body: Mapping[str, Any]) -> SharedDocument:
        """Read a document and put it under its name; done whole even if the client goes away.

        Args:
            tenant: whose it is.
            body: of the request: `name`, `prompt` or `messages`, and a `budget` where the server's
                is not meant; its `model`, as elsewhere, may be named.

        Raises:
            RefusedError: a field that is wrong, a name that stands, no room, too many at once, or
                vLLM's own words.
            SnapKVError: the engine refuses the document.
        """
        _require_fields(body)
        require_base_model(body, self.prompts)
        if len(self._registrations) >= _MOST_UNDER_WAY:
            raise RefusedError(
                f"document: expected fewer than {_MOST_UNDER_WAY} registrations under way, which "
                "are done one after the other, got one more; try again later",
                BUSY,
            )
        task = asyncio.create_task(self._register(tenant, body))
        self._registrations.add(task)
        task.add_done_callback(self._registrations.discard)
        return await asyncio.shield(task)

    async def delete(self, tenant: str, name: str) -> None:
        """Forget a document by its name; the engine does once its requests have ended.

        Raises:
            RefusedError: the tenant has none of that name.
        """
        gone = self.catalogue.delete(tenant, name)
        self._counts.dropped("deleted")
        if gone is not None:
            await self._drop(gone)
        self._count()

    @asynccontextmanager
    async def named(self, tenant: str, name: str) -> AsyncIterator[SharedDocument]:
        """A document for as long as a request stands on it: it is not dropped meanwhile.

        Raises:
            RefusedError: the tenant has none of that name.
        """
        document = self.catalogue.find(tenant, name)
        self.catalogue.begin(document)
        try:
            yield document
        finally:
            if self.catalogue.end(document):
                await asyncio.shield(self._drop(document))

    def answered(self, document: SharedDocument, prompts: int) -> None:
        """Count a request whose prompts began with a document."""
        self._counts.asked(prompts * len(document.token_ids))

    async def _register(self, tenant: str, body: Mapping[str, Any]) -> SharedDocument:
        async with self._one_at_a_time:
            self.catalogue.require_free(tenant, body["name"])
            messages, budget = body.get("messages"), body.get("budget")
            if messages is None:
                token_ids = await ids_of_text(body.get("prompt"), self.prompts)
            else:
                token_ids = await ids_of_messages(messages, self.prompts)
            instruction = await self.prompts.tokenize(INSTRUCTION, special_tokens=False)
            needed = await self._engine.bytes_of(
                len(token_ids), budget=budget, instruction_tokens=len(instruction)
            )
            await self._make_room(needed)
            document_id = uuid.uuid4().hex
            kept = await self._engine.register(
                document_id, token_ids, budget=budget, instruction_ids=instruction
            )
            document = SharedDocument(
                document_id=document_id,
                tenant=tenant,
                name=body["name"],
                token_ids=token_ids,
                messages=None if messages is None else tuple(messages),
                kept_tokens=kept.kept_tokens,
                bytes=kept.bytes,
            )
            self.catalogue.add(document)
            self._count()
            return document

    async def _make_room(self, needed: int) -> None:
        room = await self._engine.room()
        for one in self.catalogue.make_room(needed, room.most_bytes):
            self._counts.dropped("least_used")
            await self._drop(one)

    async def _drop(self, document: SharedDocument) -> None:
        await self._engine.drop(document.document_id)
        self._count()

    def _count(self) -> None:
        self._counts.standing(len(self.catalogue), self.catalogue.bytes)


def _require_fields(body: Mapping[str, Any]) -> None:
    """Raise unless a body says what to register, and under which name."""
    for field in body:
        if field not in _FIELDS:
            raise RefusedError(
                f"{shown(field)}: expected {', '.join(_FIELDS)}, got '{shown(field)}'; leave it out"
            )
    require_document_name("name", body.get("name"))
    if (body.get("prompt") is None) == (body.get("messages") is None):
        raise RefusedError(
            "prompt and messages: expected one of them, got "
            f"{'neither' if body.get('prompt') is None else 'both'}; pass a prompt for "
            "/v1/completions, messages for /v1/chat/completions"
        )
    if body.get("budget") is not None:
        require_int("budget", body["budget"], minimum=1)
