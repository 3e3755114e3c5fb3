"""The numbers of a page, encoded as base64. Their size is bounded, however long the text is."""

import base64
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MOST_COUNTS = 2**20
"""The most numbers in all maps of a page; if there are more tokens, neighbours share a number."""

MOST_VOTED = 2**14
"""The most places whose voters a page names; if there are more tokens, neighbours share a place."""

TOP_VOTERS = 3
"""How many voters a page names for every place: those with the most votes."""


def packed(numbers: Tensor, dtype: torch.dtype) -> str:
    """Encode a tensor of integers as base64, with the lowest byte of each number first."""
    return base64.b64encode(numbers.to(dtype).cpu().contiguous().numpy().tobytes()).decode()


def packed_counts(counts: Tensor, bin_tokens: int) -> str:
    """Encode how many heads keep each token.

    Args:
        counts: (T,) int64, the number of heads that keep each token.
        bin_tokens: how many neighbouring tokens share a number, which is their highest count.

    Returns:
        Base64 of two bytes for each bin.
    """
    return packed(_bins(counts[None], bin_tokens).amax(dim=-1), torch.uint16)


def bin_tokens(tokens: int, most: int) -> int:
    """Return how many neighbouring tokens have to share a place if there are `most` places."""
    return max(1, -(-tokens // most))


@dataclass(frozen=True, kw_only=True)
class Ballot:
    """The votes of the last prompt tokens for each of the T tokens that a cache selects from.

    Attributes:
        votes: (W, T) float32, the votes of each of the last W tokens for every token.
        sink_tokens: how many of the first tokens are kept regardless of the votes.
        window_tokens: how many of the last tokens are kept regardless of the votes.
    """

    votes: Tensor
    sink_tokens: int
    window_tokens: int

    @property
    def strongest(self) -> int:
        """The index of the token that gets the most votes from a single voter.

        Tokens at both ends of the text do not count, because attention sinks and the tokens next to
        a question get many votes whatever they mean.
        """
        voters, tokens = self.votes.shape
        far = self.votes[:, voters : max(voters, tokens - 2 * voters)]
        return voters + int(far.amax(dim=0).argmax()) if far.numel() else 0

    def data(self) -> dict[str, Any]:
        """Return the votes as JSON values for the page.

        For each place they name the voters that gave it the most votes, and their shares of its
        votes.
        """
        voters, tokens = self.votes.shape
        size = bin_tokens(tokens, MOST_VOTED)
        votes = _bins(self.votes, size).sum(dim=-1)
        most, who = votes.topk(min(TOP_VOTERS, voters), dim=0)
        parts = most / votes.sum(dim=0).clamp(min=torch.finfo(torch.float32).tiny)
        return {
            "first": tokens - voters,
            "tokens": tokens,
            "strongest": self.strongest,
            "bin_tokens": size,
            "named": len(who),
            "who": packed(who.T + tokens - voters, torch.int32),
            "parts": packed((255 * parts.T).round(), torch.uint8),
            "sink_tokens": self.sink_tokens,
            "window_tokens": self.window_tokens,
        }


def _bins(numbers: Tensor, size: int) -> Tensor:
    """Split the rows of a tensor into bins of equal size, and fill the last bin with zeros.

    Args:
        numbers: (N, T).
        size: how many numbers a bin has.

    Returns:
        (N, bins, size).
    """
    rows, tokens = numbers.shape
    return torch.nn.functional.pad(numbers, (0, -tokens % size)).view(rows, -1, size)
