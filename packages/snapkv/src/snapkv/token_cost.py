"""What the tokens that a layer keeps of a prompt cost in bytes, and how many fit into a budget.

Importable without torch, so that plans and caches share this arithmetic.
"""

from dataclasses import dataclass
from fractions import Fraction

from snapkv.errors import BudgetTooSmallError


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

    def fitting_tokens(
        self,
        share: float | None,
        given: int | None,
        *,
        own: int,
        least: int,
        depth: int,
        layers: int,
    ) -> int:
        """Count the tokens of a row that fit into one layer's part of a budget of bytes.

        Args:
            share: of the bytes of the full cache in all layers together; None with `given`.
            given: bytes in all layers together; None with `share`.
            own: tokens of the row's prompt; more than these may fit.
            least: tokens that must stay, whatever the share.
            depth: of the layer among those that are compressed, from 0.
            layers: how many are compressed.

        Raises:
            BudgetTooSmallError: `given` holds fewer tokens than `least`.
        """
        whole = share_of(self.full_bytes * own * layers, share) if share is not None else given
        assert whole is not None
        blocks = whole // self.block_bytes
        if blocks // layers * self.block_tokens - self.spare_tokens < least:
            if share is None:
                raise BudgetTooSmallError(
                    f"budget: expected at least {layers * self.held_bytes(least):,} bytes for "
                    f"{least} of {own:,} prompt tokens, which are the window and the sinks, got "
                    f"{given:,} bytes; raise it, lower those, or pass a share or a number of tokens"
                )
            return least
        more = -blocks * depth // layers - -blocks * (depth + 1) // layers
        return more * self.block_tokens - self.spare_tokens


def share_of(tokens: int, share: float) -> int:
    """A share of tokens or bytes, rounded down as it is written: 0.29 of 100 are 29."""
    return int(Fraction(str(share)) * tokens)
