"""The vote of one head as a picture: who votes for what, and in which order positions win."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from snapkv import ops
from snapkv.inspector.packing import packed_numbers, packed_scores
from snapkv.inspector.scores import scorer_of
from snapkv.inspector.seen import SeenLayer
from snapkv.policies import SnapKV

MOST_WEIGHT_BYTES = 2**18
"""Of the weights of all voters; beyond it neighbours share a column."""

MOST_RANKS = 2**14
"""Positions in the order that the slider follows."""


@dataclass(frozen=True, kw_only=True)
class Heat:
    """The vote of one head.

    Attributes:
        layer: the layer's index in the model.
        head: of the layer.
        share: of its votes that falls on what the answer needs.
        rows: queries of the observation window, the last tokens of the prompt; 0 where the method
            has none.
        bin_tokens: neighbours that share a column.
        weights: the attention of each row to the prefix, all on one scale; see `packed_scores`.
        order: positions of the prefix, the first to be kept first, the first `MOST_RANKS` of them;
            see `packed_numbers`. None where the method does not keep the best of its scores by
            itself, so that no other number of tokens can be told from them, and where it keeps
            more than `MOST_RANKS`.
        prefix_tokens: how many there are in all.
        best_tokens: how many of them are kept.
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
    """The picture of the head that `telling_head` found; None where it found none."""
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
    """The (P,) positions of the prefix in the order in which a head keeps them.

    The first tokens that stay whatever their scores come first, then the best; of equal scores the
    lower position. None where that is not how the method has chosen.
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

    None where the method lets no window vote. The sum over the rows is the head's votes, except
    for `group_reduce="max"`, which combines the sums.
    """
    scorer, states = scorer_of(seen.policy), seen.states
    if not isinstance(scorer, SnapKV) or seen.scores is None:
        return None
    queries = states.queries[:, :, -scorer.window_size :]
    query_heads, key_heads = queries.shape[1], states.keys.shape[1]
    per_head = query_heads // len(seen.scores)
    own = slice(head * per_head, (head + 1) * per_head)
    shared = query_heads // key_heads
    keys = states.keys[:, own.start // shared : (own.stop - 1) // shared + 1]
    options = states.score_options
    if options.sink_logits is not None:
        options = replace(options, sink_logits=options.sink_logits[own])
    weights = ops.attention_weights(queries[:, own], keys, options)[0, ..., : -queries.shape[2]]
    how = "mean" if scorer.group_reduce == "none" else scorer.group_reduce  # of one head, itself
    return ops.reduce_group(weights.flatten(1)[None], 1, how)[0, 0].view(weights.shape[1:]).cpu()
