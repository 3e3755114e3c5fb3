"""How many bytes the kept tokens of a layer take, and how many tokens fit into a budget in bytes.

This module can be imported without torch, so that plans and caches share its arithmetic.
"""

from dataclasses import dataclass
from fractions import Fraction

from snapkv.errors import BudgetTooSmallError, wrong


@dataclass(frozen=True, kw_only=True)
class TokenCost:
    """The number of bytes that a token takes in one layer and row, for all heads together.

    Attributes:
        full_bytes: bytes of a token in the full cache.
        block_bytes: bytes of a block of codes, whether it is full or not; without codes a block is
            one token.
        block_tokens: how many tokens a block holds.
        uneven: whether heads or layers keep different numbers of tokens around a mean; then each
            may fill its last block in part.
    """

    full_bytes: int
    block_bytes: int
    block_tokens: int = 1
    uneven: bool = False

    @property
    def spare_tokens(self) -> int:
        """The largest number of slots that may stay empty in the last block of a head.

        It is 0 if all heads keep the same number of tokens, because that number can fill the block.
        """
        return self.block_tokens - 1 if self.uneven else 0

    def held_bytes(self, tokens: int) -> int:
        """Return how many bytes `tokens` kept tokens take at most, in whole blocks.

        If `uneven` is True, `tokens` is the mean over the heads, and every head may have a partly
        filled block.
        """
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
        """Count the tokens of a row that fit into one layer's part of a budget in bytes.

        The caller must pass exactly one of `share` and `given`. All layers together never get more
        than the budget, except where `share` is too small for `least`.

        Args:
            share: the budget as a fraction of the bytes that the full cache takes in all layers
                together; None if `given` is passed.
            given: the budget in bytes for all layers together; None if `share` is passed.
            own: how many tokens the row's prompt has. The result may be larger.
            least: how many tokens must be kept; `share` never gives fewer.
            depth: the index of the layer among those that are compressed, from 0. Lower layers get
                the blocks that cannot be divided evenly.
            layers: how many layers are compressed.

        Returns:
            The number of tokens per head, as a mean if heads keep different numbers.

        Raises:
            BudgetTooSmallError: an even part of `given` holds fewer tokens than `least`.
        """
        total = share_of(self.full_bytes * own * layers, share) if share is not None else given
        assert total is not None
        blocks = total // self.block_bytes
        if blocks // layers * self.block_tokens - self.spare_tokens < least:
            if share is None:
                needed = f"expected at least {layers * self.held_bytes(least):,} bytes"
                problem = f"{needed} for {least} tokens of window and sinks, but got {given:,}"
                remedy = "Increase the budget, or reduce window_size or sink_tokens"
                raise wrong("budget", problem, remedy, BudgetTooSmallError)
            # A block costs the same whether it is full or not.
            return max(least, least + -least % self.block_tokens - self.spare_tokens)
        more = -blocks * depth // layers - -blocks * (depth + 1) // layers
        return more * self.block_tokens - self.spare_tokens


def share_of(tokens: int, share: float) -> int:
    """Return the fraction `share` of a whole number, rounded down.

    The fraction is taken as it is written in decimals, so 0.29 of 100 is exactly 29.
    """
    return int(Fraction(str(share)) * tokens)
