"""Attention to heads of different lengths in pieces of equal size, for large layers.

The flat keys are cut into blocks, whatever head they belong to (`RaggedLayout.pieces`), and one
batched product scores them all. That keeps all threads busy, where a product of a few rows with
thousands of keys spends more time on sharing than on its work. The query heads of a group are rows
of one product, so a key is read once for all of them. The softmax then combines a head's pieces.
"""

from typing import Protocol

import torch
from torch import Tensor

from snapkv.ops.ragged.inputs import TailInputs
from snapkv.ops.ragged.layout import Pieces, RaggedLayout
from snapkv.ops.scores import ScoreOptions

QUERY_BLOCK_TOKENS = 32
"""How many queries are computed at a time, so that scores stay small for many tokens."""


class KeptPieces(Protocol):
    """The keys and values that the heads keep, divided into pieces of the same size.

    There are P pieces of T tokens, and all tokens of a piece belong to one head.
    """

    @property
    def heads(self) -> Tensor | None:
        """The index of the head that each piece belongs to, counted over all rows.

        Shape: (P,) int64; None if each head is one piece.
        """

    def products(self, queries: Tensor) -> Tensor:
        """Multiply the queries of each piece with its keys.

        Args:
            queries: (P, R, D).

        Returns:
            (P, R, T).
        """

    def hide(self, scores: Tensor) -> Tensor:
        """Set the scores of hidden tokens to minus infinity.

        May change `scores` in place.

        Args:
            scores: (P, R, T or more).

        Returns:
            The scores in the same shape.
        """

    def mixed(self, weights: Tensor) -> Tensor:
        """Compute the weighted sum of the values of each piece.

        Args:
            weights: (P, R, T) float32.

        Returns:
            (P, R, Dv).
        """


def ragged_attention(
    inputs: TailInputs, keys: Tensor, values: Tensor, layout: RaggedLayout
) -> Tensor:
    """Compute attention to the kept tokens with a few large matrix products.

    The arguments are those of `snapkv.ops.ragged_attention`. The kept tokens are divided into
    pieces of equal size, and the softmax is in float32.

    Returns:
        (B, Hq, Q, Dv), in the dtype of the tail's values.
    """
    return attend_pieces(inputs, _FlatPieces(layout.pieces, keys, values))


