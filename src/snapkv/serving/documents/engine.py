"""What the front end asks of the engine, which holds the documents' blocks."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from snapkv.errors import InvalidArgumentError, OutOfMemoryError
from snapkv.serving.documents.reading_twice import piece_tokens
from snapkv.serving.documents.room import Room
from snapkv.serving.documents.words import BUDGET, DROP, INSTRUCTION, REGISTER, ROOM
from snapkv.serving.settings import ServingSettings

_TRIES = 3
"""A document is read again where it lost its blocks to other requests at its very end."""

_BEHIND = 2
"""Tokens that find positions behind a document: one that asks, and one that answers."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a document takes.

    Attributes:
        kept_tokens: per KV head and layer.
        bytes: of the engine's cache, the same that `Room.bytes_of` had said.
    """

    kept_tokens: int
    bytes: int


class EngineDocuments(Protocol):
    """Reads documents and keeps their blocks, for requests that bring a document's id."""

    async def room(self) -> Room:
        """What documents may take."""

    async def bytes_of(self, tokens: int, *, budget: int | None, instruction_tokens: int) -> int:
        """What a document of so many tokens will take; arguments otherwise as for `register`.

        Raises:
            InvalidArgumentError: a document that is too short, or too long to be read twice.
        """

    async def register(
        self,
        document_id: str,
        token_ids: Sequence[int],
        *,
        budget: int | None,
        instruction_ids: Sequence[int],
    ) -> Kept:
        """Read a document and keep its blocks until it is dropped.

        Args:
            document_id: a random one; requests bring it as `snapkv_document`.
            token_ids: of the document, what prompts of such requests begin with.
            budget: tokens kept per KV head and layer; None for the server's.
            instruction_ids: what stands before every piece that is read again.

        Raises:
            OutOfMemoryError: the engine has no blocks for it.
            InvalidArgumentError: see `bytes_of`.
        """

    async def drop(self, document_id: str) -> None:
        """Give a document's blocks back, once no request stands on them."""


class ServerEngine:
    """Sends vLLM's engine requests that do so, see `snapkv.serving.documents.words`.

    Args:
        engine_client: vLLM's, in the front end.
        settings: the server's, which share documents.
    """

    def __init__(self, engine_client: Any, settings: ServingSettings) -> None:
        self._client = engine_client
        self._chunk_tokens = settings.sharing.chunk_tokens if settings.sharing else 0
        self._room: Room | None = None

    async def room(self) -> Room:
        """See `EngineDocuments`; asked once."""
        if self._room is None:
            said = await self._send([0], {ROOM: "all"})
            if said is None:
                raise OutOfMemoryError(
                    "document: expected an engine that says how much room there is, got none; "
                    "try again"
                )
            self._room = Room(**said)
        return self._room

    async def bytes_of(self, tokens: int, *, budget: int | None, instruction_tokens: int) -> int:
        """See `EngineDocuments`."""
        room, positions = await self.room(), self._client.model_config.max_model_len
        if tokens > positions - _BEHIND:
            raise InvalidArgumentError(
                f"document: expected at most {positions - _BEHIND:,} tokens, with room to ask and "
                f"answer behind them, got {tokens:,}; shorten it, or raise --max-model-len"
            )
        if room.kept_tokens(tokens, budget) < tokens // room.block_tokens * room.block_tokens:
            piece_tokens(tokens, instruction_tokens, self._chunk_tokens, positions - tokens)
        return room.bytes_of(tokens, budget)

    async def register(
        self,
        document_id: str,
        token_ids: Sequence[int],
        *,
        budget: int | None,
        instruction_ids: Sequence[int],
    ) -> Kept:
        """See `EngineDocuments`."""
        room, tokens = await self.room(), len(token_ids)
        await self.bytes_of(tokens, budget=budget, instruction_tokens=len(instruction_ids))
        own: dict[str, Any] = {REGISTER: document_id, INSTRUCTION: list(instruction_ids)}
        own |= {} if budget is None else {BUDGET: budget}
        for _ in range(_TRIES):
            said = await self._send([*token_ids, token_ids[-1]], own)
            if said is not None:
                kept: int = said["kept_tokens"]
                return Kept(kept_tokens=kept, bytes=kept * room.bytes_per_token)
        raise OutOfMemoryError(
            f"document: expected blocks for its {tokens:,} tokens while it is read, got none that "
            "other requests left; try again when there are fewer"
        )

    async def drop(self, document_id: str) -> None:
        """See `EngineDocuments`."""
        await self._send([0], {DROP: document_id})

    async def _send(self, prompt: list[int], own: dict[str, Any]) -> dict[str, Any] | None:
        """What the engine says when a request of one new token has ended."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False, extra_args=own
        )
        name = f"snapkv-document-{uuid.uuid4().hex}"
        said: dict[str, Any] | None = None
        async for output in self._client.generate({"prompt_token_ids": prompt}, sampling, name):
            said = output.kv_transfer_params
        return said
