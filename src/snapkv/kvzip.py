"""Reading a context twice: what saying it again takes is what questions will need.

The first reading fills the cache. In the second the model reads the text again, piece by piece,
each behind the whole of it, as if it repeated it; its queries show which keys that takes. Then the
policy chooses, and the cache is as after any compressed prompt.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.errors import (
    CacheMismatchError,
    InvalidArgumentError,
    PromptTooLongError,
    UnsupportedModelError,
)
from snapkv.hf.cache import CompressedCache
from snapkv.plan import max_positions
from snapkv.policies import EvictingPolicy, KVzip, Policy, PromptLayer, Selection
from snapkv.policies.kvzip import most_attention


@torch.no_grad()
def read_context(
    model: PreTrainedModel,
    input_ids: Tensor,
    policy: Policy,
    *,
    instruction_ids: Sequence[int] = (),
) -> CompressedCache:
    """Read a context whose questions are not known, and keep what rebuilding it takes.

        cache = read_context(model, ids, AdaKV(KVzip(1024)))
        model.generate(torch.cat([ids, question], dim=1), past_key_values=cache, ...)

    Args:
        model: a decoder-only transformers model, of full attention in every layer.
        input_ids: (B, T) int64, without padding.
        policy: `KVzip`, or one around it.
        instruction_ids: what stands before every piece, such as the tokens of "Repeat the text:".

    Returns:
        A cache that has seen the context and keeps its budget of it.

    Raises:
        InvalidArgumentError: a policy that needs no second reading.
        PromptTooLongError: the model has no positions left to repeat the text at.
        UnsupportedModelError: the model has layers of another kind, or cannot be compressed.
    """
    cache = CompressedCache(model, policy)
    read_twice(model, input_ids, cache, instruction_ids=instruction_ids)
    return cache


@torch.no_grad()
def read_twice(
    model: PreTrainedModel,
    input_ids: Tensor,
    cache: CompressedCache,
    *,
    instruction_ids: Sequence[int] = (),
) -> None:
    """Fill an empty cache with a context; arguments and errors as in `read_context`."""
    prompts = repeat_context(model, input_ids, cache, instruction_ids=instruction_ids)
    for layer, prompt in zip(cache.layers, prompts, strict=True):
        chosen = cache.policy.select(prompt)  # once: what follows is not read twice
        layer.end_prompt(Selection.whole(prompt) if chosen is None else chosen, prompt)


@torch.no_grad()
def repeat_context(
    model: PreTrainedModel,
    input_ids: Tensor,
    cache: CompressedCache,
    *,
    instruction_ids: Sequence[int] = (),
) -> list[PromptLayer]:
    """Read a context into an empty cache and repeat it; arguments and errors as in `read_context`.

    Returns:
        Every layer as its policy is to see it. The cache holds all of the context.
    """
    scorer = _require_scorer(cache.policy)
    if cache.get_seq_length():
        raise CacheMismatchError(
            f"cache: expected an empty one where a text is read twice, got one that has seen "
            f"{cache.get_seq_length():,} tokens; call cache.reset()"
        )
    if len(cache.compressed_layers) < len(cache.layers):
        raise UnsupportedModelError(
            f"model: expected full attention in every layer where a text is read twice, got "
            f"{type(model).__name__}, some of whose layers keep the last tokens only; use "
            "ExpectedAttention or SnapKV"
        )
    tokens = input_ids.shape[1]
    chunk = min(scorer.chunk_tokens, tokens, _room_tokens(model, tokens + len(instruction_ids)))
    cache.expect_prompt(tokens + len(instruction_ids) + chunk + 1)
    model(input_ids, past_key_values=cache, logits_to_keep=1)
    observers = [_Observer(tokens) for _ in cache.layers]
    before = torch.tensor([list(instruction_ids)], dtype=torch.int64, device=input_ids.device)
    before = before.expand(input_ids.shape[0], -1)
    _observe(cache, observers)
    for piece in torch.split(input_ids, chunk, dim=1):
        repeated = torch.cat([before, piece], dim=1)
        model(repeated, past_key_values=cache, logits_to_keep=1)
        for layer in cache.layers:
            layer.crop(-repeated.shape[1])
    _observe(cache, [None] * len(cache.layers))
    cache.reading.prompt_end = tokens
    return [observer.prompt() for observer in observers]


def _room_tokens(model: PreTrainedModel, read_tokens: int) -> int:
    """How many positions the model has behind those that are read; refuses none."""
    positions = max_positions(model)
    if positions is None:
        return read_tokens
    if read_tokens >= positions:
        raise PromptTooLongError(
            f"input_ids: expected positions left to repeat the text at, since the model has "
            f"{positions:,}, got {read_tokens:,} tokens with the instruction; shorten the text, or "
            "use ExpectedAttention, which reads it once"
        )
    return positions - read_tokens


def require_one_reading(policy: Policy, remedy: str) -> None:
    """Raise where a policy needs a second reading and will not get it; `remedy` says what to do.

    Raises:
        InvalidArgumentError: such a policy.
    """
    if policy.reads_twice:
        raise InvalidArgumentError(
            f"policy: expected one that chooses when a prompt has been read once, got "
            f"{policy.name}, which has the model read a text twice, before any question is known; "
            f"{remedy}"
        )


def _require_scorer(policy: Policy) -> KVzip:
    scorer = getattr(policy, "policy", policy)
    if not isinstance(scorer, KVzip) or isinstance(policy, EvictingPolicy):
        raise InvalidArgumentError(
            f"policy: expected KVzip, or AdaKV(KVzip(...)), for a second reading, got {policy!r}; "
            "read the prompt once, with model.generate"
        )
    return scorer


def _observe(cache: CompressedCache, observers: Sequence[Any]) -> None:
    for layer, observer in zip(cache.layers, observers, strict=True):
        layer.observer = observer


class _Observer:
    """Sees a layer's queries of every piece, and notes the most attention each position got.

    Args:
        tokens: T, the length of the context.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._received: Tensor | None = None
        self._seen: PromptLayer | None = None

    def __call__(self, seen: PromptLayer) -> None:
        self._seen = seen
        most = most_attention(seen, self._tokens)
        self._received = most if self._received is None else self._received.maximum(most)

    def prompt(self) -> PromptLayer:
        """The layer as a policy sees it, with what was noted."""
        assert self._seen is not None
        protected = self._seen.protected
        return replace(
            self._seen,
            queries=self._seen.queries[:, :, :0],
            keys=self._seen.keys[:, :, : self._tokens],
            values=self._seen.values[:, :, : self._tokens],
            received=self._received,
            protected=None if protected is None else protected[..., : self._tokens],
        )
