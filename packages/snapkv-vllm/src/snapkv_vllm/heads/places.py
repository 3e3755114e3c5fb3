"""Which page of a request holds which tokens of which head; no vLLM is needed here.

A place is a page of a request's blocks: place ``n`` is the page of head ``n % H`` in block
``n // H``. Heads take the places in order: at the prompt's end one head behind the other, then
whichever head needs one first. All heads grow by the same tokens, so every page of tokens each of
them needs one place more, always in the same turn, and nothing has to be remembered but how much
every head kept.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor


def held_tokens(kept_tokens: int, prompt_tokens: int, block_tokens: int) -> int:
    """Tokens to count for a prompt whose heads keep so many on average, so that all find places.

    The last page of a head may hold a single token, so `block_tokens` - 1 more are counted; but no
    head keeps more than the prompt, whose blocks are always enough.

    Args:
        kept_tokens: mean over the heads of a layer, the same in all layers.
        prompt_tokens: length of the prompt.
        block_tokens: tokens in a block.
    """
    return min(kept_tokens + block_tokens - 1, prompt_tokens)


@dataclass(frozen=True)
class HeadPlaces:
    """The places of heads that kept different numbers of tokens.

    Args:
        kept: (..., H) int64, tokens that every head of a layer kept at the prompt's end.
        page_tokens: tokens in a page.
    """

    kept: Tensor
    page_tokens: int

    def of_pages(self, pages: Tensor) -> Tensor:
        """The places of some pages of every head.

        Args:
            pages: (..., H or 1, N) int64, which pages of a head, counted from its first token.

        Returns:
            (..., H, N) int64.
        """
        heads = self.kept.shape[-1]
        first, before, turn = (one.unsqueeze(-1) for one in (self._pages, self._before, self._turn))
        grown = self._pages.sum(dim=-1)[..., None, None] + (pages - first) * heads + turn
        return torch.where(pages < first, before + pages, grown)

    def spread(self, states: Tensor, slots: int) -> Tensor:
        """Lay out what the heads kept as the blocks that hold it.

        Args:
            states: (..., H, K, D), of every head the last `kept` along K.
            slots: tokens that the blocks hold; they must be enough.

        Returns:
            (..., H, slots, D): what lies in the place of every head, zero where nothing does.
        """
        heads, longest, size = states.shape[-3:]
        position = torch.arange(longest, device=states.device)
        position = position - (longest - self.kept.unsqueeze(-1))  # (..., H, K), below 0 is none
        place = self.of_pages(position.clamp(min=0) // self.page_tokens)
        slot = place // heads * self.page_tokens + position % self.page_tokens
        target = (place % heads * slots + slot).where(position >= 0, heads * slots)
        found = states.new_zeros(*states.shape[:-3], heads * slots + 1, size)
        index = target.flatten(-2).unsqueeze(-1).expand(*target.shape[:-2], -1, size)
        found.scatter_(-2, index, states.flatten(-3, -2))
        return found[..., :-1, :].reshape(*states.shape[:-3], heads, slots, size)

    @functools.cached_property
    def _pages(self) -> Tensor:
        """(..., H) pages at the prompt's end."""
        return -(-self.kept // self.page_tokens)

    @functools.cached_property
    def _before(self) -> Tensor:
        """(..., H) pages of the heads before."""
        return self._pages.cumsum(dim=-1) - self._pages

    @functools.cached_property
    def _turn(self) -> Tensor:
        """(..., H) when it is a head's turn to take a place: those with the least room go first."""
        room = self._pages * self.page_tokens - self.kept
        return room.argsort(dim=-1, stable=True).argsort(dim=-1)
