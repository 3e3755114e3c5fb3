"""Attention to heads in few bits that multiplies with the integers and never decodes a layer.

Within a block a key is ``scale * integer + least`` by channel, so a query is multiplied by the
scales instead of the keys, and by the least numbers once per block. A value is the same by group of
channels, so the weights are multiplied by its scales. Many queries would make that more work than
decoding a block: then it is decoded. Either way a few blocks at a time are spread out.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from snapkv.ops.codes.coding import Codes
from snapkv.ops.codes.layout import BlockLayout
from snapkv.ops.ragged.blocked import attend_pieces
from snapkv.ops.scores import ScoreOptions

SPREAD_ELEMENTS = 2**20
"""Of keys or values that are spread out at a time."""


def coded_attention(
    queries: Tensor,
    keys: Codes,
    values: Codes,
    layout: BlockLayout,
    tail_keys: Tensor,
    tail_values: Tensor,
    score_options: ScoreOptions,
    *,
    own_visible: Tensor | None,
) -> Tensor:
    """As `snapkv.ops.coded_attention`; products and softmax in float32."""
    pieces = _CodedPieces(keys, values, layout)
    return attend_pieces(queries, pieces, tail_keys, tail_values, score_options, own_visible)


class _CodedPieces:
    """Blocks of codes as attention goes over them; R rows of queries per head."""

    def __init__(self, keys: Codes, values: Codes, layout: BlockLayout) -> None:
        self._keys, self._values = keys, values
        self.heads, self.hidden = layout.heads, layout.hidden
        self._G = layout.block_tokens

    def products(self, asked: Tensor) -> Tensor:
        """(M, R, G) float32 products of every block's queries, (M, R, D), and its keys."""
        few = asked.shape[1] < self._G and self._keys.along == "tokens"
        score = _products_with_integers if few else _products_with_states
        return self._in_parts(score, asked.float(), self._keys)

    def mixed(self, weights: Tensor) -> Tensor:
        """(M, R, Dv) float32: every block's values by weights, (M, R, G)."""
        few = weights.shape[1] < self._G
        mix = _mixed_integers if few else _mixed_states
        return self._in_parts(mix, weights, self._values)

    def _in_parts(
        self, multiply: Callable[[Tensor, Codes], Tensor], rows: Tensor, codes: Codes
    ) -> Tensor:
        """A product of every block, of so many at a time as may be spread out."""
        step = max(1, SPREAD_ELEMENTS // (self._G * codes.channels))
        if len(codes) <= step:
            return multiply(rows, codes)
        parts = [slice(start, start + step) for start in range(0, len(codes), step)]
        return torch.cat([multiply(rows[part], codes.blocks(part)) for part in parts])


def _products_with_integers(asked: Tensor, keys: Codes) -> Tensor:
    scaled = asked * keys.scale.float()
    products = torch.bmm(scaled, keys.integers()[..., : keys.channels].mT)
    return products.add_(torch.bmm(asked, keys.least.float().mT))


def _products_with_states(asked: Tensor, keys: Codes) -> Tensor:
    return asked @ keys.decoded().float().mT


def _mixed_integers(weights: Tensor, values: Codes) -> Tensor:
    M, R, G = weights.shape
    groups, numbers = values.scale.shape[-1], values.integers()
    scaled = weights[:, :, None] * values.scale.float().mT.contiguous()[:, None]
    products = torch.bmm(scaled.view(M, R * groups, G), numbers)
    own = products.view(M, R, groups, groups, numbers.shape[-1] // groups)
    own = own.diagonal(dim1=2, dim2=3)  # (M, R, channels of a group, groups)
    mixed = own + torch.bmm(weights, values.least.float())[:, :, None]
    return mixed.transpose(2, 3).flatten(2)[..., : values.channels]


def _mixed_states(weights: Tensor, values: Codes) -> Tensor:
    return weights @ values.decoded().float()
