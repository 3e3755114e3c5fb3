"""The documents of a server: registered, named by requests, deleted."""

import asyncio
import logging
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from snapkv.errors import CacheFileError, SnapKVError, UnsupportedModelError
from snapkv.policies.kvzip import INSTRUCTION
from snapkv.validation import format_bytes, require_int
from snapkv_vllm.documents.catalogue import Catalogue, SharedDocument
from snapkv_vllm.documents.engine import EngineDocuments, Kept, Saved
from snapkv_vllm.documents.folder import DocumentFolder, Noted
from snapkv_vllm.documents.refused import BUSY, UNKNOWN, RefusedError
from snapkv_vllm.documents.reporting import report
from snapkv_vllm.documents.rewriting import (
    Prompts,
    ids_of_messages,
    ids_of_text,
    require_base_model,
)
from snapkv_vllm.documents.tenants import shown_tenant
from snapkv_vllm.names import require_document_name, shown

_FIELDS = ("name", "prompt", "messages", "budget", "file", "model")

_MOST_UNDER_WAY = 64
"""Registrations of a tenant; bodies are held until their turn comes, also if clients go away."""

_logger = logging.getLogger("vllm.snapkv")


class Counts(Protocol):
    """What is counted of documents, see `snapkv_vllm.metrics.DocumentMetrics`."""

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
        folder: where documents are kept beyond the server's end; None keeps none.
    """

    def __init__(
        self,
        engine: EngineDocuments,
        prompts: Prompts,
        counts: Counts,
        folder: DocumentFolder | None = None,
    ) -> None:
        self.prompts = prompts
        self.catalogue = Catalogue()
        self._engine = engine
        self._counts = counts
        self._folder = folder
        self._restoring: asyncio.Task[None] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._own_turn: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._reporting = asyncio.Lock()
        self._registrations: dict[asyncio.Task[SharedDocument], str] = {}
        self._count()

    async def register(self, tenant: str, body: Mapping[str, Any]) -> SharedDocument:
        """Read a document and put it under its name; done whole even if the client goes away.

        Args:
            tenant: whose it is.
            body: of the request: `name`, `prompt` or `messages`, and a `budget` where the server's
                is not meant; or `name`, `file`, and `messages` where the file is that of a chat;
                `model`, as elsewhere.

        Raises:
            RefusedError: a field that is wrong, a name that stands, no room, too many at once, or
                vLLM's own words.
            SnapKVError: the engine refuses the document.
        """
        _require_fields(body)
        require_base_model(body, self.prompts)
        if list(self._registrations.values()).count(tenant) >= _MOST_UNDER_WAY:
            raise RefusedError(
                f"document: expected fewer than {_MOST_UNDER_WAY} registrations of one key under "
                "way, which are done one after the other, got one more; try again later",
                BUSY,
            )
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
        """Forget a document by its name; the engine does once its requests have ended.

        Raises:
            RefusedError: the tenant has none of that name.
        """
        await self.restored()
        if self._folder is not None and self._folder.holds(tenant, name):
            self._folder.forget(tenant, name)
            if not self.catalogue.stands(tenant, name):  # there was no room for it
                _logger.info("Document %r of %s is deleted", name, shown_tenant(tenant))
                return
        gone = self.catalogue.delete(tenant, name)
        _logger.info("Document %r of %s is deleted", name, shown_tenant(tenant))
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
        await self.restored()
        document = self.catalogue.find(tenant, name)
        self.catalogue.begin(document)
        try:
            yield document
        finally:
            if self.catalogue.end(document):
                await asyncio.shield(self._drop(document))

    async def report(self, tenant: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answers from a document beside those from its whole text, see `reporting.report`.

        Raises:
            RefusedError: the tenant has none of that name, a field is wrong, or another report is
                being made.
            SnapKVError: the engine does not answer.
        """
        if self._reporting.locked():
            raise RefusedError(
                "document: expected one report at a time, got one while another is being made; try "
                "again later",
                BUSY,
            )
        async with self._reporting, self.named(tenant, name) as document:
            return await report(document, body, self._engine, self.prompts)

    def answered(self, document: SharedDocument, prompts: int) -> None:
        """Count a request whose prompts began with a document."""
        self._counts.asked(prompts * len(document.token_ids))

    async def restored(self) -> None:
        """Wait until the documents in the folder stand again; every request for any does that."""
        if self._folder is not None:
            if self._restoring is None:
                self._restoring = asyncio.create_task(self._restore(self._folder))
            await asyncio.shield(self._restoring)

    def file(self, tenant: str, name: str) -> Path:
        """The file of a document.

        Raises:
            RefusedError: the tenant has none of that name in the folder.
        """
        if self._folder is None or not self._folder.holds(tenant, name):
            raise RefusedError(
                f"document: expected one of this key's that is in --share-folder, got "
                f"'{shown(name)}', which is not; register it with such a server",
                UNKNOWN,
            )
        return self._folder.place(tenant, name)

    async def _register(self, tenant: str, body: Mapping[str, Any]) -> SharedDocument:
        await self.restored()
        async with self._own_turn[tenant], self._one_at_a_time:  # each tenant waits with one alone
            self.catalogue.require_free(tenant, body["name"])
            if body.get("file") is None:
                return await self._read(tenant, body)
            return await self._take_over(tenant, body)

    async def _read(self, tenant: str, body: Mapping[str, Any]) -> SharedDocument:
        messages, budget = body.get("messages"), body.get("budget")
        if messages is None:
            token_ids = await ids_of_text(body.get("prompt"), self.prompts)
        else:
            token_ids = await ids_of_messages(messages, self.prompts)
        instruction = await self.prompts.tokenize(INSTRUCTION, special_tokens=False)
        needed = await self._engine.bytes_of(
            len(token_ids), budget=budget, instruction_tokens=len(instruction)
        )
        await self._make_room(tenant, needed)
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
        if self._folder is not None:
            await self._keep(document, kept, self._folder)
        return self._stand(document)

    async def _keep(self, document: SharedDocument, kept: Kept, folder: DocumentFolder) -> None:
        """Write a document that was read into the folder; where that fails, it is dropped."""
        tenant, name = document.tenant, document.name
        try:
            folder.forget(tenant, name)
            await self._engine.save(kept, document.token_ids, folder.place(tenant, name))
            folder.note(document)
        except BaseException:
            await self._undo(document, folder)
            raise

    async def _undo(self, document: SharedDocument, folder: DocumentFolder) -> None:
        with suppress(SnapKVError):  # the first error is told
            folder.forget(document.tenant, document.name)
        await self._engine.drop(document.document_id)

    async def _take_over(self, tenant: str, body: Mapping[str, Any]) -> SharedDocument:
        """Stand on a file that a user has put into the folder, and copy it."""
        if self._folder is None:
            raise RefusedError(
                "file: expected none on a server that keeps no files, got one; start it with "
                "--share-folder, and put the file there"
            )
        name, messages = body["name"], body.get("messages")
        saved = await self._engine.look_at(self._folder.given(body["file"]))
        document = await self._adopted(tenant, name, messages, saved)
        try:
            self._folder.forget(tenant, name)
            await asyncio.to_thread(self._folder.copy, saved.path, tenant, name)
            self._folder.note(document)
        except BaseException:
            await self._undo(document, self._folder)
            raise
        return self._stand(document)

    async def _restore(self, folder: DocumentFolder) -> None:
        async with self._one_at_a_time:
            for noted in await asyncio.to_thread(lambda: list(folder.noted())):
                try:
                    self._stand(await self._again(noted, folder))
                except SnapKVError as error:
                    what = "" if isinstance(noted, CacheFileError) else f"{noted.name!r} "
                    _logger.warning("Document %sis left in the folder: %s", what, error)
                    if isinstance(error, UnsupportedModelError):
                        return

    async def _again(self, noted: Noted | CacheFileError, folder: DocumentFolder) -> SharedDocument:
        """A document of the folder, which the engine holds again."""
        if isinstance(noted, CacheFileError):
            raise noted
        saved = await self._engine.look_at(folder.place(noted.tenant, noted.name))
        if saved.seal != noted.seal:
            raise CacheFileError(
                f"document: expected the file that was noted, got another one at "
                f"{str(saved.path)!r}; delete the document, and register it again"
            )
        document = await self._adopted(noted.tenant, noted.name, noted.messages, saved)
        document.created = document.last_used = noted.created
        return document

    async def _adopted(
        self, tenant: str, name: str, messages: list[dict[str, Any]] | None, saved: Saved
    ) -> SharedDocument:
        """A document out of a file, which the engine holds from now on."""
        await self._require_own_tokens(messages, saved.token_ids)
        room = await self._engine.room()
        await self._make_room(tenant, saved.kept_tokens * room.bytes_per_token)
        document_id = uuid.uuid4().hex
        kept = await self._engine.adopt(document_id, saved)
        return SharedDocument(
            document_id=document_id,
            tenant=tenant,
            name=name,
            token_ids=saved.token_ids,
            messages=None if messages is None else tuple(messages),
            kept_tokens=kept.kept_tokens,
            bytes=kept.bytes,
        )

    async def _require_own_tokens(
        self, messages: list[dict[str, Any]] | None, token_ids: tuple[int, ...]
    ) -> None:
        """Raise unless a file's tokens are such as this server makes, of the messages if any."""
        if messages is None:
            made = await ids_of_text(list(token_ids), self.prompts)
        else:
            made = await ids_of_messages(messages, self.prompts)
        if made != token_ids:
            raise RefusedError(
                f"messages: expected those which this server's chat template makes the file's "
                f"{len(token_ids):,} tokens of, got ones that it makes {len(made):,} of; pass "
                "those that the file was made of, or register the text"
            )

    def _stand(self, document: SharedDocument) -> SharedDocument:
        self.catalogue.add(document)
        _logger.info(
            "Document %r of %s is registered: %s of %s tokens kept, %s",
            document.name,
            shown_tenant(document.tenant),
            f"{document.kept_tokens:,}",
            f"{len(document.token_ids):,}",
            format_bytes(document.bytes),
        )
        self._count()
        return document

    async def _make_room(self, tenant: str, needed_bytes: int) -> None:
        room = await self._engine.room()
        for one in self.catalogue.make_room(tenant, needed_bytes, room.most_bytes):
            _logger.info(
                "Document %r of %s is dropped: %s needs room",
                one.name,
                shown_tenant(one.tenant),
                shown_tenant(tenant),
            )
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
    if body.get("file") is not None:
        for field in ("prompt", "budget"):
            if body.get(field) is not None:
                raise RefusedError(
                    f"{field}: expected none beside file, which says what is kept of which tokens, "
                    "got one; leave it out"
                )
        return
    if (body.get("prompt") is None) == (body.get("messages") is None):
        raise RefusedError(
            "prompt and messages: expected one of them, got "
            f"{'neither' if body.get('prompt') is None else 'both'}; pass a prompt for "
            "/v1/completions, messages for /v1/chat/completions"
        )
    if body.get("budget") is not None:
        require_int("budget", body["budget"], minimum=1)
