"""One budget for all layers and heads, as KVzip (Kim et al., NeurIPS 2025) shares it out."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from snapkv import ops
from snapkv.errors import InvalidArgumentError
from snapkv.policies.around import AroundScores
from snapkv.policies.base import Need, PrefixPolicy
from snapkv.policies.kvzip import KVzip
from snapkv.policies.states import PromptLayer, Selection


@dataclass(frozen=True)
class AcrossLayers(AroundScores):
    """Shares one budget out among the heads of all layers: the best scores of a row win.

    So choose KVzip and `KVzipPress` of kvpress, which masks what is not kept and holds all of it.
    Here layers and heads hold different numbers of tokens, as in AdaKV, and the bytes are those of
    the tokens kept. The counts add up exactly: the budget times the heads of all layers. A head is
    sure of its window and its sinks only. Where all heads share one latent, rows of a batch take as
    many bytes in a layer as the one that keeps most of it.

    It chooses when all layers have read the text, all of which is in memory until then;
    `snapkv.kvzip.read_context` reads it so, once for KVzap, twice for KVzip.

    Args:
        policy: the method that scores, `KVzip` or `KVzap`, with its budget: tokens per head on
            average. Its scores must mean the same in every layer (`PrefixPolicy.compares_layers`).

    Raises:
        InvalidTypeError: `policy` does not score a prefix.
        InvalidArgumentError: its scores cannot be compared between layers.
    """

    name: ClassVar[str] = "across-layers"
    parts_heads: ClassVar[bool] = True

    policy: PrefixPolicy = field(default_factory=KVzip)

    def __post_init__(self) -> None:
        self._require_scoring()
        if not self.policy.compares_layers:
            raise InvalidArgumentError(
                f"policy: expected a method whose scores mean the same in every layer, got "
                f"{self.policy.name}; pass KVzip or KVzap, or use AdaKV, which shares a layer's "
                "budget among its heads"
            )

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | {"all_layers"}

    def share_out(self, layers: Iterable[PromptLayer]) -> list[PromptLayer]:
        """All layers, each told how many positions its heads keep."""
        layers = list(layers)
        self.require_room(layers[0].uneven())
        if not any(self.policy.prefix(layers[0]).lengths):
            return layers
        device = layers[0].keys.device
        ranked = [self._ranked(layer).to(device) for layer in layers]
        kept = [self.policy.kept_prefix_tokens(layer.uneven(), "mean") for layer in layers]
        heads = torch.tensor([own.shape[1] for own in ranked])
        even = torch.tensor(kept).repeat_interleave(heads, dim=0).T.to(device)
        shares = _shares_of_best(torch.cat(ranked, dim=1), even.sum(dim=-1).tolist())
        has_choice = even.amin(dim=-1, keepdim=True) > self.policy.sink_tokens
        parts = torch.split(torch.where(has_choice, shares, even), heads.tolist(), dim=1)
        return [
            replace(layer, shares=own.to(layer.keys.device))
            for layer, own in zip(layers, parts, strict=True)
        ]

    def select(self, layer: PromptLayer) -> Selection | None:
        """Keep the window in every head, and of the prefix what its share allows."""
        prefix = self.policy.prefix(layer)
        if not any(prefix.lengths):
            return None
        if (shares := layer.shares) is None:
            raise InvalidArgumentError(
                f"policy: expected layers that know their shares, which {self.name} gives all of "
                "them together, got one without; fill the cache with snapkv.kvzip.read_context"
            )
        scores = self.policy.scored(layer)
        if bool((shares == shares[:, :1]).all()):
            return prefix.select(scores, shares[:, 0].tolist())
        return prefix.select_by_head(prefix.best(scores, shares), shares)

    def _ranked(self, layer: PromptLayer) -> Tensor:
        return self.policy.prefix(layer).ranked(self.policy.scored(layer))


def _shares_of_best(ranked: Tensor, totals: list[int]) -> Tensor:
    """(B, H) int64: how many of a row's best, so many of all its (H, P) scores, are each head's."""
    B, H, P = ranked.shape
    best = ops.keep_best(ranked.reshape(B, 1, H * P), totals)[:, 0]
    heads = torch.where(best < 0, H, best // P)  # of a row with fewer, the rest are of none
    counts = torch.zeros(B, H + 1, dtype=torch.int64, device=ranked.device)
    return counts.scatter_add(1, heads, torch.ones_like(heads))[:, :H]
