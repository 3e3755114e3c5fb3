"""Tensors as short texts: kept positions as bits, scores as bytes."""

import base64

import torch
from torch import Tensor

DECADES = 6
"""Powers of ten that a byte spans below a head's highest score."""


def packed_bits(kept: Tensor) -> str:
    """(H, T) bool as base64 of whole bytes per head, the first position in the lowest bit."""
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

    Each head has a scale of its own, unless all share one.
    """
    heads, tokens = scores.shape
    bins = -(-tokens // bin_tokens)
    padded = torch.full((heads, bins * bin_tokens), float("-inf"))
    padded[:, :tokens] = scores.float().cpu()
    highest = padded.view(heads, bins, bin_tokens).amax(dim=-1)
    every = scores.float().cpu()
    if one_scale:
        highest, every = highest.reshape(1, -1), every.reshape(1, -1)
    return _text(levels(highest, every).round().to(torch.uint8))


def levels(values: Tensor, scores: Tensor) -> Tensor:
    """Where values stand between a head's lowest and highest score, from 0 to 255.

    On a scale of powers of ten where no score is negative, as attention is; evenly spaced where one
    is, as similarities are.

    Args:
        values: (H, N) float32.
        scores: (H, P) float32, all of the heads' scores.
    """
    top = scores.amax(dim=-1, keepdim=True)
    if is_logarithmic(scores):
        tiny = torch.finfo(torch.float32).tiny
        share = (values / top.clamp(min=tiny)).clamp(min=tiny)
        return (255 * (1 + share.log10() / DECADES)).clamp(0, 255)
    low = scores.amin(dim=-1, keepdim=True)
    return (255 * (values - low) / (top - low).clamp(min=1e-12)).clamp(0, 255)


def is_logarithmic(scores: Tensor) -> bool:
    """Whether `levels` counts powers of ten."""
    return bool((scores >= 0).all())


def _text(data: Tensor) -> str:
    return base64.b64encode(data.contiguous().numpy().tobytes()).decode()
