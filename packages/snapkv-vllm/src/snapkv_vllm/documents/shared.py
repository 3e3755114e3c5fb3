"""The documents of a server: registered, named by requests, deleted."""

import asyncio
import logging
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from snapkv.library.records import Record
from snapkv.policies.kvzip import INSTRUCTION
from snapkv.validation import format_bytes, require_int
from snapkv_vllm.admission import require_document_name
from snapkv_vllm.documents.catalogue import (
    LIBRARY,
    Catalogue,
    SharedDocument,
    shown_tenant,
)
from snapkv_vllm.documents.engine import ServerEngine
from snapkv_vllm.documents.library import ServedLibrary
from snapkv_vllm.documents.prefix import CachedPrefix
from snapkv_vllm.documents.prompts import Prompts
from snapkv_vllm.metrics import Metrics
from snapkv_vllm.names import BUSY, TAKEN, shown, wrong

_FIELDS = ("name", "prompt", "messages", "budget", "model")

_MOST_UNDER_WAY = 64
"""Registrations of a tenant; bodies are held until their turn comes, also if clients go away."""

_logger = logging.getLogger("vllm.snapkv")


class SharedDocuments:
    """Keeps the catalogue and the engine in step.

    Args:
        engine: holds the documents' blocks.
        prompts: makes their tokens.
        counts: what happens.
        library: whose documents everybody may name; None has none.
    """

    def __init__(
        self,
        engine: ServerEngine,
        prompts: Prompts,
        counts: Metrics,
        library: ServedLibrary | None = None,
    ) -> None:
        self.catalogue = Catalogue()
        self._engine, self._prompts, self._counts = engine, prompts, counts
        self._library = library
        self._one_at_a_time = asyncio.Lock()
        self._own_turn: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._registrations: dict[asyncio.Task[SharedDocument], str] = {}
        self._count()

    # What clients ask for.

    async def register(self, tenant: str, body: Mapping[str, Any]) -> SharedDocument:
        """Read a document and put it under its name; done whole even if the client goes away.

        The body has a `name`; `prompt` or `messages`; a `budget` where the server's is not meant;
        `model`, as elsewhere.
        """
        _require_fields(body)
        model = body.get("model")
        if isinstance(model, str) and model and not self._prompts.is_base_model(model):
            reads = "the model that reads documents"
            raise wrong("model", reads, f"'{shown(model)}'", "register it without an adapter")
        if list(self._registrations.values()).count(tenant) >= _MOST_UNDER_WAY:
            most = f"fewer than {_MOST_UNDER_WAY} registrations of one key under way"
            raise wrong("document", most, "one more", "try again later", status=BUSY)
        task = asyncio.create_task(self._register(tenant, body))
        self._registrations[task] = tenant
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[SharedDocument]) -> None:
        """A registration is over; what went wrong is looked at, whether its client waits or not."""
        del self._registrations[task]
        if not task.cancelled():
            task.exception()

    async def delete(self, tenant: str, name: str) -> None:
        """Forget a document by its name; the engine does once its requests have ended."""
        document = self.catalogue.find(tenant, name)
        self._counts.count("documents_dropped", reason="deleted")
        await self._forget(document)
        _logger.info("Document %r of %s is deleted", name, shown_tenant(tenant))

    @asynccontextmanager
    async def named(self, tenant: str, name: str) -> AsyncIterator[SharedDocument]:
        """A document for as long as a request stands on it: it is not dropped meanwhile."""
        document = await self._found(tenant, name)
        self.catalogue.begin(document)
        try:
            yield document
        finally:
            if self.catalogue.end(document):
                await asyncio.shield(self._drop(document))

    async def _found(self, tenant: str, name: str) -> SharedDocument:
        """What a tenant calls so, or else the library, of which it is loaded where it is not."""
        if self._library is None or self.catalogue.get(tenant, name) is not None:
            return self.catalogue.find(tenant, name)
        source = await self._in_library(name)
        if (held := self.catalogue.get(LIBRARY, name)) is not None and held.source == source:
            return held
        async with self._one_at_a_time:
            if (held := self.catalogue.get(LIBRARY, name)) is not None and held.source == source:
                return held  # another request has loaded it
            if held is not None:  # it is gone, or was replaced
                await self._forget(held)
            if source is None:
                return self.catalogue.find(tenant, name)
            return await self._loaded(self._library, name, source)

    async def _in_library(self, name: str) -> Record | None:
        return None if self._library is None else await asyncio.to_thread(self._library.find, name)

    async def _loaded(self, library: ServedLibrary, name: str, source: Record) -> SharedDocument:
        model = await self._engine.identity()
        await asyncio.to_thread(library.require_read_by, model, self._prompts.tokenizer)
        file = library.cache_file(source), source.seal
        prefix = await self._engine.look_at(*file)
        await self._prompts.tokenize(list(prefix.token_ids), special_tokens=False)  # checks them
        return await self._held(
            LIBRARY,
            name,
            prefix,
            lambda document_id: self._engine.adopt(document_id, prefix, *file),
            rendered_ids=library.prefix_ids,
            source=source,
        )

    async def listed(self, tenant: str) -> list[dict[str, Any]]:
        """What a tenant may name, ready for JSON, the library's documents after its own.

        One of these that is not loaded has no `kept_tokens`, and takes no `bytes`.
        """
        own = [one.described for one in self.catalogue.all_of(tenant)]
        if self._library is None:
            return own
        held = {one.name: one.described for one in self.catalogue.all_of(LIBRARY)}
        records = await asyncio.to_thread(self._library.records)
        of_library = [
            {"name": one.name, "kind": "library", "tokens": one.tokens, "kept_tokens": 0}
            | {"bytes": 0, "requests": 0}
            | held.get(one.name, {})
            for one in records
        ]
        return own + of_library

    # How documents come.

    async def _register(self, tenant: str, body: Mapping[str, Any]) -> SharedDocument:
        name, messages = body["name"], body.get("messages")
        async with self._own_turn[tenant], self._one_at_a_time:  # each tenant waits with one alone
            self.catalogue.require_free(tenant, name)
            if await self._in_library(name) is not None:
                got, remedy = f"'{shown(name)}', which the library has", "choose another one"
                raise wrong("name", "one that is free", got, remedy, status=TAKEN)
            if messages is None:
                rendered = ids = await self._prompts.ids_of_text(body.get("prompt"))
            else:
                rendered, ids = await self._prompts.ids_of_messages(messages)
            instruction = await self._prompts.tokenize(INSTRUCTION, special_tokens=False)
            prefix = await self._engine.planned(
                ids, body.get("budget"), instruction_tokens=len(instruction)
            )
            return await self._held(
                tenant,
                name,
                prefix,
                lambda document_id: self._engine.register(document_id, prefix, instruction),
                messages=messages,
                rendered_ids=rendered,
            )

    async def _held(
        self,
        tenant: str,
        name: str,
        prefix: CachedPrefix,
        hold: Callable[[str], Awaitable[None]],
        **told: Any,
    ) -> SharedDocument:
        """A document that the engine holds, under its name, from now on."""
        room = await self._engine.room()
        needed = room.bytes_of(prefix.kept_tokens)
        for one in self.catalogue.make_room(tenant, needed, room.most_bytes):
            whose, needs = shown_tenant(one.tenant), shown_tenant(tenant)
            _logger.info("Document %r of %s is dropped: %s needs room", one.name, whose, needs)
            self._counts.count("documents_dropped", reason="least_used")
            await self._drop(one)
        document_id = uuid.uuid4().hex
        await hold(document_id)
        document = SharedDocument(
            document_id=document_id, tenant=tenant, name=name, prefix=prefix, bytes=needed, **told
        )
        self.catalogue.add(document)
        _logger.info(
            "Document %r of %s is registered: %s of %s tokens kept, %s",
            name,
            shown_tenant(tenant),
            f"{prefix.kept_tokens:,}",
            f"{len(prefix.token_ids):,}",
            format_bytes(needed),
        )
        self._count()
        return document

    # How they go.

    async def _forget(self, document: SharedDocument) -> None:
        """Take its name away, and its blocks once its requests have ended."""
        if self.catalogue.delete(document):
            await self._drop(document)
        self._count()

    async def _drop(self, document: SharedDocument) -> None:
        await self._engine.drop(document.document_id)
        self._count()

    def _count(self) -> None:
        self._counts.set("documents", len(self.catalogue))
        self._counts.set("document_bytes", self.catalogue.bytes)


def _require_fields(body: Mapping[str, Any]) -> None:
    """Refuse a body that does not say what to register, and under which name."""
    for field in body:
        if field not in _FIELDS:
            got = f"'{shown(field)}'"
            raise wrong(shown(field), ", ".join(_FIELDS), got, "leave it out")
    require_document_name("name", body.get("name"))
    given = {field for field in _FIELDS if body.get(field) is not None}
    if len(given & {"prompt", "messages"}) != 1:
        got = "both" if "prompt" in given else "neither"
        remedy = "pass a prompt for /v1/completions, messages for /v1/chat/completions"
        raise wrong("prompt and messages", "one of them", got, remedy)
    if "budget" in given:
        require_int("budget", body["budget"], minimum=1)
