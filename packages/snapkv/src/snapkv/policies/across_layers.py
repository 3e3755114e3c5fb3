"""One budget for all layers and heads, as KVzip (Kim et al., NeurIPS 2025) shares it out."""

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from snapkv import ops
from snapkv.errors import InvalidArgumentError
from snapkv.ops import TokenCost
from snapkv.policies.around import AroundScores
from snapkv.policies.base import Need
from snapkv.policies.budget import AutoBudget, ByteBudget
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
    asks for, and layers share nothing. Of bytes in few bits heads win whole blocks of codes, which
    cost as much filled in part.

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

    @functools.cached_property
    def chooses_of_stacks(self) -> bool:
        return self.policy.scores_any_layer

    def even_counts(self, layer: PromptLayer) -> list[int]:
        """B numbers: what a head of the layer keeps on average, its window included.

        Raises InvalidArgumentError where what must stay does not fit.
        """
        prefix = self.policy.prefix(layer)
        return list(map(operator.add, self.policy.counts(prefix), prefix.window_tokens))

    def ranked(self, layer: PromptLayer, even: Sequence[Sequence[int]]) -> Tensor:
        """(B, H, T) float32: scores, infinite for what must stay, minus infinity for pads.

        `even` are `even_counts` of all layers, of which some may be stacked here. Where one leaves
        no room beside the sinks, every head of the row keeps as many, and the rest is minus
        infinity, too.
        """
        policy, prefix = self.policy, self._prefix(layer)
        scores = policy.scored(prefix)
        if (weights := policy.summed_weights(layer)) != 1:
            scores = scores / weights
        finite = torch.finfo(torch.float32)  # infinite is what must stay, and what must not
        ranked = prefix.ranked(scores.float().clamp(finite.min, finite.max))
        window = layer.keys.shape[2] - prefix.slots
        ranked = F.pad(ranked, (0, window), value=math.inf)
        if (pads := layer.pads) is not None:
            ranked = ranked.masked_fill(pads, -math.inf)
        cost = self._cost_of_blocks(layer)
        fewest = list(map(min, zip(*even, strict=True)))
        for row, (depth, tokens) in enumerate(zip(layer.depths, layer.row_lengths, strict=True)):
            least = fewest[row % len(fewest)]
            if least - min(tokens, policy.window_size) <= policy.sink_tokens:
                best = ops.best_of(ranked[row : row + 1], [even[depth][row % len(fewest)]])[0]
                ranked[row] = ranked[row].masked_fill(~best, -math.inf)
            elif cost is not None and least < tokens:
                ranked[row] = in_blocks(ranked[row], cost.block_tokens)
        return ranked

    def _cost_of_blocks(self, layer: PromptLayer) -> TokenCost | None:
        """What tokens cost where a budget of bytes buys blocks of codes; else None."""
        cost = layer.cost if isinstance(self.policy.allocation, ByteBudget) else None
        return None if cost is None or cost.block_tokens == 1 else cost

    def select(self, layer: PromptLayer) -> Selection | None:
        """Keep in every head what a budget by votes asks for, and the window."""
        budget, prefix = self.policy.allocation, self._prefix(layer)
        if not isinstance(budget, AutoBudget):
            raise InvalidArgumentError(
                f"policy: expected the layers of a prompt one after the other, which {self.name} "
                "compares, got one alone; read the prompt into a CompressedCache"
            )
        if not layer.depth:
            self.policy.require_room(layer)
        if not prefix.slots:
            return None
        own = ops.on_device(prefix.lengths, layer.keys.device)[:, None]
        voted = budget.voted(self.policy.rated(prefix)).clamp(min=budget.least).minimum(own)
        if budget.most is not None:
            voted = voted.clamp(max=budget.most - prefix.window_size)
        kept = voted.tolist()
        # Every head is compared, and not the mean of a row's heads. The mean is rounded up, so it
        # can be all of the row although some head drops a token, and whether that head really
        # drops it would then depend on the other rows of the stack.
        if all(set(heads) == {tokens} for heads, tokens in zip(kept, prefix.lengths, strict=True)):
            return None
        scores = self.policy.scored(prefix)
        if layer.num_kv_heads == 1 and not self.per_query_head:
            return prefix.select(scores, [tokens for (tokens,) in kept])
        return prefix.select_by_head(scores, kept)

    def _prefix(self, layer: PromptLayer) -> Prefix:
        return self.policy.prefix(layer, per_head_budget=True)


def in_blocks(ranked: Tensor, block_tokens: int) -> Tensor:
    """Of each of a layer's (H, T) scores the mean of the block that its token would stand in.

    A head fills its blocks with its best tokens first. What would fill a block in part is minus
    infinity: it costs as much as a whole one.
    """
    ordered, places = ranked.sort(dim=-1, descending=True, stable=True)
    whole = ranked.shape[-1] // block_tokens * block_tokens
    blocks = ordered[:, :whole].view(len(ranked), -1, block_tokens)
    means = blocks.mean(dim=-1, keepdim=True).nan_to_num(math.inf, math.inf, -math.inf)
    found = torch.full_like(ranked, -math.inf)
    found[:, :whole] = means.expand_as(blocks).flatten(1)
    found = torch.empty_like(found).scatter_(-1, places, found)
    return torch.where(ranked.isinf(), ranked, found)  # what must stay, and pads


def best_entries(scores: Tensor, totals: Sequence[int]) -> Tensor:
    """Which (B, N) scores, those of layer after layer, are among the best so many of their row.

    Of equal ones the earlier layer, head and place wins; minus infinity never does.
    """
    return ops.best_of(scores[:, None], totals)[:, 0] & (scores > -math.inf)
