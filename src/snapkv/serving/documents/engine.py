"""What the front end asks of the engine, which holds the documents' blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from snapkv.errors import UnsupportedModelError
from snapkv.serving.settings import ServingSettings


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a document takes.

    Attributes:
        kept_tokens: per KV head and layer.
        bytes: of the engine's cache, the same that `EngineDocuments.bytes_of` had said.
    """

    kept_tokens: int
    bytes: int


class EngineDocuments(Protocol):
    """Reads documents and keeps their blocks, for requests that bring a document's id."""

    @property
    def most_bytes(self) -> int:
        """What all documents may take together."""

    def bytes_of(self, tokens: int, budget: int | None) -> int:
        """What a document of so many tokens will take; `budget` as for `register`."""

    async def register(
        self, document_id: str, token_ids: Sequence[int], *, budget: int | None
    ) -> Kept:
        """Read a document and keep its blocks until it is dropped.

        Args:
            document_id: a random one; requests bring it as `snapkv_document`.
            token_ids: of the document, what prompts of such requests begin with.
            budget: tokens kept per KV head and layer; None for the server's.

        Raises:
            OutOfMemoryError: the engine has no blocks for it.
            PromptTooLongError: the model has no positions left to read it twice.
            InvalidArgumentError: a budget that is none.
        """

    async def drop(self, document_id: str) -> None:
        """Give a document's blocks back, once no request stands on them."""


def engine_documents(engine_client: Any, settings: ServingSettings) -> EngineDocuments:
    """The documents of a server's engine.

    Args:
        engine_client: vLLM's, in the front end.
        settings: the server's, which share documents.

    Raises:
        UnsupportedModelError: the engine keeps none.
    """
    raise UnsupportedModelError(
        "share: expected an engine that keeps documents, got one that does not; leave --share out"
    )
