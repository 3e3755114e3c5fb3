"""The caches that are timed against each other, and filling them as if a prompt had been read."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, QuantizedCache, StaticCache
from transformers.cache_utils import Cache

from snapkv.cache.layer import CompressedLayer
from snapkv.errors import InvalidArgumentError, UnsupportedModelError
from snapkv.hf.cache import CompressedCache
from snapkv.hf.install import install, uninstall
from snapkv.hf.model_parts import output_weight
from snapkv.ops import ScoreOptions
from snapkv.policies import Policy, PromptLayer
from snapkv.validation import nearest

ROOM_TOKENS = 512
"""Tokens behind the prompt that caches of a fixed size have room for."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A kind of cache under the name that tables give it.

    Attributes:
        label: its name.
        make: an empty cache for a model and that many prompt tokens.
        policy: what a compressed cache keeps; None for transformers' own caches.
    """

    label: str
    make: Callable[[PreTrainedModel, int], Cache]
    policy: Policy | None = None

    @contextlib.contextmanager
    def at_work(self, model: PreTrainedModel) -> Iterator[None]:
        """Within this block the model carries what this cache needs, and nothing more.

        Caches of other contenders may live on; their turn comes in a block of their own.
        """
        uninstall(model)
        with contextlib.nullcontext() if self.policy is None else install(model):
            yield


def compressed(label: str, policy: Policy, *, storage: str = "dynamic") -> Contender:
    """A compressed cache."""

    def make(model: PreTrainedModel, prompt_tokens: int) -> Cache:
        del prompt_tokens
        return CompressedCache(model, policy, storage=storage, room_tokens=ROOM_TOKENS)  # type: ignore[arg-type] # checked there

    return Contender(label=label, make=make, policy=policy)


def full(name: str) -> Contender:
    """One of transformers' own caches, which keep every token.

    Raises:
        InvalidArgumentError: no cache of that name.
    """
    if name not in FULL_CACHES:
        raise InvalidArgumentError(
            f"baseline: expected one of {', '.join(BASELINES)}, got "
            f"{name!r}{nearest(name, BASELINES)}"
        )
    return Contender(label=name, make=FULL_CACHES[name])


def _dynamic(model: PreTrainedModel, prompt_tokens: int) -> Cache:
    del prompt_tokens
    return DynamicCache(config=model.config)


def _static(model: PreTrainedModel, prompt_tokens: int) -> Cache:
    return StaticCache(config=model.config, max_cache_len=prompt_tokens + ROOM_TOKENS)


def _quantized(model: PreTrainedModel, prompt_tokens: int) -> Cache:
    del prompt_tokens
    return QuantizedCache(backend="quanto", config=model.config, nbits=4)


FULL_CACHES: dict[str, Callable[[PreTrainedModel, int], Cache]] = {
    "transformers": _dynamic,
    "transformers-static": _static,
    "transformers-int4": _quantized,
}
"""transformers' own caches by the name that `snapkv bench --baseline` takes."""

BASELINES = (*FULL_CACHES, "kvpress")
"""All that it takes."""


@torch.no_grad()
def filled(contender: Contender, model: PreTrainedModel, *, batch: int, tokens: int) -> Cache:
    """A cache as a prompt of that many tokens leaves it, with random keys and values.

    What decoding costs depends on how many tokens are stored, not on what they say. One layer at a
    time is whole.
    """
    cache = contender.make(model, tokens)
    if isinstance(cache, CompressedCache):
        cache.expect_prompt(tokens)
    for layer in cache.layers:
        layer.update(_random(model, batch, tokens, "key"), _random(model, batch, tokens, "key"))
        if isinstance(layer, CompressedLayer):
            _end_prompt(layer, model, tokens)
    return cache


def _end_prompt(layer: CompressedLayer, model: PreTrainedModel, tokens: int) -> None:
    """Ask the policy what to keep, as the seam does."""
    queries = _random(model, layer.keys.shape[0], min(layer.policy.query_tokens, tokens), "query")
    prompt = PromptLayer(
        queries=queries,
        keys=layer.keys,
        values=layer.values,
        score_options=ScoreOptions(scaling=queries.shape[-1] ** -0.5),
        layer_idx=layer.identity.layer_idx,
        depth=layer.identity.depth,
        num_layers=layer.identity.num_layers,
        rotation=layer.identity.rotation,
        output_weight=output_weight(layer.identity.output_projection),
    )
    layer.end_prompt(layer.policy.select(prompt), prompt)


def _random(model: PreTrainedModel, batch: int, tokens: int, kind: str) -> Any:
    """Random states of a layer: (B, Hq or Hkv, N, D)."""
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None) is not None:
        raise UnsupportedModelError(
            f"model: expected one whose cache holds keys and values per head, got "
            f"{type(model).__name__} with latent attention; measure how it reads prompts, with "
            "snapkv bench prefill or memory"
        )
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    if kind == "key":
        heads = getattr(text, "num_key_value_heads", None) or heads
    return torch.randn(batch, heads, tokens, head_dim, device=model.device, dtype=model.dtype)
