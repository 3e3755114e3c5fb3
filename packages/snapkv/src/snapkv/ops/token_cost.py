"""What the tokens that a layer keeps of a prompt cost in bytes."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TokenCost:
    """Bytes of one layer and row, all heads together, each of which keeps as many tokens.

    Attributes:
        full_bytes: of a token in the full cache.
        block_bytes: of a block of codes, filled or not; without codes that is one token.
        block_tokens: how many tokens a block holds.
        uneven: whether heads, or layers, keep other numbers of tokens and as many on average; then
            each may fill its last block in part.
    """

    full_bytes: int
    block_bytes: int
    block_tokens: int = 1
    uneven: bool = False

    @property
    def spare_tokens(self) -> int:
        """Of each head, by how many more than its own its blocks may have room for, at most."""
        return self.block_tokens - 1 if self.uneven else 0

    def held_bytes(self, tokens: int) -> int:
        """Of so many kept tokens."""
        return -(-(tokens + self.spare_tokens) // self.block_tokens) * self.block_bytes
