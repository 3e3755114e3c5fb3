"""vLLM's attention layers: what votes need of them, and which are compressed together."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from snapkv import ops
from snapkv.ops import ScoreOptions
from snapkv_vllm.layouts import Layout, make_layout

MAX_COPY_BYTES = 16 << 20
"""Of keys and values that are copied at a time, unless one layer takes more."""


class VotingLayer:
    """A layer of vLLM (`Attention`) whose queries can be listened to, and its cache.

    Attributes:
        wrapped: vLLM's own.
    """

    def __init__(self, layer: Any) -> None:
        self.wrapped = layer

    @property
    def heads(self) -> int:
        heads: int = self.wrapped.num_heads
        return heads

    @property
    def cache(self) -> Tensor:
        """Where keys and values lie: (blocks, Hkv, block_tokens, numbers of a token)."""
        cache: Tensor = self.wrapped.kv_cache
        return cache

    @property
    def score_options(self) -> ScoreOptions:
        """What the layer does to its scores."""
        impl = self.wrapped.impl
        return ScoreOptions(
            scaling=impl.scale,
            softcap=getattr(impl, "logits_soft_cap", None) or None,
            sink_logits=getattr(impl, "sinks", None),
        )

    def add_query_listener(self, listener: Callable[[Tensor], None]) -> None:
        """Have the (tokens, Hq, D) queries of every batch noted before the layer attends."""
        impl = self.wrapped.impl
        forward = impl.forward

        def forward_and_tell(layer: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
            listener(query)
            return forward(layer, query, *args, **kwargs)

        impl.forward = forward_and_tell

    def prepare_queries(self, queries: Tensor) -> Tensor:
        """Queries as listeners get them, (1, Hq, W, D), as they meet the keys that are stored."""
        if queries.dtype.itemsize > 1:
            return queries
        scaled: Tensor = queries.float() * self.wrapped._q_scale  # kernels of some GPUs take bytes
        return scaled.to(self.wrapped.dtype)


class LatentLayer(VotingLayer):
    """A layer with latent attention, which stores one latent for all heads: `MLAAttention`.

    A head's keys are the latent times a matrix of the head's own, and after them a part that is
    rotated and the same for all heads. Turned by that matrix, queries meet the latent itself, so
    the latent and the rotated part are the keys of a single KV head.
    """

    @property
    def cache(self) -> Tensor:
        cache: Tensor = self.wrapped.kv_cache.unsqueeze(1)
        return cache

    @property
    def score_options(self) -> ScoreOptions:
        return ScoreOptions(scaling=self.wrapped.scale)

    def add_query_listener(self, listener: Callable[[Tensor], None]) -> None:
        forward = self.wrapped.forward_impl

        def forward_and_tell(query: Tensor, *args: Any, **kwargs: Any) -> Any:
            listener(query)
            return forward(query, *args, **kwargs)

        self.wrapped.forward_impl = forward_and_tell

    def prepare_queries(self, queries: Tensor) -> Tensor:
        """(1, Hq, W, latent and rotated part)."""
        plain = self.wrapped.qk_nope_head_dim
        turned = queries[..., :plain] @ self.wrapped.W_UK_T  # (Hq, plain, latent)
        return torch.cat([turned, queries[..., plain:]], dim=-1)


def voting_layer(layer: Any) -> VotingLayer:
    return LatentLayer(layer) if hasattr(layer, "kv_lora_rank") else VotingLayer(layer)


def attention_layers(vllm_config: Any) -> dict[str, Any]:
    """The attention layers of a model that vLLM has built, by name, in the order of the model."""
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    layers = vllm_config.compilation_config.static_forward_context
    kinds = (Attention, MLAAttention)
    return {name: layer for name, layer in layers.items() if isinstance(layer, kinds)}


@dataclass(frozen=True)
class LayerRun:
    """Neighbouring layers of one KV cache group that are alike; rows of a batch."""

    group: int  # index of vLLM's KV cache group
    depth: int  # how many compressed layers come before the first
    layers: Mapping[str, VotingLayer]  # by name
    layout: Layout  # of their caches

    @property
    def first(self) -> VotingLayer:
        """One of the layers, to ask what all have in common."""
        return next(iter(self.layers.values()))

    @property
    def votes_impl(self) -> ops.Implementation:
        return "by_head" if self._is_half_on_cpu else "auto"

    def decode_keys(self, stored: Tensor) -> Tensor:
        """Stored keys, (layers, Hkv, T, D), as attention sees them."""
        form = self.layout.form
        if form.stored_dtype is None:
            return stored
        scales = torch.stack([layer.wrapped._k_scale for layer in self.layers.values()])
        scaled: Tensor = form.decode(stored).float() * scales.view(-1, 1, 1, 1)
        return scaled.to(form.dtype)

    def to_cache_blocks(self, blocks: Sequence[int], block_tokens: int) -> Tensor:
        """Blocks of so many tokens as the caches number them, which may be parts of vLLM's."""
        cache = self.first.cache
        numbers = torch.tensor(blocks, device=cache.device)
        parts = block_tokens // cache.shape[2]
        return (numbers[:, None] * parts + torch.arange(parts, device=cache.device)).flatten()

    def split_by_memory(self, prompt_tokens: int, kept_tokens: int) -> "Iterator[LayerRun]":
        """The same layers, as many at a time as may be copied.

        In float32 on a CPU that is one, which votes bit for bit as in the library.
        """
        cache = self.first.cache
        of_keys = self.layout.form.bytes * cache.shape[1] * cache.shape[3] // 2
        at_once = 1
        if self._is_half_on_cpu or cache.device.type != "cpu":
            at_once = max(1, MAX_COPY_BYTES // (of_keys * (prompt_tokens + 2 * kept_tokens)))
        for start in range(0, len(self.layers), at_once):
            some = slice(start, start + at_once)
            layers = dict(list(self.layers.items())[some])
            yield LayerRun(self.group, self.depth + start, layers, self.layout.select_layers(some))

    @property
    def _is_half_on_cpu(self) -> bool:
        half = self.layout.form.dtype in (torch.bfloat16, torch.float16)
        return half and self.first.cache.device.type == "cpu"


def layer_runs(groups: Mapping[int, Mapping[str, VotingLayer]]) -> Iterator[LayerRun]:
    """All layers by name and KV cache group, once vLLM has allocated their caches."""
    depth = 0
    for group, layers in groups.items():
        for _, alike in itertools.groupby(layers.items(), lambda item: _signature(*item)):
            run = dict(alike)
            layout = make_layout([layer.wrapped for layer in run.values()])
            yield LayerRun(group, depth, run, layout)
            depth += len(run)


def _signature(name: str, layer: VotingLayer) -> tuple[Any, ...]:
    """What layers have in common that are alike; each with sinks of its own stays alone."""
    options, cache = layer.score_options, layer.cache
    return (
        layer.wrapped.get_attn_backend().get_name(),
        getattr(layer.wrapped, "kv_cache_dtype", "auto"),
        (layer.heads, cache.shape, cache.stride(), cache.dtype),
        (options.scaling, options.softcap),
        None if options.sink_logits is None else name,
    )
