"""Tiny models with equal weights on every machine: integers that are scaled by powers of two."""

import functools
import math

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from snapkv.policies.gate import Gate, feature_count
from tests.families import KINDS, small_config

_MODELS = {
    "llama": ("llama", {}),
    "llama-eager": ("eager", {}),
    "gemma3": ("sliding", {"tie_word_embeddings": False}),  # tied, it would stammer
    "deepseek": ("latent", {}),
    "least": ("llama", {"num_hidden_layers": 2, "head_dim": 4}),
    "gpt-oss": ("sinks", {}),
}
"""The kind of each model and the changes to it."""

MODELS = tuple(name for name in _MODELS if name != "least")
"""Plain attention in two implementations; sliding and full layers; latent attention; sinks."""

_SPREAD = 148.0  # standard deviation of the sum of four bytes
_MODULUS = 2**31 - 1


@functools.cache
def golden_model(name: str, *, nudged: bool = False) -> PreTrainedModel:
    """Return a model of `MODELS`; `nudged` changes its weights by one part in a million."""
    kind, changes = _MODELS[name]
    model = AutoModelForCausalLM.from_config(
        small_config(kind, **changes), attn_implementation=KINDS[kind][1]
    )
    with torch.no_grad():
        for number, (label, weight) in enumerate(sorted(model.named_parameters())):
            if "norm" not in label:
                weight.copy_(_filling(label, weight.shape, number))
            if nudged:
                weight.mul_(1 + _bytes(weight.numel(), 7919 + number).view(weight.shape) * 2.0**-28)
    return model.float().eval()


def golden_gate() -> Gate:
    """Return a gate of drawn weights that fits the models of plain attention."""
    layers, heads, size = 3, 2, 8
    shape = layers, heads, feature_count(size, size)
    return Gate.of(_bytes(math.prod(shape), 500).view(shape) / 128 - 1, size, size)


def _filling(label: str, shape: torch.Size, number: int) -> torch.Tensor:
    """Return roughly normal integers from -510 to 510, scaled so that products keep their size."""
    count = shape.numel()
    drawn = sum(_bytes(count, 4 * number + part) for part in range(4)) - 510
    inputs = shape[-1] if len(shape) > 1 else 16
    gain = 1.0 if "embed" in label else 1.5 / math.sqrt(inputs)
    return drawn.view(shape).float() * 2.0 ** round(math.log2(gain / _SPREAD))


def _bytes(count: int, seed: int) -> torch.Tensor:
    """Return integers from 0 to 255 from two rounds of a multiplicative generator."""
    state = (torch.arange(count, dtype=torch.int64) + 1) * 48271 + (seed + 1) * 69621
    for _ in range(2):
        state = (state % _MODULUS) * 1_664_525 % _MODULUS
        state = state ^ (state >> 13)
    return (state >> 9) & 255


def drawn_ids(rows: int, tokens: int, seed: int) -> torch.Tensor:
    """Return ids from 3 to 63, (rows, tokens) int64; the middle of a prompt occurs twice."""
    ids = 3 + _bytes(rows * tokens, 1000 + seed).view(rows, tokens) % 61
    third = tokens // 3
    if third > 8:
        ids[:, -third:] = ids[:, third : 2 * third]
    return ids
