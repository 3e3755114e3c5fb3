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
from snapkv.errors import wrong
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
    """A policy that shares one budget among the heads of all layers, for the best scores of all.

    KVzip, `KVzipPress` of kvpress and DefensiveKV (arXiv 2510.13334) select in this way; kvpress
    masks the other tokens and still holds them. Here layers and heads hold different numbers of
    tokens, as in AdaKV, and the memory is that of the kept tokens. The counts add up exactly to the
    budget times the heads of all layers. A head is only guaranteed its window and its sinks. If all
    heads share one latent, every row of a batch takes as many bytes in a layer as the row that
    keeps the most tokens there.

    Layers are pruned while the prompt is read: an entry that is not among the best of the layers
    read so far cannot be among the best of all, so it is dropped. At most twice the budget and one
    group of layers are held at a time (`snapkv.cache.shared_budget`). If the votes choose the
    budget, every head keeps what it needs, and layers share nothing. If the budget is in bytes and
    the tokens are quantized, heads win whole blocks of codes, because a partly filled block costs
    as much as a full one.

    Args:
        policy: the method that scores, with its budget: tokens per head on average. Its scores must
            mean the same in every layer (`PrefixPolicy.compares_layers`).

    Raises:
        InvalidTypeError: `policy` does not score a prefix.
        InvalidArgumentError: `policy` does not keep its best scores, or its scores cannot be
            compared between layers.
    """

    name: ClassVar[str] = "across-layers"
    per_head_budget: ClassVar[bool] = True

    policy: PrefixPolicy = field(default_factory=SnapKV)

    def __post_init__(self) -> None:
        self._require_scoring()
        if not self.policy.compares_layers:
            raise wrong(
                "policy",
                f"the scores of the method {self.policy.name} cannot be compared between layers",
                "Use SnapKV, KVzip or KVzap, or use AdaKV, which compares only the heads of the "
                "same layer",
            )

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | ({"all_layers"} if self.shares else set())

    @property
    def shares(self) -> bool:
        """Whether the number of tokens that a layer keeps depends on the other layers.

        It is False if the votes choose the budget (`AutoBudget`); every layer can then select by
        itself.
        """
        return not isinstance(self.policy.allocation, AutoBudget)

    @functools.cached_property
    def can_select_stacked(self) -> bool:
        return self.policy.is_layer_independent

    def even_counts(self, layer: PromptLayer) -> list[int]:
        """Return the number of tokens that a head keeps on average, one number for each row.

        The window is included. If several layers are stacked, each of their rows has a number.

        Raises:
            InvalidArgumentError: the tokens that must be kept do not fit into the budget; or, if
                the votes choose the budget, the policy returned scores of another shape or dtype,
                or NaN.
            BudgetTooSmallError: a budget in bytes cannot hold the window and the sinks.
        """
        prefix = self.policy.prefix(layer)
        return list(map(operator.add, self.policy.counts(prefix), prefix.window_tokens))

    def score_layer(self, layer: PromptLayer, even: Sequence[Sequence[int]]) -> Tensor:
        """Compute scores of all positions that can be compared with those of other layers.

        If the budget leaves no room beside the sinks in some layer, every head of that row keeps
        the same number of positions, and the other positions get minus infinity. If a budget in
        bytes buys whole blocks of codes, each score is replaced by the mean of its block, see
        `in_blocks`.

        Args:
            layer: one layer, or several that are stacked as rows.
            even: the `even_counts` of every layer of the model, from the bottom to the top.

        Returns:
            (B, H, T) float32, a new tensor: infinity for the window and other positions that must
            be kept, minus infinity for padding.

        Raises:
            InvalidArgumentError: the policy returned scores of another shape or dtype, or NaN.
        """
        policy, prefix = self.policy, self._prefix(layer)
        scores = policy.compute_scores(prefix)
        if (weights := policy.summed_weights(layer)) != 1:
            scores = scores / weights
        finite = torch.finfo(torch.float32)  # infinity marks what must stay, and padding
        ranked = prefix.mark_required(scores.float().clamp(finite.min, finite.max))
        window = layer.keys.shape[2] - prefix.slots
        ranked = F.pad(ranked, (0, window), value=math.inf)
        if (pads := layer.pads) is not None:
            ranked = ranked.masked_fill(pads, -math.inf)
        cost = self._cost_of_blocks(layer)
        fewest = list(map(min, zip(*even, strict=True)))
        for row, (depth, tokens) in enumerate(zip(layer.depths, layer.row_lengths, strict=True)):
            least = fewest[row % len(fewest)]
            if least - min(tokens, policy.window_size) <= policy.sink_tokens:
                best = ops.mask_best(ranked[row : row + 1], [even[depth][row % len(fewest)]])[0]
                ranked[row] = ranked[row].masked_fill(~best, -math.inf)
            elif cost is not None and least < tokens:
                ranked[row] = in_blocks(ranked[row], cost.block_tokens)
        return ranked

    def _cost_of_blocks(self, layer: PromptLayer) -> TokenCost | None:
        """Return the cost of a block of codes if a budget in bytes buys whole blocks.

        It is None for another budget, for tokens that are not quantized, and if the cost is not
        known.
        """
        cost = layer.cost if isinstance(self.policy.allocation, ByteBudget) else None
        return None if cost is None or cost.block_tokens == 1 else cost

    def select(self, layer: PromptLayer) -> Selection | None:
        """Select the positions to keep in one layer, if the votes choose the budget.

        Every head keeps its window and as many positions as it needs.

        Args:
            layer: one layer, or several that are stacked as rows.

        Returns:
            The selection, or None if no head drops a position.

        Raises:
            InvalidArgumentError: the budget is shared between layers, which a single layer cannot
                do; or the tokens that must be kept do not fit; or the policy returned scores of
                another shape or dtype, or NaN.
        """
        budget, prefix = self.policy.allocation, self._prefix(layer)
        if not isinstance(budget, AutoBudget):
            raise wrong(
                "policy",
                f"the method {self.name} compares all layers of a prompt, but got only one of the "
                "layers",
                "Use a CompressedCache to read the prompt",
            )
        if not layer.depth:
            self.policy.require_fit(layer)
        if not prefix.slots:
            return None
        lengths = ops.on_device(prefix.lengths, layer.keys.device)[:, None]
        required = budget.count_required(self.policy.compute_shares(prefix))
        required = required.clamp(min=budget.least).minimum(lengths)
        if budget.most is not None:
            required = required.clamp(max=budget.most - prefix.window_size)
        kept = required.tolist()
        # Each head is compared rather than the mean of a row's heads. The mean is rounded up, so it
        # can be all of the row although some head drops a token, and whether that head really
        # drops it would then depend on the other rows of the stack.
        if all(set(heads) == {tokens} for heads, tokens in zip(kept, prefix.lengths, strict=True)):
            return None
        scores = self.policy.compute_scores(prefix)
        if layer.num_kv_heads == 1 and not self.per_query_head:
            return prefix.select(scores, [tokens for (tokens,) in kept])
        return prefix.select_by_head(scores, kept)

    def _prefix(self, layer: PromptLayer) -> Prefix:
        return self.policy.prefix(layer, per_head_budget=True)


