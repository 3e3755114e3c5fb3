"""One budget for all layers and heads, as KVzip (Kim et al., NeurIPS 2025) shares it out."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from snapkv.errors import InvalidArgumentError
from snapkv.policies.around import AroundScores
from snapkv.policies.base import Need
from snapkv.policies.budget import counts_of_best
from snapkv.policies.kvzip import KVzip
from snapkv.policies.prefix_policy import PrefixPolicy
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
    per_head_budget: ClassVar[bool] = True

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

    def allocate(self, layers: Iterable[PromptLayer]) -> list[PromptLayer]:
        """All layers, each told how many positions its heads keep."""
        layers = list(layers)
        policy, device = self.policy, layers[0].keys.device
        prefixes = [policy.prefix(layer, per_head_budget=True) for layer in layers]
        kept = [policy.counts(each) for each in prefixes]
        if not any(prefixes[0].lengths):
            return layers
        ranked = [each.ranked(policy.scored(each)).to(device) for each in prefixes]
        heads = torch.tensor([own.shape[1] for own in ranked])
        even = torch.tensor(kept).repeat_interleave(heads, dim=0).T.to(device)
        best = counts_of_best(torch.cat(ranked, dim=1), even.sum(dim=-1).tolist())
        has_choice = even.amin(dim=-1, keepdim=True) > policy.sink_tokens
        parts = torch.split(torch.where(has_choice, best, even), heads.tolist(), dim=1)
        return [
            replace(layer, head_budgets=own.to(layer.keys.device))
            for layer, own in zip(layers, parts, strict=True)
        ]

    def select(self, layer: PromptLayer) -> Selection | None:
        """Keep the window in every head, and of the prefix what its budget allows."""
        prefix = self.policy.prefix(layer)
        if not any(prefix.lengths):
            return None
        if (kept := layer.head_budgets) is None:
            raise InvalidArgumentError(
                f"policy: expected layers that know their shares, which {self.name} gives all of "
                "them together, got one without; fill the cache with snapkv.kvzip.read_context"
            )
        scores = self.policy.scored(prefix)
        if bool((kept == kept[:, :1]).all()):
            return prefix.select(scores, kept[:, 0].tolist())
        return prefix.select_by_head(scores, kept)
