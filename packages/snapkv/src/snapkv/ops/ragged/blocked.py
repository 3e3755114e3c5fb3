"""Attention to heads of different length in blocks of equal size: for large layers.

The flat keys fall into blocks, whatever head they belong to (`RaggedLayout.pieces`), and one
batched product scores them all: it shares its threads out well, where a product of a few rows with
thousands of keys spends more time on sharing than on its work. The query heads of a group are rows
of one product, so a key is read once for all of them. The softmax puts a head's pieces together.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from snapkv.ops.ragged.layout import Pieces, RaggedLayout
from snapkv.ops.scores import ScoreOptions

QUERY_BLOCK_TOKENS = 32
"""Queries at a time, so that scores stay small when many tokens come at once."""


class KeptPieces(Protocol):
    """What heads keep, in P pieces of T tokens of one head each."""

    @property
    def heads(self) -> Tensor | None:
        """(P,) int64, the head of every piece, counted over all rows; None for one a head."""

    def products(self, asked: Tensor) -> Tensor:
        """(P, R, T) products of every piece's queries, (P, R, D), and its keys."""

    def hide(self, scores: Tensor) -> Tensor:
        """The scores, (P, R, T or more), which may be changed, -inf for what does not count."""

    def mixed(self, weights: Tensor) -> Tensor:
        """(P, R, Dv): every piece's values by float32 weights, (P, R, T)."""


def ragged_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: RaggedLayout,
    tail_keys: Tensor,
    tail_values: Tensor,
    score_options: ScoreOptions,
    *,
    own_visible: Tensor | None,
    tail_tokens: Tensor | None,
) -> Tensor:
    """As `snapkv.ops.ragged_attention`; products in the dtype of the states, softmax in float32."""
    pieces = _FlatPieces(layout.pieces, keys, values)
    tail = TailStates(tail_keys, tail_values, tail_tokens)
    return attend_pieces(queries, pieces, tail, score_options, own_visible)


@dataclass(frozen=True)
class TailStates:
    """The tokens after what heads keep, the last Q of them the queries' own.

    Attributes:
        keys: (B, H, S, D).
        values: (B, H, S, Dv).
        tokens: () int64, how many of the S there are, where only the device is to know; None for
            all.
    """

    keys: Tensor
    values: Tensor
    tokens: Tensor | None

    def before(self, count: int) -> "TailStates":
        """Without the last ones."""
        if not count:
            return self
        if self.tokens is not None:
            return replace(self, tokens=self.tokens - count)
        return replace(self, keys=self.keys[:, :, :-count], values=self.values[:, :, :-count])

    def hidden(self, queries: int, own_visible: Tensor | None, before: int = 0) -> Tensor:
        """(queries, before + S) bool: which of it, and of what is before, each query does not see.

        `own_visible` is (Q, N) bool, which of the last N tokens each of the queries sees.
        """
        tokens = before + self.keys.shape[2]
        end = tokens if self.tokens is None else self.tokens + before
        places = torch.arange(tokens, device=self.keys.device)
        own = torch.arange(1 - queries, 1, device=self.keys.device)[:, None] + end
        hidden = places >= own
        if own_visible is None:
            return hidden
        among = places - end + own_visible.shape[1]
        apart = ~own_visible[:, among.clamp(0, own_visible.shape[1] - 1)]
        return hidden | (apart & (among >= 0))


