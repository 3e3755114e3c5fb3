"""How a method rated the prompt: its votes, what pooling made of them, and the lowest kept."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from snapkv.cache.layer import last_tokens
from snapkv.policies import Policy, PromptLayer, Selection, SnapKV
from snapkv.policies.base import PrefixPolicy


@dataclass(frozen=True, kw_only=True)
class Rating:
    """What the heads of one layer thought of the prompt.

    Attributes:
        votes: (H, P) float32 before pooling; None where the method does not pool.
        scores: (H, P) float32, what the best are chosen by.
        cuts: (H,) float32, the lowest score that won a place; NaN where none did.
    """

    votes: Tensor | None
    scores: Tensor
    cuts: Tensor


def kept_mask(selection: Selection | None, layer: PromptLayer) -> Tensor:
    """Which positions each head of one prompt keeps: (H, T) bool."""
    tokens = layer.keys.shape[2]
    if selection is None:
        return torch.ones(layer.num_kv_heads, tokens, dtype=torch.bool, device=layer.keys.device)
    kept = selection.keep_indices[0]
    kept = kept.expand(max(len(kept), layer.num_kv_heads), -1)  # where all heads share one set
    mask = torch.zeros(kept.shape[0], tokens + 1, dtype=torch.bool, device=kept.device)
    return mask.scatter(1, kept.where(kept >= 0, tokens), True)[:, :tokens]


def rating(
    policy: Policy, layer: PromptLayer, selection: Selection | None, kept: Tensor
) -> Rating | None:
    """How a method rated one layer; None where it keeps by place, or does not show its scores."""
    scorer = scorer_of(policy)
    votes, scores = _scored(scorer, layer, selection)
    if scores is None or scores.shape[1] not in (1, kept.shape[0]) or not scores.shape[-1]:
        return None
    scores = scores.expand(-1, kept.shape[0], -1)
    chosen = kept[:, : scores.shape[-1]].clone()
    if scorer is not None:
        chosen[:, : scorer.sink_tokens] = False  # kept for their place, whatever their scores
    lowest = scores[0].masked_fill(~chosen, float("inf")).amin(dim=-1)
    return Rating(
        votes=None if votes is None else votes[0],
        scores=scores[0],
        cuts=lowest.masked_fill(lowest.isinf(), float("nan")),
    )


def _scored(
    scorer: PrefixPolicy | None, layer: PromptLayer, selection: Selection | None
) -> tuple[Tensor | None, Tensor | None]:
    if scorer is None:
        return None, None if selection is None else selection.scores
    if layer.keys.shape[2] <= scorer.window_size:
        return None, None
    layer = replace(layer, queries=last_tokens(layer.queries, scorer.query_tokens))
    if not isinstance(scorer, SnapKV) or scorer.kernel_size == 1:
        return None, scorer.score(layer)
    votes = scorer.votes(layer)
    return votes, scorer.pool(votes, layer)


def scorer_of(policy: Policy) -> PrefixPolicy | None:
    """The method at the heart of a policy that rates the prefix."""
    for name in ("policy", "prompt"):
        inner = getattr(policy, name, None)
        if isinstance(inner, Policy):
            return scorer_of(inner)
    return policy if isinstance(policy, PrefixPolicy) else None
