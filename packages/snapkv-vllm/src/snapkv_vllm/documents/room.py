"""What documents may take of an engine's cache; no vLLM is needed here."""

from dataclasses import dataclass

from snapkv.errors import InvalidArgumentError

_BESIDE_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Room:
    """The engine says so to whoever asks.

    Attributes:
        block_tokens: what is kept of a document is rounded up to a multiple of it.
        bytes_per_token: in all layers.
        most_tokens: of all documents together.
        budget: kept of a document that says nothing else.
    """

    block_tokens: int
    bytes_per_token: int
    most_tokens: int
    budget: int

    @property
    def most_bytes(self) -> int:
        """Of all documents together."""
        return self.most_tokens * self.bytes_per_token

    @property
    def most_file_bytes(self) -> int:
        """Of one document as a file, with the positions and the token ids that stand beside it."""
        return 2 * self.most_bytes + _BESIDE_BYTES

    def kept_tokens(self, tokens: int, budget: int | None) -> int:
        """How many tokens are held of a document of so many.

        Raises:
            InvalidArgumentError: a document shorter than a block.
        """
        size = self.block_tokens
        if tokens < size:
            raise InvalidArgumentError(
                f"document: expected at least the {size} tokens of a block, got {tokens}; ask "
                "about it without registering it"
            )
        kept = -(-(self.budget if budget is None else budget) // size) * size
        return min(kept, tokens // size * size)

    def bytes_of(self, tokens: int, budget: int | None) -> int:
        """What they take; arguments and errors as for `kept_tokens`."""
        return self.kept_tokens(tokens, budget) * self.bytes_per_token
