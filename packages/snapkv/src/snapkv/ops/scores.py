"""How attention turns products of queries and keys into scores."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@contextlib.contextmanager
def scoring(states: Tensor) -> Iterator[None]:
    """Turn off gradients and autocast within this block, so that float32 stays float32."""
    device = states.device.type
    with contextlib.ExitStack() as within:
        within.enter_context(torch.no_grad())
        if torch.is_autocast_enabled(device):
            within.enter_context(torch.autocast(device, enabled=False))
        yield


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """The options of a model that determine how attention scores are computed.

    Attributes:
        scaling: factor on the products, usually ``D ** -0.5``.
        softcap: ``softcap * tanh(score / softcap)`` is applied to the scaled scores (Gemma 2).
        sink_logits: (Hq,), learned: an extra logit per head in the softmax (gpt-oss).
    """

    scaling: float
    softcap: float | None = None
    sink_logits: Tensor | None = None

    def scores(self, products: Tensor) -> Tensor:
        """Convert the products of queries and keys into attention scores.

        Args:
            products: a tensor of any shape, which changes in place.

        Returns:
            The scores in the same shape and dtype.
        """
        scores = products.mul_(self.scaling)
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)


@dataclass(frozen=True)
class AttentionStates:
    """The queries and keys of one layer, and the options of the model's attention.

    Attributes:
        queries: (B, Hq, N, D), the queries of the last N tokens, after rotary embedding.
        keys: (B, Hkv, T, D), after rotary embedding.
        score_options: how the model's attention turns products into scores.
        pad_tokens: (B,) int64, how many leading keys of each row are padding, which neither votes
            nor receives votes; None if no row has any.
    """

    queries: Tensor
    keys: Tensor
    score_options: ScoreOptions
    pad_tokens: Tensor | None = None