class _FlatPieces:
    """Views of flat keys and values, and copies where a piece holds several heads."""

    def __init__(self, pieces: Pieces, keys: Tensor, values: Tensor) -> None:
        self.heads, self._hidden = pieces.heads, pieces.hidden
        self._keys, self._values = pieces.cut(keys), pieces.cut(values)

    def products(self, asked: Tensor) -> Tensor:
        blocks, edges = self._keys
        whole = len(blocks)
        return torch.cat([torch.bmm(asked[:whole], blocks.mT), torch.bmm(asked[whole:], edges.mT)])

    def hide(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(self._hidden, float("-inf"))

    def mixed(self, weights: Tensor) -> Tensor:
        blocks, edges = self._values
        whole, weights = len(blocks), weights.to(blocks.dtype)
        return torch.cat([torch.bmm(weights[:whole], blocks), torch.bmm(weights[whole:], edges)])


def attend_pieces(
    queries: Tensor,
    pieces: KeptPieces,
    tail: TailStates,
    score_options: ScoreOptions,
    own_visible: Tensor | None,
) -> Tensor:
    """(B, Hq, Q, Dv): attention to pieces and to a tail, so many queries at a time."""
    Q, outputs = queries.shape[2], []
    for start in range(0, Q, QUERY_BLOCK_TOKENS):
        stop = min(start + QUERY_BLOCK_TOKENS, Q)
        seen = None if own_visible is None else own_visible[start:stop, :stop]
        block = queries[:, :, start:stop]
        outputs.append(_attend_block(block, pieces, tail.before(Q - stop), score_options, seen))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _attend_block(
    queries: Tensor,
    pieces: KeptPieces,
    tail: TailStates,
    score_options: ScoreOptions,
    own_visible: Tensor | None,
) -> Tensor:
    """Some queries, the last of the tail; R = G * Q rows of queries per head.

    `own_visible` is (Q, N) bool: which of the last N tokens of the tail each of them sees.
    """
    B, Hq, Q, D = queries.shape
    H, S = tail.keys.shape[1], tail.keys.shape[2]
    heads, dtype = pieces.heads, tail.values.dtype
    rows = queries.reshape(B * H, Hq // H * Q, D)
    logits = sinks_of_rows(score_options, rows, Q)
    of_tail = torch.bmm(rows, tail.keys.flatten(0, 1).mT).float()
    hidden = None
    if Q > 1 or own_visible is not None or tail.tokens is not None:
        hidden = tail.hidden(Q, own_visible).repeat(Hq // H, 1)
    if heads is None:
        of_kept = pieces.products(rows).float()
        weights = _weights_of_heads(of_kept, of_tail, pieces, score_options, hidden, logits)
        output = torch.bmm(weights[..., -S:].to(dtype), tail.values.flatten(0, 1)).float()
        output = output + pieces.mixed(weights[..., :-S]).float()
        return output.to(dtype).view(B, Hq, Q, -1)
    of_tail = score_options.scores(of_tail)
    if hidden is not None:
        of_tail = of_tail.masked_fill(hidden, float("-inf"))
    of_kept = score_options.scores(pieces.products(rows.index_select(0, heads)).float())
    of_kept = pieces.hide(of_kept)
    most = _most(of_kept, of_tail, logits, heads)
    of_kept = (of_kept - most.index_select(0, heads)).exp_()
    of_tail = (of_tail - most).exp_()
    total = of_tail.sum(dim=-1, keepdim=True)
    total = total.index_add(0, heads, of_kept.sum(dim=-1, keepdim=True))
    if logits is not None:
        total = total + (logits - most).exp()
    output = torch.bmm(of_tail.to(dtype), tail.values.flatten(0, 1)).float()
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
    """(B * H, R, T + S) float32 weights of what heads of one piece each keep, and of the tail."""
    T, S = of_kept.shape[2], of_tail.shape[2]
    scores = pieces.hide(score_options.scores(torch.cat([of_kept, of_tail], dim=-1)))
    if hidden is not None:
        scores[..., T:].masked_fill_(hidden, float("-inf"))
    if logits is None:
        return scores.softmax(dim=-1)
    return torch.cat([scores, logits], dim=-1).softmax(dim=-1)[..., : T + S]


def sinks_of_rows(score_options: ScoreOptions, rows: Tensor, queries: int) -> Tensor | None:
    """The sink of every row of queries, (B * H, R, 1) float32, of so many a head; or None."""
    sinks = score_options.sink_logits
    if sinks is None:
        return None
    of_rows = sinks.float().repeat_interleave(queries)
    return of_rows.repeat(rows.shape[:2].numel() // len(of_rows)).view(*rows.shape[:2], 1)


def _most(of_kept: Tensor, of_tail: Tensor, logits: Tensor | None, heads: Tensor) -> Tensor:
    """(B * H, R, 1): the highest score of every row of queries, which needs no gradient."""
    most, of_pieces = of_tail.detach().amax(dim=-1), of_kept.detach().amax(dim=-1)
    most = most.scatter_reduce(0, heads[:, None].expand_as(of_pieces), of_pieces, "amax")
    if logits is not None:
        most = torch.maximum(most, logits.detach()[..., 0])
    return most[..., None]