class _FlatPieces:
    """The keys and values of the heads, divided into pieces.

    The pieces are views, and copies if a piece holds tokens of several heads.
    """

    def __init__(self, pieces: Pieces, keys: Tensor, values: Tensor) -> None:
        self.heads, self._hidden = pieces.heads, pieces.hidden
        self._keys, self._values = pieces.cut(keys), pieces.cut(values)

    def products(self, queries: Tensor) -> Tensor:
        blocks, edges = self._keys
        of_blocks, of_edges = queries[: len(blocks)], queries[len(blocks) :]
        return torch.cat([torch.bmm(of_blocks, blocks.mT), torch.bmm(of_edges, edges.mT)])

    def hide(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(self._hidden, float("-inf"))

    def mixed(self, weights: Tensor) -> Tensor:
        blocks, edges = self._values
        whole, weights = len(blocks), weights.to(blocks.dtype)
        return torch.cat([torch.bmm(weights[:whole], blocks), torch.bmm(weights[whole:], edges)])


def attend_pieces(inputs: TailInputs, pieces: KeptPieces) -> Tensor:
    """Compute the attention of the queries to all pieces and to the tail.

    A few queries are handled at a time.

    Returns:
        (B, Hq, Q, Dv).
    """
    Q = inputs.queries.shape[2]
    if Q <= QUERY_BLOCK_TOKENS:
        return _attend_block(inputs, pieces)
    starts = range(0, Q, QUERY_BLOCK_TOKENS)
    blocks = (inputs.block(start, min(start + QUERY_BLOCK_TOKENS, Q)) for start in starts)
    return torch.cat([_attend_block(block, pieces) for block in blocks], dim=2)


def _attend_block(inputs: TailInputs, pieces: KeptPieces) -> Tensor:
    """Compute the attention of a block of queries, whose scores fit into memory.

    In the body, R = G * Q is the number of rows of queries per head.

    Returns:
        (B, Hq, Q, Dv), in the dtype of the tail's values.
    """
    (B, Hq, Q, D), (H, S) = inputs.queries.shape, inputs.tail_keys.shape[1:3]
    tail_keys, tail_values = inputs.tail_keys.flatten(0, 1), inputs.tail_values.flatten(0, 1)
    heads, dtype, options = pieces.heads, tail_values.dtype, inputs.score_options
    rows = inputs.queries.reshape(B * H, Hq // H * Q, D)
    logits = sinks_of_rows(options, rows, Q)
    of_tail = torch.bmm(rows, tail_keys.mT).float()
    hidden = None
    if Q > 1 or inputs.own_visible is not None or inputs.tail_tokens is not None:
        hidden = inputs.hidden().repeat(Hq // H, 1)
    if heads is None:
        of_kept = pieces.products(rows).float()
        weights = _weights_of_heads(of_kept, of_tail, pieces, options, hidden, logits)
        output = torch.bmm(weights[..., -S:].to(dtype), tail_values).float()
        output = output + pieces.mixed(weights[..., :-S]).float()
        return output.to(dtype).view(B, Hq, Q, -1)
    of_tail = options.scores(of_tail)
    if hidden is not None:
        of_tail = of_tail.masked_fill(hidden, float("-inf"))
    of_kept = options.scores(pieces.products(rows.index_select(0, heads)).float())
    of_kept = pieces.hide(of_kept)
    most = _most(of_kept, of_tail, logits, heads)
    of_kept = (of_kept - most.index_select(0, heads)).exp_()
    of_tail = (of_tail - most).exp_()
    total = of_tail.sum(dim=-1, keepdim=True)
    total = total.index_add(0, heads, of_kept.sum(dim=-1, keepdim=True))
    if logits is not None:
        total = total + (logits - most).exp()
    output = torch.bmm(of_tail.to(dtype), tail_values).float()
    output = output.index_add(0, heads, pieces.mixed(of_kept).float()) / total
    return output.to(dtype).view(B, Hq, Q, -1)


def _weights_of_heads(
    of_kept: Tensor,
    of_tail: Tensor,
    pieces: KeptPieces,
    score_options: ScoreOptions,
    hidden: Tensor | None,
    logits: Tensor | None,
) -> Tensor:
    """Compute the attention weights if there is one piece for each head.

    Args:
        of_kept: (B * H, R, T) products with the kept keys.
        of_tail: (B * H, R, S) products with the tail's keys.
        pieces: what the heads keep.
        score_options: how products become scores.
        hidden: (R, S) bool, which slots of the tail each row of queries does not see, or None.
        logits: (B * H, R, 1) sink logits, or None.

    Returns:
        (B * H, R, T + S) float32.
    """
    T, S = of_kept.shape[2], of_tail.shape[2]
    scores = pieces.hide(score_options.scores(torch.cat([of_kept, of_tail], dim=-1)))
    if hidden is not None:
        scores[..., T:].masked_fill_(hidden, float("-inf"))
    if logits is None:
        return scores.softmax(dim=-1)
    return torch.cat([scores, logits], dim=-1).softmax(dim=-1)[..., : T + S]


def sinks_of_rows(score_options: ScoreOptions, rows: Tensor, queries: int) -> Tensor | None:
    """Return the logit of the learned attention sink for each row of queries.

    Args:
        score_options: the options with the logits.
        rows: (B * H, R, D), the queries.
        queries: how many of the R rows each query head has.

    Returns:
        (B * H, R, 1) float32, or None if the model has no sinks.
    """
    sinks = score_options.sink_logits
    if sinks is None:
        return None
    of_rows = sinks.float().repeat_interleave(queries)
    return of_rows.repeat(rows.shape[:2].numel() // len(of_rows)).view(*rows.shape[:2], 1)


def _most(of_kept: Tensor, of_tail: Tensor, logits: Tensor | None, heads: Tensor) -> Tensor:
    """Return the highest score of each row of queries, without gradients.

    Returns:
        (B * H, R, 1).
    """
    most, of_pieces = of_tail.detach().amax(dim=-1), of_kept.detach().amax(dim=-1)
    most = most.scatter_reduce(0, heads[:, None].expand_as(of_pieces), of_pieces, "amax")
    if logits is not None:
        most = torch.maximum(most, logits.detach()[..., 0])
    return most[..., None]
