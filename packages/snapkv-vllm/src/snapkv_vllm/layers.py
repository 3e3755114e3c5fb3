"""What votes need of one of vLLM's attention layers: queries, and how scores are made of them."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from snapkv.ops import ScoreOptions

Listener = Callable[[Tensor], None]
"""Takes (tokens, Hq, D) queries of a batch."""


class VotingLayer(Protocol):
    """An attention layer whose queries can be listened to.

    Attributes:
        wrapped: vLLM's own.
    """

    wrapped: Any

    @property
    def heads(self) -> int:
        """Query heads, Hq."""

    @property
    def cache(self) -> Tensor:
        """Where keys and values lie: (blocks, Hkv, block_tokens, numbers of a token)."""

    @property
    def score_options(self) -> ScoreOptions:
        """What the layer does to its scores."""

    def listen(self, listener: Listener) -> None:
        """Have the queries of every batch noted from now on, before the layer attends."""

    def over_stored(self, queries: Tensor) -> Tensor:
        """Queries as listeners get them, (1, Hq, W, D), as they meet the keys that are stored."""


class _Layer:
    """What layers of both kinds have.

    Args:
        layer: vLLM's `Attention` or `MLAAttention`.
    """

    def __init__(self, layer: Any) -> None:
        self.wrapped = layer

    @property
    def heads(self) -> int:
        """See `VotingLayer`."""
        heads: int = self.wrapped.num_heads
        return heads


class HeadsLayer(_Layer):
    """A layer that stores keys and values of heads: vLLM's `Attention`."""

    @property
    def cache(self) -> Tensor:
        """See `VotingLayer`."""
        cache: Tensor = self.wrapped.kv_cache
        return cache

    @property
    def score_options(self) -> ScoreOptions:
        """See `VotingLayer`."""
        impl = self.wrapped.impl
        return ScoreOptions(
            scaling=impl.scale,
            softcap=getattr(impl, "logits_soft_cap", None) or None,
            sink_logits=getattr(impl, "sinks", None),
        )

    def listen(self, listener: Listener) -> None:
        """See `VotingLayer`."""
        forward = self.wrapped.impl.forward

        def forward_and_tell(layer: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
            listener(query)
            return forward(layer, query, *args, **kwargs)

        self.wrapped.impl.forward = forward_and_tell

    def over_stored(self, queries: Tensor) -> Tensor:
        """They meet keys as they are."""
        return queries


class LatentLayer(_Layer):
    """A layer with latent attention, which stores one latent for all heads: `MLAAttention`.

    A head's keys are the latent times a matrix of the head's own, and behind them a part that is
    rotated and the same for all heads. Turned by that matrix, queries meet the latent itself, so
    the latent and the rotated part are the keys of a single KV head.
    """

    @property
    def cache(self) -> Tensor:
        """See `VotingLayer`."""
        cache: Tensor = self.wrapped.kv_cache.unsqueeze(1)
        return cache

    @property
    def score_options(self) -> ScoreOptions:
        """See `VotingLayer`."""
        return ScoreOptions(scaling=self.wrapped.scale)

    def listen(self, listener: Listener) -> None:
        """See `VotingLayer`."""
        forward = self.wrapped.forward_impl

        def forward_and_tell(query: Tensor, *args: Any, **kwargs: Any) -> Any:
            listener(query)
            return forward(query, *args, **kwargs)

        self.wrapped.forward_impl = forward_and_tell

    def over_stored(self, queries: Tensor) -> Tensor:
        """(1, Hq, W, latent and rotated part)."""
        plain = self.wrapped.qk_nope_head_dim
        turned = queries[..., :plain] @ self.wrapped.W_UK_T  # (Hq, plain, latent)
        return torch.cat([turned, queries[..., plain:]], dim=-1)


def voting_layer(layer: Any) -> VotingLayer:
    """What votes need of a layer of vLLM."""
    return LatentLayer(layer) if hasattr(layer, "kv_lora_rank") else HeadsLayer(layer)


def attention_layers(vllm_config: Any) -> dict[str, Any]:
    """The attention layers of a model that vLLM has built, by name, in the order of the model."""
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    layers = vllm_config.compilation_config.static_forward_context
    kinds = (Attention, MLAAttention)
    return {name: layer for name, layer in layers.items() if isinstance(layer, kinds)}
