"""Numbers of a page as base64, of bounded size however long the text is."""

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
    """Encode integers as base64, in the order of memory, the lowest byte first."""
    return base64.b64encode(numbers.to(dtype).cpu().contiguous().numpy().tobytes()).decode()


def packed_counts(counts: Tensor, bin_tokens: int) -> str:
    """Encode how many heads keep each of T tokens, two bytes for the highest count of every bin."""
    return packed(_bins(counts[None], bin_tokens).amax(dim=-1), torch.uint16)


def bin_tokens(tokens: int, most: int) -> int:
    """Return how many neighbouring tokens share a place if there may be `most` places."""
    return max(1, -(-tokens // most))


@dataclass(frozen=True, kw_only=True)
class Ballot:
    """Who voted for which of the T prompt tokens that a cache selected from.

    Attributes:
        votes: (W, T) float32, the votes of each of the last W tokens for every token.
        sink_tokens: first tokens that are kept whatever the votes.
        window_tokens: last tokens that are kept whatever the votes.
    """

    votes: Tensor
    sink_tokens: int
    window_tokens: int

    @property
    def strongest(self) -> int:
        """The token with the most votes of a single voter, away from both ends of the text.

        Attention sinks, and what is next to a question, get votes whatever they say.
        """
        voters, tokens = self.votes.shape
        far = self.votes[:, voters : max(voters, tokens - 2 * voters)]
        return voters + int(far.amax(dim=0).argmax()) if far.numel() else 0

    def data(self) -> dict[str, Any]:
        """Return every place's top voters and their shares of its votes, for the page."""
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
    """Reshape (N, T) to (N, bins, size), with zeros after the end."""
    rows, tokens = numbers.shape
    return torch.nn.functional.pad(numbers, (0, -tokens % size)).view(rows, -1, size)
