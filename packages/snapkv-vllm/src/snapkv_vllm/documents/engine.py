"""What the front end asks of the engine, which holds the documents' blocks."""

import asyncio
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snapkv.library.stored import model_identity, read_document
from snapkv.policies import AdaKV
from snapkv.validation import first_line
from snapkv_vllm.documents import protocol
from snapkv_vllm.documents.plans import piece_tokens
from snapkv_vllm.documents.prefix import CachedPrefix
from snapkv_vllm.documents.protocol import DocumentLimits
from snapkv_vllm.names import ASKED, NO_ROOM, RefusedError, wrong
from snapkv_vllm.settings import ServingSettings

_TRIES = 3
"""A document is read again where it lost its blocks to other requests at its very end."""

_BEHIND = 2
"""Tokens that find positions after a document: one that asks, and one that answers."""


class ServerEngine:
    """Reads documents and keeps their blocks, for requests that bring a document's id."""

    def __init__(self, engine_client: Any, settings: ServingSettings) -> None:
        self._client, self._method = engine_client, settings.policy
        self._chunk_tokens = settings.sharing.chunk_tokens if settings.sharing else 0
        self._room: DocumentLimits | None = None
        self._model: dict[str, Any] | None = None

    async def room(self) -> DocumentLimits:
        """What documents may take; asked once."""
        if self._room is None:
            self._room = DocumentLimits(**await self._ask("room"))
        return self._room

    async def planned(
        self, token_ids: Sequence[int], budget: int | None, *, instruction_tokens: int
    ) -> CachedPrefix:
        """What will be held of a document; one that cannot be read twice is refused."""
        room, positions = await self.room(), self._client.model_config.max_model_len
        tokens = len(token_ids)
        if tokens > positions - _BEHIND:
            room_to_ask = "with room to ask and answer after them"
            most, remedy = positions - _BEHIND, "shorten it, or raise --max-model-len"
            raise wrong(
                "document", f"at most {most:,} tokens, {room_to_ask}", f"{tokens:,}", remedy
            )
        kept = room.kept_tokens(tokens, budget)
        if kept < tokens // room.block_tokens * room.block_tokens:
            piece_tokens(tokens, instruction_tokens, self._chunk_tokens, positions - tokens)
        return CachedPrefix(token_ids=tuple(token_ids), kept_tokens=kept, reused_tokens=kept)

    async def register(
        self, document_id: str, prefix: CachedPrefix, instruction_ids: Sequence[int]
    ) -> None:
        """Read a document and keep its blocks until it is dropped."""
        ids = prefix.token_ids
        own = {
            protocol.REGISTER: document_id,
            protocol.INSTRUCTION: list(instruction_ids),
            protocol.BUDGET: prefix.kept_tokens,
        }
        for _ in range(_TRIES):
            await self._read([*ids, ids[-1]], own)
            if await self._ask("holds", document_id):
                return
        blocks = f"blocks for its {len(ids):,} tokens while it is read"
        got, remedy = "none that other requests left", "try again when there are fewer"
        raise wrong("document", blocks, got, remedy, status=NO_ROOM)

    async def drop(self, document_id: str) -> None:
        await self._ask("drop", document_id)

    async def look_at(self, path: Path, seal: str) -> CachedPrefix:
        """Read and check the file of a document; with the first, the model is asked who it is."""
        model, room = await self.identity(), await self.room()
        found = await asyncio.to_thread(
            read_document, path, model=model, seal=seal, most_bytes=room.most_file_bytes
        )
        tokens, head_tokens = len(found.token_ids), found.head_tokens
        if tokens >= (longest := self._client.model_config.max_model_len):
            raise wrong("file", f"fewer than {longest:,} tokens", tokens, "raise --max-model-len")
        ids = found.token_ids.tolist()
        prefix = CachedPrefix.laid_out(ids, head_tokens.tolist(), room.block_tokens)
        if prefix.per_head_budget and self._method != AdaKV.name:
            alike = "as many kept tokens in every layer and head"
            got = f"from {int(head_tokens.min()):,} to {int(head_tokens.max()):,}"
            raise wrong("file", alike, got, "start the server with --policy adakv")
        return prefix

    async def adopt(self, document_id: str, prefix: CachedPrefix, path: Path, seal: str) -> None:
        """Hold the document of a file until it is dropped, without reading its text."""
        model, room = await self.identity(), await self.room()
        try:
            taken = await self._ask("adopt", document_id, vars(prefix))
            if taken is None:
                blocks = f"free blocks for {prefix.kept_tokens:,} tokens"
                remedy = "try again when there are fewer requests"
                raise wrong("document", blocks, "fewer", remedy, status=NO_ROOM)
            await self._fill((str(path), taken, model, seal, room.most_file_bytes))
        except BaseException:
            await asyncio.shield(self.drop(document_id))
            raise

    async def identity(self) -> dict[str, Any]:
        """Who the model is; the first to ask waits until it has been loaded once more."""
        if self._model is None:
            config = self._client.model_config
            self._model = await asyncio.to_thread(
                model_identity,
                config.model,
                str(config.dtype).removeprefix("torch."),
                trust_remote_code=config.trust_remote_code,
            )
        return self._model

    async def _fill(self, given: tuple[Any, ...]) -> None:
        """Have all workers fill blocks from a file."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            answers = await self._client.collective_rpc("snapkv_fill_document", args=given)
        except EngineDeadError:
            raise
        except Exception as error:  # of no narrower kind in vLLM
            load, log = "the engine to load it", "see the server's log"
            raise wrong("document", load, first_line(error), log, status=500) from error
        for refused in filter(None, answers):
            raise RefusedError(refused)

    async def _ask(self, method: str, *given: Any) -> Any:
        """What the `Registry` of the engine answers, between two steps."""
        return await self._client.engine_core.call_utility_async(ASKED, "_documents", method, given)

    async def _read(self, prompt: list[int], own: dict[str, Any]) -> None:
        """Send a request of one new token, with these `extra_args`, and wait until it has ended."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, extra_args=own, max_tokens=1, ignore_eos=True, detokenize=False
        )
        name = f"snapkv-document-{uuid.uuid4().hex}"
        async for _ in self._client.generate({"prompt_token_ids": prompt}, sampling, name):
            pass
