"""Attention to quantized heads that multiplies with the integers and never decodes a layer.

Within a block a key is ``scale * integer + least`` by channel, so a query is multiplied by the
scales instead of the keys, and by the least numbers once per block. A value is the same by group of
channels, so the weights are multiplied by its scales. For many queries that would be more work than
decoding a block, so the block is decoded. In both cases a few blocks at a time are unpacked.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from snapkv.ops.codes.coding import Codes
from snapkv.ops.codes.layout import BlockLayout
from snapkv.ops.ragged.blocked import attend_pieces
from snapkv.ops.ragged.inputs import TailInputs

UNPACKED_ELEMENTS = 2**19
"""How many elements of keys or values are unpacked at a time."""


def coded_attention(inputs: TailInputs, keys: Codes, values: Codes, layout: BlockLayout) -> Tensor:
    """Compute attention to quantized heads without decoding all of them at once.

    The arguments are those of `snapkv.ops.coded_attention`. Products and softmax are in float32.

    Returns:
        (B, Hq, Q, Dv), in the dtype of the tail's values.
    """
    return attend_pieces(inputs, _CodedPieces(keys, values, layout))


class _CodedPieces:
    """The quantized keys and values of the heads, divided into pieces of several blocks.

    There are P pieces of n blocks each, and R rows of queries per head. If all heads have the same
    number of blocks, each head is one piece.
    """

    def __init__(self, keys: Codes, values: Codes, layout: BlockLayout) -> None:
        self._keys, self._values = keys, values
        self._n, self._G = layout.piece_blocks, layout.block_tokens
        self.heads, self._layout = layout.piece_heads, layout

    def products(self, queries: Tensor) -> Tensor:
        """Multiply the queries of each piece with its keys.

        Args:
            queries: (P, R, D).

        Returns:
            (P, R, n * G) float32.
        """
        rows, queries = queries.shape[1], _in_fours(queries.float())
        few = rows < self._G and self._keys.along == "tokens"
        multiply = _products_with_integers if few else _products_with_states
        return multiply(queries, self._keys, self._n)[:, :rows].flatten(2)

    def hide(self, scores: Tensor) -> Tensor:
        """Set the scores of empty slots to minus infinity, in place, and return `scores`.

        Args:
            scores: (P, R, n * G or more).
        """
        pieces, tokens = self._layout.hidden
        if len(pieces):
            scores[pieces, :, tokens] = float("-inf")
        return scores

    def mixed(self, weights: Tensor) -> Tensor:
        """Compute the weighted sum of the values of each piece.

        Args:
            weights: (P, R, n * G).

        Returns:
            (P, R, Dv) float32.
        """
        rows, weights = weights.shape[1], _in_fours(weights)
        mix = _mixed_integers if rows < self._G else _mixed_states
        return mix(torch.unflatten(weights, 2, (self._n, self._G)), self._values)[:, :rows]


def _in_fours(rows: Tensor) -> Tensor:
    """Add a row of zeros if one row is missing to a multiple of four, which is faster to multiply.

    Args:
        rows: (P, R, D).

    Returns:
        (P, R or R + 1, D).
    """
    return pad(rows, (0, 0, 0, 1)) if rows.shape[1] % 4 == 3 else rows


def _products_with_integers(queries: Tensor, keys: Codes, n: int) -> Tensor:
    """Multiply the queries of each piece with its keys, without decoding the keys.

    Args:
        queries: (P, R, D) float32.
        keys: P * n blocks of codes.
        n: how many blocks each piece has.

    Returns:
        (P, R, n, G).
    """
    P, R, D = queries.shape
    scaled = (queries[:, None] * keys.scale.view(P, n, 1, D)).view(P * n, R, D)
    products = _in_parts(scaled, keys, lambda part: part.integers()[:, :D])
    least = torch.bmm(queries, keys.least.view(P, n, D).float().mT)
    return torch.unflatten(products, 0, (P, n)).transpose(1, 2) + least[..., None]


def _products_with_states(queries: Tensor, keys: Codes, n: int) -> Tensor:
    """Multiply the queries of each piece with its decoded keys; see `_products_with_integers`."""
    of_blocks = queries.repeat_interleave(n, dim=0)
    products = _in_parts(of_blocks, keys, lambda part: part.decoded().float().mT)
    return torch.unflatten(products, 0, (len(queries), n)).transpose(1, 2)


def _mixed_integers(weights: Tensor, values: Codes) -> Tensor:
    """Compute the weighted sum of the values of each piece, without decoding the values.

    Args:
        weights: (P, R, n, G).
        values: P * n blocks of codes.

    Returns:
        (P, R, Dv).
    """
    P, _, n, G = weights.shape
    groups = values.packed.shape[1]
    scale, least = values.scale.view(P, n, groups, 1, G), values.least.view(P, n, groups, G)
    scaled = (weights.transpose(1, 2)[:, :, None] * scale).flatten(0, 2)
    mixed = _in_parts(scaled, values, lambda part: part.integers().flatten(0, 1))
    mixed = torch.unflatten(mixed, 0, (P, n, groups)).sum(dim=1)
    of_least = torch.bmm(least.transpose(1, 2).flatten(2).float(), weights.flatten(2).mT)
    return (mixed + of_least[..., None]).transpose(1, 2).flatten(2)[..., : values.channels]


def _mixed_states(weights: Tensor, values: Codes) -> Tensor:
    """Compute the weighted sum of the decoded values of each piece; see `_mixed_integers`."""
    P, R, n, G = weights.shape
    of_blocks = weights.transpose(1, 2).reshape(P * n, R, G)
    mixed = _in_parts(of_blocks, values, lambda part: part.decoded().float())
    return torch.unflatten(mixed, 0, (P, n)).sum(dim=1)


def _in_parts(rows: Tensor, codes: Codes, spread: Callable[[Codes], Tensor]) -> Tensor:
    """Multiply the rows with unpacked codes, a few blocks at a time.

    Args:
        rows: (N, R, C), where N is the number of matrices that `spread` returns for all blocks.
        codes: the blocks.
        spread: unpacks some blocks into one or several (C, E) matrices for each block. It is
            called with at most `UNPACKED_ELEMENTS` numbers at a time, or with a single block.

    Returns:
        (N, R, E) float32.
    """
    blocks = len(codes.packed)
    step = max(1, UNPACKED_ELEMENTS * codes.bits // (8 * max(1, codes.packed[:1].numel())))
    if blocks <= step:
        return torch.bmm(rows, spread(codes))
    parts = [codes.blocks(slice(start, start + step)) for start in range(0, blocks, step)]
    matrices = torch.split(rows, len(rows) // blocks * step)
    return torch.cat(
        [torch.bmm(own, spread(part)) for own, part in zip(matrices, parts, strict=True)]
    )
