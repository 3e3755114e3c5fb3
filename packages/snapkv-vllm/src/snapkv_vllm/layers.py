"""vLLM's attention layers: the queries and options that votes need, and which layers are compressed
together.
"""

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
"""The bytes of keys and values that are copied at a time, unless a single layer has more."""


class VotingLayer:
    """An attention layer of vLLM (`Attention`), whose queries can be recorded and whose cache can
    be read.

    Attributes:
        wrapped: the layer of vLLM.
    """

    def __init__(self, layer: Any) -> None:
        self.wrapped = layer

    @property
    def heads(self) -> int:
        """The number of query heads."""
        heads: int = self.wrapped.num_heads
        return heads

    @property
    def cache(self) -> Tensor:
        """The tensor in which the keys and values of the layer are stored, of shape (blocks, Hkv,
        block_tokens, numbers of a token). It is the layer's own tensor or a view of it.
        """
        cache: Tensor = self.wrapped.kv_cache
        return cache

    @property
    def score_options(self) -> ScoreOptions:
        """The scaling, the soft cap and the attention sinks with which the layer computes its
        attention scores.
        """
        impl = self.wrapped.impl
        return ScoreOptions(
            scaling=impl.scale,
            softcap=getattr(impl, "logits_soft_cap", None) or None,
            sink_logits=getattr(impl, "sinks", None),
        )

    def add_query_listener(self, listener: Callable[[Tensor], None]) -> None:
        """Call the function `listener` with the queries of every batch, before the layer computes
        its attention.

        The layer of vLLM is changed in place. There is no way to remove a listener.

        Args:
            listener: gets (tokens, Hq, D) queries, which it must copy to store them.
        """
        impl = self.wrapped.impl
        forward = impl.forward

        def forward_and_notify(layer: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
            listener(query)
            return forward(layer, query, *args, **kwargs)

        impl.forward = forward_and_notify

    def prepare_queries(self, queries: Tensor) -> Tensor:
        """Convert recorded queries so that they can be compared with the stored keys.

        Args:
            queries: (1, Hq, W, D) queries as `add_query_listener` has passed them.

        Returns:
            (1, Hq, W, D) in the dtype of the model; `queries` itself unless they are in fp8.
        """
        if queries.dtype.itemsize > 1:
            return queries
        # Some GPU kernels get queries in fp8.
        scaled: Tensor = queries.float() * self.wrapped._q_scale
        return scaled.to(self.wrapped.dtype)


class LatentLayer(VotingLayer):
    """A layer with latent attention (`MLAAttention`), which stores one latent vector for all heads.

    The keys of a head are the latent times a matrix of the head, followed by a rotated part that
    all heads share. If the queries are multiplied by that matrix, they can be compared with the
    latent itself. So the latent and the rotated part are treated as the keys of a single KV head.
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

        def forward_and_notify(query: Tensor, *args: Any, **kwargs: Any) -> Any:
            listener(query)
            return forward(query, *args, **kwargs)

        self.wrapped.forward_impl = forward_and_notify

    def prepare_queries(self, queries: Tensor) -> Tensor:
        """Convert recorded queries so that they can be compared with the stored latents.

        Args:
            queries: (1, Hq, W, D) queries as `add_query_listener` has passed them; the last numbers
                of each are its rotated part.

        Returns:
            A new tensor of shape (1, Hq, W, size of the latent and the rotated part).
        """
        plain = self.wrapped.qk_nope_head_dim
        turned = queries[..., :plain] @ self.wrapped.W_UK_T  # (Hq, plain, latent)
        return torch.cat([turned, queries[..., plain:]], dim=-1)


def voting_layer(layer: Any) -> VotingLayer:
    """Wrap an attention layer of vLLM in the class for its kind of attention."""
    return LatentLayer(layer) if hasattr(layer, "kv_lora_rank") else VotingLayer(layer)


def attention_layers(vllm_config: Any) -> dict[str, Any]:
    """Return the attention layers of a model that vLLM has built in this process, by their names
    and in the order of the model. Layers with a recurrent state are left out.
    """
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    layers = vllm_config.compilation_config.static_forward_context
    kinds = (Attention, MLAAttention)
    return {name: layer for name, layer in layers.items() if isinstance(layer, kinds)}


@dataclass(frozen=True)
class LayerRun:
    """Consecutive layers of one KV cache group that are alike, so that they can be compressed
    together as rows of a batch.
    """

    group: int  # the index of vLLM's KV cache group
    depth: int  # the number of compressed layers before the first
    layers: Mapping[str, VotingLayer]  # by name
    layout: Layout  # the layout of their caches

    @property
    def first(self) -> VotingLayer:
        """The first layer of the run. It is used for everything that is the same in all layers of
        the run.
        """
        return next(iter(self.layers.values()))

    @property
    def votes_impl(self) -> ops.Implementation:
        """The implementation that computes the votes: "by_head", which computes heads one by one,
        on a CPU in half precision, and "auto" otherwise.
        """
        return "by_head" if self._is_half_on_cpu else "auto"

    def decode_keys(self, stored: Tensor) -> Tensor:
        """Convert keys from the form in which they are stored to the numbers that attention
        computes with.

        Args:
            stored: (layers, Hkv, T, D) keys as they are stored.

        Returns:
            (layers, Hkv, T, D) in the dtype of the model; `stored` itself if that is how keys are
            stored.
        """
        form = self.layout.form
        if form.byte_dtype is None:
            return stored
        scales = torch.stack([layer.wrapped._k_scale for layer in self.layers.values()])
        scaled: Tensor = form.decode(stored).float() * scales.view(-1, 1, 1, 1)
        return scaled.to(form.dtype)

    def to_cache_blocks(self, blocks: Sequence[int], block_tokens: int) -> Tensor:
        """Convert the numbers of vLLM's blocks to numbers of blocks in the caches, which may be
        smaller.

        Args:
            blocks: the numbers of vLLM's blocks.
            block_tokens: the size of vLLM's blocks, a multiple of the size in the caches.

        Returns:
            An int64 vector on the device of the caches, in the order of the tokens, with one or
            more numbers for each of `blocks`.
        """
        cache = self.first.cache
        numbers = torch.tensor(blocks, device=cache.device)
        parts = block_tokens // cache.shape[2]
        return (numbers[:, None] * parts + torch.arange(parts, device=cache.device)).flatten()

    def split_by_memory(self, prompt_tokens: int, kept_tokens: int) -> "Iterator[LayerRun]":
        """Yield the layers in runs that are small enough to be copied at once: by `MAX_COPY_BYTES`,
        but at least one layer.

        On a CPU in float32 a run has one layer, so that votes are those of the library bit for bit.

        Args:
            prompt_tokens: how many tokens of the request are stored.
            kept_tokens: how many of them are kept.
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
    """Yield runs of consecutive layers that are alike, group by group and in the order of the
    model. The caches must be allocated.

    Args:
        groups: the compressed layers, by name, for the index of each KV cache group.
    """
    depth = 0
    for group, layers in groups.items():
        for _, alike in itertools.groupby(layers.items(), lambda item: _signature(*item)):
            run = dict(alike)
            layout = make_layout([layer.wrapped for layer in run.values()])
            yield LayerRun(group, depth, run, layout)
            depth += len(run)


def _signature(name: str, layer: VotingLayer) -> tuple[Any, ...]:
    """Return a value that is equal for two layers if they can be compressed together. The value of
    a layer with attention sinks differs from those of all other layers.
    """
    options, cache = layer.score_options, layer.cache
    return (
        layer.wrapped.get_attn_backend().get_name(),
        getattr(layer.wrapped, "kv_cache_dtype", "auto"),
        (layer.heads, cache.shape, cache.stride(), cache.dtype),
        (options.scaling, options.softcap),
        None if options.sink_logits is None else name,
    )
