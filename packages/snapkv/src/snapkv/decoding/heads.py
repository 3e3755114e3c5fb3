"""Medusa heads: small layers that guess the tokens behind the next one.

Medusa (Cai et al., 2024), section 2.1.1. From the state h that the model's output projection sees,
head k guesses the token k + 1 places ahead: ``lm_head_k(r_n(... r_1(h)))`` with
``r(x) = x + SiLU(W x + b)``.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from snapkv.decoding.hidden import output_projection
from snapkv.decoding.tree import HEAD_RANKS

ACCURACIES = (
    (0.42, 0.13, 0.07, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01, 0.01),
    (0.26, 0.10, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01, 0.01),
    (0.18, 0.08, 0.05, 0.03, 0.02, 0.02, 0.01, 0.01, 0.01, 0.01),
)
"""How often a head's choices are right, by rank, where a file does not say; the last holds on."""


class MedusaHeads(nn.Module):
    """The heads of one model.

    Args:
        weights: (heads, layers, d, d). biases: (heads, layers, d).
        projections: (heads, V, d), one vocabulary matrix per head; None where the heads share the
            model's own output projection.
        model: the model the heads belong to.
        accuracies: for each head, how often its choice of each rank was right when it was measured.
    """

    def __init__(
        self,
        weights: Tensor,
        biases: Tensor,
        projections: Tensor | None,
        model: Any,
        accuracies: tuple[tuple[float, ...], ...] | None = None,
    ) -> None:
        super().__init__()
        self.weights = nn.Parameter(weights, requires_grad=False)
        self.biases = nn.Parameter(biases, requires_grad=False)
        self.projections = None
        if projections is not None:
            self.projections = nn.Parameter(projections, requires_grad=False)
        self._shared = [output_projection(model)]  # in a list, or it would be a part of the heads
        self.accuracies = accuracies or tuple(
            ACCURACIES[min(head, len(ACCURACIES) - 1)] for head in range(len(weights))
        )

    @classmethod
    def untrained(cls, model: Any, num_heads: int) -> "MedusaHeads":
        """Heads with the model's output projection that guess as the model does: all zeros."""
        shared = output_projection(model).weight
        d = shared.shape[1]
        weights = torch.zeros(num_heads, 1, d, d, device=shared.device)
        return cls(weights, torch.zeros(num_heads, 1, d, device=shared.device), None, model)

    @property
    def num_heads(self) -> int:
        """How many tokens behind the next one are guessed."""
        return len(self.weights)

    def states(self, hidden: Tensor) -> Tensor:
        """(..., heads, d): what each head hands to its projection, of states (..., d)."""
        states = hidden.to(self.weights.dtype)[..., None, :].expand(
            *hidden.shape[:-1], self.num_heads, -1
        )
        for layer in range(self.weights.shape[1]):
            turned = torch.einsum("...kd,ked->...ke", states, self.weights[:, layer])
            states = states + silu(turned + self.biases[:, layer])
        return states

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., heads, V): the heads' logits for states (..., d), as `last_states` notes them."""
        states = self.states(hidden)
        if self.projections is not None:
            return torch.einsum("...kd,kvd->...kv", states, self.projections)
        (shared,) = self._shared
        logits: Tensor = shared(states.to(shared.weight.dtype))
        return logits

    @torch.no_grad()
    def guesses(self, hidden: Tensor) -> Tensor:
        """(..., heads, `HEAD_RANKS`) int64: each head's likeliest tokens behind states (..., d)."""
        best: Tensor = self(hidden).topk(HEAD_RANKS, dim=-1).indices
        return best