def in_blocks(ranked: Tensor, block_tokens: int) -> Tensor:
    """Replace each score by the average score of the block in which its token would be stored.

    A head fills its blocks with its best tokens first. A token that would be in a partly filled
    block gets minus infinity, because that block costs as much as a full one.

    Args:
        ranked: (H, T) float32, infinite for positions that must be kept and minus infinity for
            padding. It stays unchanged.
        block_tokens: tokens of a block.

    Returns:
        (H, T) float32; infinite scores are unchanged.
    """
    ordered, places = ranked.sort(dim=-1, descending=True, stable=True)
    whole = ranked.shape[-1] // block_tokens * block_tokens
    blocks = ordered[:, :whole].view(len(ranked), -1, block_tokens)
    means = blocks.mean(dim=-1, keepdim=True).nan_to_num(math.inf, math.inf, -math.inf)
    found = torch.full_like(ranked, -math.inf)
    found[:, :whole] = means.expand_as(blocks).flatten(1)
    found = torch.empty_like(found).scatter_(-1, places, found)
    return torch.where(ranked.isinf(), ranked, found)  # as in `ranked`


def best_entries(scores: Tensor, totals: Sequence[int]) -> Tensor:
    """Return a mask of the `totals[row]` best entries of each row.

    If scores are equal, the earlier layer, head and position wins. A score of minus infinity never
    wins, so fewer entries may be selected.

    Args:
        scores: (B, N) float32, the scores of all layers, one layer after the other.
        totals: how many entries of each row to select, at least 1; more than N selects all.

    Returns:
        (B, N) bool.
    """
    return ops.mask_best(scores[:, None], totals)[:, 0] & (scores > -math.inf)
