"""Which layers are compressed together, as rows of a batch."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from snapkv import ops
from snapkv_vllm.layers import VotingLayer
from snapkv_vllm.layouts import Layout, layout_of

MOST_BYTES = 16 << 20
"""Of keys and values that are copied at a time, unless one layer takes more."""


@dataclass(frozen=True)
class LayerRun:
    """Neighbouring layers of one KV cache group that are alike.

    Attributes:
        group: index of vLLM's KV cache group.
        depth: how many compressed layers come before the first.
        layers: by name.
        layout: of their caches.
    """

    group: int
    depth: int
    layers: Mapping[str, VotingLayer]
    layout: Layout

    @property
    def first(self) -> VotingLayer:
        """One of the layers, to ask what all have in common."""
        return next(iter(self.layers.values()))

    @property
    def votes_impl(self) -> ops.Implementation:
        """How votes are counted."""
        return "by_head" if self._half_on_cpu else "auto"

    def blocks_of(self, blocks: Sequence[int], block_tokens: int) -> Tensor:
        """Blocks of so many tokens as the caches number them, which may be parts of vLLM's."""
        cache = self.first.cache
        numbers = torch.tensor(blocks, device=cache.device)
        parts = block_tokens // cache.shape[2]
        return (numbers[:, None] * parts + torch.arange(parts, device=cache.device)).flatten()

    def within_bounds(self, prompt_tokens: int, kept_tokens: int) -> "Iterator[LayerRun]":
        """The same layers, as many at a time as may be copied.

        In float32 on a CPU that is one, which votes bit for bit as in the library.

        Args:
            prompt_tokens: whose keys are read at a time.
            kept_tokens: whose keys and values are held until they are written.
        """
        cache = self.first.cache
        of_keys = cache.element_size() * cache.shape[1] * cache.shape[3] // 2
        at_once = 1
        if self._half_on_cpu or cache.device.type != "cpu":
            at_once = max(1, MOST_BYTES // (of_keys * (prompt_tokens + 2 * kept_tokens)))
        for start in range(0, len(self.layers), at_once):
            some = slice(start, start + at_once)
            layers = dict(list(self.layers.items())[some])
            yield LayerRun(self.group, self.depth + start, layers, self.layout.part(some))

    @property
    def _half_on_cpu(self) -> bool:
        cache = self.first.cache
        return cache.device.type == "cpu" and cache.dtype in (torch.bfloat16, torch.float16)


def layer_runs(groups: Mapping[int, Mapping[str, VotingLayer]]) -> Iterator[LayerRun]:
    """All layers, once vLLM has allocated their caches.

    Args:
        groups: layers by name, in the order of the model, by KV cache group.
    """
    depth = 0
    for group, layers in groups.items():
        for _, alike in itertools.groupby(layers.items(), lambda item: _kind(*item)):
            run = dict(alike)
            layout = layout_of([layer.wrapped for layer in run.values()])
            yield LayerRun(group, depth, run, layout)
            depth += len(run)


def _kind(name: str, layer: VotingLayer) -> tuple[Any, ...]:
    """What layers have in common that are alike; each with sinks of its own stays alone."""
    options, cache = layer.score_options, layer.cache
    return (
        layer.wrapped.get_attn_backend().get_name(),
        (layer.heads, cache.shape, cache.stride(), cache.dtype),
        (options.scaling, options.softcap),
        None if options.sink_logits is None else name,
    )
