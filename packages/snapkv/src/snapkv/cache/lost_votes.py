"""What layers lost of a prompt's votes, measured of as many of them at once as is little to hold.

On a GPU dozens of small operations a layer take longer than the work that they are.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from snapkv.cache.layer import CompressedLayer
from snapkv.policies import PromptLayer, Selection
from snapkv.policies.states import LostVotes, VotesAtStake

MOST_BYTES = 4 << 20
"""Of votes that wait."""


class LostVotesOfLayers:
    """Votes of the layers of a prompt that are still to be measured."""

    def __init__(self) -> None:
        self._waiting: list[tuple[CompressedLayer, VotesAtStake, Tensor]] = []
        self._alike: Any = None  # what they have in common
        self._bytes = 0

    @torch.no_grad()
    def note(self, layer: CompressedLayer, selection: Selection, prompt: PromptLayer) -> None:
        """Of a whole prompt a layer has kept that."""
        if (votes := layer.policy.votes_at_stake(prompt)) is None:
            return
        found, kept = votes.votes, selection.keep_indices
        has_pads = votes.pad_tokens is not None
        heads, tokens = kept.shape[1], selection.prompt_tokens
        alike = found.shape, found.device, votes.weights, has_pads, heads, tokens
        if alike != self._alike:
            self.measure()
        self._alike, self._bytes = alike, self._bytes + found.nbytes
        self._waiting.append((layer, votes, kept))
        if self._bytes >= MOST_BYTES:
            self.measure()

    @torch.no_grad()
    def measure(self) -> None:
        """Note it in the layers."""
        if not self._waiting:
            return
        layers, several, kept = zip(*self._waiting, strict=True)
        most, tokens = max([each.shape[-1] for each in kept]), self._alike[-1]
        wide = [
            F.pad(each, (empty, 0), value=-1) if (empty := most - each.shape[-1]) else each
            for each in kept
        ]
        votes = VotesAtStake.joined(several, 0)
        lost = LostVotes.of(votes.votes, votes.lifted(), torch.cat(wide), tokens)
        masses, peaks = (each.chunk(len(layers)) for each in (lost.mass, lost.peak))
        for layer, mass, peak in zip(layers, masses, peaks, strict=True):
            layer.state = replace(layer.state, lost_mass=mass, lost_peak=peak)
        self._waiting, self._bytes = [], 0
