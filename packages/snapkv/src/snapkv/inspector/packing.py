"""Data for the page as base64: kept positions as bits, scores as bytes, one head's vote."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from snapkv import ops
from snapkv.inspector.scores import SeenLayer, scorer_of
from snapkv.policies import SnapKV

DECADES = 6
"""Powers of ten below a head's highest score that a byte covers."""

MOST_WEIGHT_BYTES = 2**18
"""Limit for the attention weights of all queries; beyond it, neighbours share a column."""

MOST_RANKS = 2**14
"""Limit for the positions that the slider covers."""


def packed_bits(kept: Tensor) -> str:
    """(H, T) bool as base64, padded to bytes per head, the first position in the lowest bit."""
    heads, tokens = kept.shape
    padded = torch.zeros(heads, -(-tokens // 8) * 8, dtype=torch.uint8)
    padded[:, :tokens] = kept.cpu()
    weights = 2 ** torch.arange(8, dtype=torch.uint8)
    return _text((padded.view(heads, -1, 8) * weights).sum(dim=-1, dtype=torch.uint8))


def packed_numbers(numbers: Tensor) -> str:
    """(N,) int64 as base64, four bytes for every number, the lowest byte first."""
    return _text(numbers.cpu().to(torch.int32))


def packed_scores(scores: Tensor, bin_tokens: int, *, one_scale: bool = False) -> str:
    """(H, P) scores as base64, a byte for every bin: the highest score in it; see `levels`.

    Each head has its own scale, unless all share one.
    """
    heads, tokens = scores.shape
    bins = -(-tokens // bin_tokens)
    padded = torch.full((heads, bins * bin_tokens), float("-inf"), dtype=torch.float32)
    padded[:, :tokens] = scores.float().cpu()
    highest = padded.view(heads, bins, bin_tokens).amax(dim=-1)
    every = scores.float().cpu()
    if one_scale:
        highest, every = highest.reshape(1, -1), every.reshape(1, -1)
    return _text(levels(highest, every).round().to(torch.uint8))


def levels(values: Tensor, scores: Tensor) -> Tensor:
    """(H, N) values on a scale of 0 to 255 from their head's lowest to highest (H, P) score.

    The scale is logarithmic if no score is negative, as for attention; linear otherwise, as for
    similarities.
    """
    top = scores.amax(dim=-1, keepdim=True)
    if is_logarithmic(scores):
        tiny = torch.finfo(torch.float32).tiny
        share = (values / top.clamp(min=tiny)).clamp(min=tiny)
        return (255 * (1 + share.log10() / DECADES)).clamp(0, 255)
    low = scores.amin(dim=-1, keepdim=True)
    return (255 * (values - low) / (top - low).clamp(min=1e-12)).clamp(0, 255)


def is_logarithmic(scores: Tensor) -> bool:
    """Whether `levels` are logarithmic."""
    return bool((scores >= 0).all())


def _text(data: Tensor) -> str:
    return base64.b64encode(data.contiguous().numpy().tobytes()).decode()


@dataclass(frozen=True, kw_only=True)
class Heat:
    """The vote of one head.

    Attributes:
        layer: the layer's index in the model.
        head: of the layer.
        share: the part of its votes for what the answer needs.
        rows: queries of the observation window, the last tokens of the prompt; 0 without a
            window.
        bin_tokens: neighbours that share a column.
        weights: the attention of each row to the prefix, all on one scale; see `packed_scores`.
        order: the top `MOST_RANKS` positions of the prefix by descending score; see
            `packed_numbers`. None if the method does not keep the top-k of its scores, so that the
            choice at another budget is unknown, or if it keeps more than `MOST_RANKS`.
        prefix_tokens: number of positions in the prefix.
        best_tokens: how many of the prefix are kept.
    """

    layer: int
    head: int
    share: float
    rows: int = 0
    bin_tokens: int = 1
    weights: str | None = None
    order: str | None = None
    prefix_tokens: int = 0
    best_tokens: int = 0


def heat(layers: Sequence[SeenLayer], telling: tuple[int, int, float] | None) -> Heat | None:
    """The vote of the head that `telling_head` found; None if it found none."""
    if telling is None:
        return None
    place, head, share = telling
    seen = layers[place]
    made = Heat(layer=seen.states.layer_idx, head=head, share=share)
    if (order := win_order(seen, head)) is not None:
        kept = int(seen.kept[head, : len(order)].sum())
        best = packed_numbers(order[:MOST_RANKS]) if kept <= MOST_RANKS else None
        made = replace(made, order=best, prefix_tokens=len(order), best_tokens=kept)
    weights = window_weights(seen, head)
    if weights is None:
        return made
    rows, tokens = weights.shape
    bin_tokens = -(-rows * tokens // MOST_WEIGHT_BYTES)
    packed = packed_scores(weights, bin_tokens, one_scale=True)
    return replace(made, rows=rows, bin_tokens=bin_tokens, weights=packed)


def win_order(seen: SeenLayer, head: int) -> Tensor | None:
    """The (P,) positions of the prefix by descending score of a head.

    Always-kept first tokens come first; of equal scores, the lower position. None if the method
    does not choose that way.
    """
    scorer = scorer_of(seen.policy)
    if seen.scores is None or scorer is None:
        return None
    scores = seen.scores[head].clone()
    scores[: scorer.sink_tokens] = float("inf")
    order = scores.argsort(descending=True, stable=True)
    kept = seen.kept[head, : len(order)]
    chosen = torch.zeros_like(kept).scatter(0, order[: int(kept.sum())], True)
    return order if torch.equal(chosen, kept) else None


def window_weights(seen: SeenLayer, head: int) -> Tensor | None:
    """(W, P) float32: the attention of the window's queries, combined over the head's query heads.

    None without an observation window. The sum over the rows is the head's votes, except
    for `group_reduce="max"`, which combines the sums.
    """
    scorer, states = scorer_of(seen.policy), seen.states
    if not isinstance(scorer, SnapKV) or seen.scores is None:
        return None
    queries = states.queries[:, :, -scorer.query_tokens :]
    query_heads, key_heads = queries.shape[1], states.keys.shape[1]
    per_head = query_heads // len(seen.scores)
    own = slice(head * per_head, (head + 1) * per_head)
    shared = query_heads // key_heads
    keys = states.keys[:, own.start // shared : (own.stop - 1) // shared + 1]
    options = states.score_options
    if options.sink_logits is not None:
        options = replace(options, sink_logits=options.sink_logits[own])
    weights = ops.attention_weights(queries[:, own], keys, options)[0]
    weights = weights[..., : seen.scores.shape[-1]]
    how = "mean" if scorer.group_reduce == "none" else scorer.group_reduce  # of one head, itself
    return ops.reduce_group(weights.flatten(1)[None], 1, how)[0, 0].view(weights.shape[1:]).cpu()
