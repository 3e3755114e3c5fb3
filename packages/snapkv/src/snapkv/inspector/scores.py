"""What a method did to every layer of a prompt: its votes, its scores, and what it kept."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from snapkv.cache.layer import last_tokens
from snapkv.inspector.leave_out import Span
from snapkv.policies import Policy, PromptLayer, Selection, SnapKV
from snapkv.policies.prefix_policy import PrefixPolicy


@dataclass(frozen=True, kw_only=True)
class Rating:
    """Votes and scores of one layer.

    Attributes:
        votes: (H, P) float32 before pooling; None where the method does not pool.
        scores: (H, P) float32, for the top-k.
        cuts: (H,) float32, the lowest score in the top-k; NaN if it is empty.
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
    kept = kept.expand(max(len(kept), layer.num_kv_heads), -1)  # all heads share one set
    mask = torch.zeros(kept.shape[0], tokens + 1, dtype=torch.bool, device=kept.device)
    return mask.scatter(1, kept.where(kept >= 0, tokens), True)[:, :tokens]


def rating(
    policy: Policy, layer: PromptLayer, selection: Selection | None, kept: Tensor
) -> Rating | None:
    """The scores of one layer; None if a method keeps by position or does not report them."""
    scorer = scorer_of(policy)
    votes, scores = _scored(scorer, layer, selection)
    if scores is None or scores.shape[1] not in (1, kept.shape[0]) or not scores.shape[-1]:
        return None
    scores = scores.expand(-1, kept.shape[0], -1)
    chosen = kept[:, : scores.shape[-1]].clone()
    if scorer is not None:
        chosen[:, : scorer.sink_tokens] = False  # kept by position, whatever their scores
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
    return scorer.votes(layer), scorer.score(layer)


def scorer_of(policy: Policy) -> PrefixPolicy | None:
    """The wrapped policy that scores the prefix."""
    for name in ("policy", "prompt"):
        inner = getattr(policy, name, None)
        if isinstance(inner, Policy):
            return scorer_of(inner)
    return policy if isinstance(policy, PrefixPolicy) else None


@dataclass(frozen=True, kw_only=True)
class SeenLayer:
    """What a method did to a layer.

    Attributes:
        policy: the method.
        states: keys, values and queries that it saw, on the model's device.
        kept: (H, T) bool in main memory, as are the others.
        votes: see `Rating`, also for the others.
    """

    policy: Policy
    states: PromptLayer
    kept: Tensor
    votes: Tensor | None
    scores: Tensor | None
    cuts: Tensor | None

    @classmethod
    def of_all(cls, policy: Policy, layers: Sequence[PromptLayer]) -> "list[SeenLayer]":
        """Ask a policy about all layers of a prompt, as they are seen while it is read."""
        shown = [
            replace(layer, queries=last_tokens(layer.queries, policy.query_tokens))
            for layer in layers
        ]
        chosen = policy.select_all(shown)
        return [cls._of(policy, *each) for each in zip(shown, chosen, strict=True)]

    @classmethod
    def _of(cls, policy: Policy, layer: PromptLayer, selection: Selection | None) -> "SeenLayer":
        kept = kept_mask(selection, layer)
        rated = rating(policy, layer, selection, kept)
        return cls(
            policy=policy,
            states=replace(layer),  # without what `PromptLayer.once` has computed
            kept=kept.cpu(),
            votes=None if rated is None or rated.votes is None else rated.votes.cpu(),
            scores=None if rated is None else rated.scores.cpu(),
            cuts=None if rated is None else rated.cuts.cpu(),
        )

    def shares_on(self, source: Tensor) -> Tensor | None:
        """(H,) float32: the part of each head's votes that falls on the (T,) bool positions.

        Of its scores if the method does not pool; None if some are negative or none are reported.
        """
        rated = self.scores if self.votes is None else self.votes
        if rated is None or bool((rated < 0).any()):
            return None
        total = rated.sum(dim=-1)
        return (rated * source[: rated.shape[-1]]).sum(dim=-1) / total.where(total > 0, 1.0)


def telling_head(layers: Sequence[SeenLayer], source: Tensor) -> tuple[int, int, float] | None:
    """The head that gives the (T,) bool positions the largest part of its votes.

    Returns:
        Index into `layers`, head index, and that part; None if no head gives any.
    """
    best = None
    for place, layer in enumerate(layers):
        shares = layer.shares_on(source)
        if shares is None:
            continue
        share, head = shares.max(dim=-1)
        if share > (0.0 if best is None else best[2]):
            best = place, int(head), float(share)
    return best


@dataclass(frozen=True, kw_only=True)
class KeptOf:
    """How much a method kept of some parts of a prompt.

    Attributes:
        share: of their tokens, counting for each part the head that keeps most of it.
        heads: how many heads keep a token of a part, on average over its tokens.
        of_heads: number of heads in all layers.
    """

    share: float
    heads: float
    of_heads: int

    @classmethod
    def parts(cls, layers: Sequence[SeenLayer], spans: Sequence[Span]) -> "KeptOf | None":
        """For spans that do not overlap; None without spans."""
        tokens = sum(span.stop - span.start for span in spans)
        if not tokens:
            return None
        most, total = 0, 0
        for span in spans:
            by_head = torch.cat([layer.kept[:, span.start : span.stop].sum(-1) for layer in layers])
            most, total = most + int(by_head.max()), total + int(by_head.sum())
        of_heads = sum(len(layer.kept) for layer in layers)
        return cls(share=most / tokens, heads=total / tokens, of_heads=of_heads)
