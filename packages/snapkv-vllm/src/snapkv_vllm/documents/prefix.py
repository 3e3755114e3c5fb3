"""A document as an engine holds it: the prefix of prompts, in blocks of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True)
class CachedPrefix:
    """A text that the engine's model has read, and how much of it lies in blocks.

    The front end says it to the scheduler; the document under a name, the one in blocks, and the
    plan of requests that begin with it all contain it.

    Attributes:
        token_ids: what has been read, and what prompts begin with.
        kept_tokens: that are counted as held, per KV head and layer.
        reused_tokens: of those, in blocks that are full in every layer. Requests read them where
            they are, and copy the others.
        per_head_budget: whether heads or layers hold different numbers of tokens.
    """

    token_ids: tuple[int, ...]
    kept_tokens: int
    reused_tokens: int
    per_head_budget: bool = False

    @property
    def dropped_tokens(self) -> int:
        return len(self.token_ids) - self.kept_tokens

    @classmethod
    def laid_out(
        cls, token_ids: Sequence[int], head_tokens: Sequence[Sequence[int]], block_tokens: int
    ) -> Self:
        """As it lies where the heads of every layer hold so many tokens.

        Heads of different length fill pages, of which a block is as many as there are heads: first
        their full ones, and after those the others, see `snapkv_vllm.heads.HeadPlaces`.
        """
        numbers = {tokens for of_layer in head_tokens for tokens in of_layer}
        heads = len(head_tokens[0])
        full = [sum(tokens // block_tokens for tokens in of_layer) for of_layer in head_tokens]
        rest = max(tokens % block_tokens for tokens in numbers)
        return cls(
            token_ids=tuple(token_ids),
            kept_tokens=-(-max(full) // heads) * block_tokens + rest,
            reused_tokens=min(full) // heads * block_tokens,
            per_head_budget=len(numbers) > 1,
        )
