"""One budget for all layers and heads, as KVzip (Kim et al., NeurIPS 2025) shares it out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from snapkv import ops
from snapkv.errors import InvalidArgumentError
from snapkv.policies.around import AroundScores
from snapkv.policies.base import Need
from snapkv.policies.budget import AutoBudget
from snapkv.policies.prefix import Prefix
from snapkv.policies.prefix_policy import PrefixPolicy
from snapkv.policies.snapkv import SnapKV
from snapkv.policies.states import PromptLayer, Selection


@dataclass(frozen=True)
class AcrossLayers(AroundScores):
    """Shares one budget out among the heads of all layers: the best scores of a row win.

    So choose KVzip, `KVzipPress` of kvpress, which masks what is not kept and holds all of it, and
    DefensiveKV (arXiv 2510.13334). Here layers and heads hold different numbers of tokens, as in
    AdaKV, and the bytes are those of the tokens kept. The counts add up exactly: the budget times
    the heads of all layers. A head is sure of its window and its sinks only. Where all heads share
    one latent, rows of a batch take as many bytes in a layer as the one that keeps most of it.

    It chooses while the prompt is read: what is not among the best of the layers read so far is
    dropped, since it cannot be among the best of all. So twice the budget and one layer are held at
    most (`snapkv.cache.shared_budget`). Of a budget that the votes choose, every head keeps what it
    asks for, and layers share nothing.

    Args:
        policy: the method that scores, with its budget: tokens per head on average. Its scores must
            mean the same in every layer (`PrefixPolicy.compares_layers`).

    Raises:
        InvalidTypeError: `policy` does not score a prefix.
        InvalidArgumentError: its scores cannot be compared between layers.
    """

    name: ClassVar[str] = "across-layers"
    per_head_budget: ClassVar[bool] = True

    policy: PrefixPolicy = field(default_factory=SnapKV)

    def __post_init__(self) -> None:
        self._require_scoring()
        if not self.policy.compares_layers:
            raise InvalidArgumentError(
                f"policy: expected a method whose scores mean the same in every layer, got "
                f"{self.policy.name}; pass SnapKV, KVzip or KVzap, or use AdaKV, which shares a "
                "layer's budget among its heads"
            )

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | ({"all_layers"} if self.shares else set())

    @property
    def shares(self) -> bool:
        """Whether what a layer keeps depends on the others, and not on its votes alone."""
        return not isinstance(self.policy.allocation, AutoBudget)

    def even_counts(self, layer: PromptLayer) -> list[list[int]]:
        """For every layer B numbers: positions before the window, the mean over its heads.

        Raises InvalidArgumentError where what must stay does not fit.
        """
        at_depth = (replace(layer, depth=depth) for depth in range(layer.num_layers))
        return [self.policy.counts(self._prefix(each)) for each in at_depth]

    @property
    def chooses_from_a_part(self) -> bool:
        return self.policy.chooses_from_a_part

    def ranked(self, layer: PromptLayer) -> Tensor:
        """(B, H, T) float32: scores, infinite for what must stay, and minus infinity for pads."""
        prefix, least = self._prefix(layer), torch.finfo(torch.float32).min
        scores = self.policy.scored(prefix) / self.policy.summed_weights(layer)
        ranked = prefix.ranked(scores.float().clamp(min=least))
        window = layer.keys.shape[2] - prefix.slots
        ranked = F.pad(ranked, (0, window), value=math.inf)
        return ranked if layer.pads is None else ranked.masked_fill(layer.pads, -math.inf)

    def select_all(self, layers: Sequence[PromptLayer]) -> list[Selection | None]:
        """As chosen while they are read, plainly: all scores of a row are ranked in one list."""
        if not self.shares:
            return super().select_all(layers)
        even, ranked = self.even_counts(layers[0]), [self.ranked(layer) for layer in layers]
        rows = []
        for row, tokens in enumerate(layers[0].row_lengths):
            of_row = [scores[row : row + 1] for scores in ranked]
            kept = [counts[row] + min(tokens, self.policy.window_size) for counts in even]
            if min(counts[row] for counts in even) <= self.policy.sink_tokens:
                best = [
                    ops.best_of(*each) for each in zip(of_row, ([n] for n in kept), strict=True)
                ]
            else:
                every = torch.cat([scores.flatten() for scores in of_row])
                total = sum(n * of.shape[1] for n, of in zip(kept, of_row, strict=True))
                sizes = [scores.numel() for scores in of_row]
                parts = torch.split(ops.best_of(every[None, None], [total]).flatten(), sizes)
                best = [part.view_as(of) for part, of in zip(parts, of_row, strict=True)]
            rows.append(best)
        masks = [
            torch.cat(best) & (scores > -math.inf)
            for best, scores in zip(zip(*rows, strict=True), ranked, strict=True)
        ]
        return [Selection.of_mask(mask, per_head_budget=mask.shape[1] > 1) for mask in masks]

    def select(self, layer: PromptLayer) -> Selection | None:
        """Keep in every head what a budget by votes asks for, and the window."""
        budget, prefix = self.policy.allocation, self._prefix(layer)
        if not isinstance(budget, AutoBudget):
            raise InvalidArgumentError(
                f"policy: expected the layers of a prompt one after the other, which {self.name} "
                "compares, got one alone; read the prompt into a CompressedCache"
            )
        if (means := self.policy.counts(prefix)) == prefix.lengths:
            return None
        if layer.num_kv_heads == 1 and not self.per_query_head:
            return prefix.select(self.policy.scored(prefix), means)
        own = torch.tensor(prefix.lengths, device=layer.keys.device)[:, None]
        voted = budget.voted(self.policy.rated(prefix)).clamp(min=budget.least).minimum(own)
        if budget.most is not None:
            voted = voted.clamp(max=budget.most - prefix.window_size)
        return prefix.select_by_head(self.policy.scored(prefix), voted)

    def _prefix(self, layer: PromptLayer) -> Prefix:
        return self.policy.prefix(layer, per_head_budget=True)
