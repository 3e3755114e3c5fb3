"""Read a context before its questions are known, and keep what the model needs to repeat it.

The context is read twice. The first reading fills the cache. In the second reading, the model reads
the text again in pieces, each of them directly after the whole text, as if the model repeated it.
The attention of these pieces shows which keys are needed to repeat the text. Then the policy
selects, and the cache is in the same state as after any other compressed prompt.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.cache.prompt_state import one_reading_refusal
from snapkv.cache.taking_back import take_back
from snapkv.errors import (
    CacheMismatchError,
    PromptTooLongError,
    UnsupportedModelError,
    wrong,
)
from snapkv.hf.cache import CompressedCache
from snapkv.hf.cache_argument import passed
from snapkv.hf.forward_context import Hook, hooked
from snapkv.hf.model_parts import attention_modules, max_positions, observing_inputs
from snapkv.policies import KVzip, Policy, PromptLayer
from snapkv.policies.criticalkv import projected_norms
from snapkv.policies.kvzip import INSTRUCTION, most_attention
from snapkv.validation import require_int


@torch.no_grad()
def read_context(
    model: PreTrainedModel,
    input_ids: Tensor,
    policy: Policy,
    *,
    instruction_ids: Sequence[int] = (),
) -> CompressedCache:
    """Read a context whose questions are not known yet, and compress it.

        cache = read_context(model, ids, AcrossLayers(KVzip(1024)))
        model.generate(torch.cat([ids, question], dim=1), past_key_values=cache, ...)

    Args:
        model: a decoder-only transformers model, with full attention in every layer.
        input_ids: (B, T) integers, which must not contain padding; this is not checked.
        policy: `KVzip`, or a policy around it.
        instruction_ids: the tokens to read before every piece, such as those of "Repeat the text:".

    Returns:
        A new cache that has seen the context and keeps what its budget allows.

    Raises:
        InvalidArgumentError: the policy does not use a second reading, there is no text, or the
            budget cannot hold what must be kept.
        InvalidTypeError: `input_ids` is not a (B, T) tensor of integers, or `model` or `policy` is
            something else.
        PromptTooLongError: the model has no positions left to repeat the text at.
        UnsupportedModelError: the model has layers with a window or a recurrent state, cannot be
            compressed, or, for ``plus=True``, has no plain attention module and output projection
            in each layer.
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
    """Read a context into an empty cache twice, and compress it.

    Changes `cache` in place. If the reading fails, the cache is empty again.

    Args:
        model: the model of the cache.
        input_ids: (B, T) integers, which must not contain padding; this is not checked.
        cache: an empty cache with a `KVzip` policy, or a policy around it.
        instruction_ids: the tokens to read before every piece.

    Raises:
        CacheMismatchError: the cache has already seen tokens. It is unchanged then.
        InvalidArgumentError: the policy does not use a second reading, there is no text, or the
            budget cannot hold what must be kept.
        InvalidTypeError: `input_ids` is not a (B, T) tensor of integers.
        PromptTooLongError: the model has no positions left to repeat the text at.
        UnsupportedModelError: the model has layers of another kind, or cannot be compressed.
    """
    if seen := cache.get_seq_length():
        problem = f"expected an empty cache, but got a cache that has seen {seen:,} tokens"
        raise wrong("cache", problem, "Call cache.reset() first", CacheMismatchError)
    try:
        prompts = read_layers(model, input_ids, cache, instruction_ids=instruction_ids)
        with cache.prompt_state.attending():
            for layer, prompt in zip(cache.prompt_state.layers, prompts, strict=True):
                # What follows is read only once, so it cannot be compared with this prompt.
                cache.prompt_state.chooser.offer(layer, prompt, is_final=True)
        cache.prompt_state.record_text(input_ids)
    except BaseException:
        cache.reset()
        raise


@torch.no_grad()
def read_for_policy(
    model: PreTrainedModel, tokenizer: Any, input_ids: Tensor, cache: CompressedCache
) -> None:
    """Read and compress the text before a question, once or twice as the cache's policy needs it.

    Changes `cache` in place. A text that is read once is announced as one that ends without a
    question (`CompressedCache.expect_question`).

    Args:
        model: the model of the cache.
        tokenizer: its tokenizer, for the instruction of the second reading.
        input_ids: (B, T) integers without padding.
        cache: an empty cache.

    Raises:
        CacheMismatchError: the policy reads twice, and the cache has already seen tokens.
        InvalidArgumentError: there is no text, or the budget cannot hold what must be kept.
        InvalidTypeError: `input_ids` is not a (B, T) tensor of integers.
        PromptTooLongError: the policy reads twice, and no positions are left to repeat the text at.
        UnsupportedModelError: the policy reads twice, and the model has layers of another kind.
    """
    if cache.policy.needs_reconstruction_pass:
        read_twice(model, input_ids, cache, instruction_ids=instruction_of(tokenizer))
        return
    cache.expect_question(0)
    cache.expect_tokens(input_ids)
    model(input_ids, **passed(cache), logits_to_keep=1)
    cache.prompt_state.record_text(input_ids)


def instruction_of(tokenizer: Any) -> list[int]:
    """Return the token ids of the instruction to repeat the text, without special tokens."""
    ids: list[int] = tokenizer(INSTRUCTION, add_special_tokens=False)["input_ids"]
    return ids


@torch.no_grad()
def read_layers(
    model: PreTrainedModel,
    input_ids: Tensor,
    cache: CompressedCache,
    *,
    instruction_ids: Sequence[int] = (),
) -> list[PromptLayer]:
    """Read a context twice into an empty cache, and compute its scores without evicting anything.

    Afterwards the cache holds all tokens of the context, and knows that its prompt has ended. The
    caller must pass an empty cache, which is not checked, and must reset it after an error.

    Args:
        model: the model of the cache.
        input_ids: (B, T) integers, which must not contain padding; this is not checked.
        cache: the cache to fill; it changes in place.
        instruction_ids: the tokens to read before every piece.

    Returns:
        For each layer the view from which its policy selects, with the scores in `received` and
        without queries.

    Raises:
        InvalidArgumentError: the policy does not use a second reading, or there is no text.
        InvalidTypeError: `input_ids` is not a (B, T) tensor of integers.
        PromptTooLongError: the model has no positions left to repeat the text at.
        UnsupportedModelError: the model has layers with a window or a recurrent state; or with
            ``plus=True`` a layer lacks a plain attention module or output projection.
    """
    cache.expect_tokens(input_ids)
    require_int("input_ids, tokens", input_ids.shape[1], minimum=1)
    scorer, tokens = _require_scorer(cache.policy), input_ids.shape[1]
    if cache.is_hybrid:
        name = type(model).__name__
        problem = f"every layer must have full attention, but some layers of {name} have a window"
        raise wrong("model", problem, "Use ExpectedAttention or SnapKV", UnsupportedModelError)
    chunk = min(scorer.chunk_tokens, tokens, _room_tokens(model, tokens + len(instruction_ids)))
    cache.expect_prompt(tokens + len(instruction_ids) + chunk + 1)
    model(input_ids, **passed(cache), logits_to_keep=1)
    observers = [_Observer(tokens, plus=scorer.plus) for _ in cache.layers]
    before = torch.tensor([list(instruction_ids)], dtype=torch.int64, device=input_ids.device)
    before = before.expand(input_ids.shape[0], -1)
    with contextlib.ExitStack() as hooks:
        hooks.enter_context(hooked(_Repetition(observers)))
        for index, observer in enumerate(observers if scorer.plus else ()):
            module = _attention_of_layer(model, index)
            hooks.enter_context(observing_inputs(module, observer.enter))
        for piece in torch.split(input_ids, chunk, dim=1):
            repeated = torch.cat([before, piece], dim=1)
            model(repeated, **passed(cache), logits_to_keep=1)
            take_back(cache.layers, repeated.shape[1])
    cache.prompt_state.prompt_end = tokens
    return [observer.prompt() for observer in observers]


def _room_tokens(model: PreTrainedModel, read_tokens: int) -> int:
    """Return how many more positions the model has after `read_tokens` tokens.

    Returns:
        The number of positions. For a model without a limit it is `read_tokens`, which is enough to
        repeat the whole text.

    Raises:
        PromptTooLongError: no position is left.
    """
    positions = max_positions(model)
    if positions is None:
        return read_tokens
    if read_tokens >= positions:
        tokens = f"{read_tokens:,} tokens, the instruction included,"
        problem = f"{tokens} leave no space to repeat the text in {positions:,} positions"
        remedy = "Use a shorter text, or use ExpectedAttention, which reads the text only once"
        raise wrong("input_ids", problem, remedy, PromptTooLongError)
    return positions - read_tokens


def require_one_reading(policy: Policy, remedy: str) -> None:
    """Raise if the policy needs a second reading of the prompt.

    A caller that reads a prompt only once calls it first.

    Args:
        policy: the policy to check.
        remedy: what the user should do instead, as for `snapkv.errors.wrong`.

    Raises:
        InvalidArgumentError: the policy needs a second reading.
    """
    if policy.needs_reconstruction_pass:
        raise one_reading_refusal(policy, remedy)


def _require_scorer(policy: Policy) -> KVzip:
    """Return the `KVzip` policy that scores for `policy`: `policy` itself, or the one inside it.

    Raises:
        InvalidArgumentError: `policy` is not a `KVzip` and does not wrap one.
    """
    scorer: Any = policy
    while hasattr(scorer, "policy"):
        scorer = scorer.policy
    if not isinstance(scorer, KVzip):
        problem = f"expected KVzip or a policy with it, such as AdaKV(KVzip()), but got {policy!r}"
        raise wrong("policy", problem, "Use model.generate to read the prompt once")
    return scorer


def _attention_of_layer(model: PreTrainedModel, index: int) -> Any:
    """Return the attention module of the layer with this index.

    Raises:
        UnsupportedModelError: the layer has several attention modules, or none.
    """
    modules = attention_modules(model, [index])[index]
    if len(modules) != 1:
        found = f"{len(modules)} in layer {index} of {type(model).__name__}"
        problem = f"KVzip(plus=True) needs one attention module in each layer, but got {found}"
        raise wrong("model", problem, "Do not use plus=True for this model", UnsupportedModelError)
    return modules[0]


class _Repetition(Hook):
    """Passes the queries of every piece to the observer of their layer."""

    def __init__(self, observers: "Sequence[_Observer]") -> None:
        self._observers = observers

    def on_prompt(self, prompt: PromptLayer) -> None:
        self._observers[prompt.layer_idx].see(prompt)


class _Observer:
    """Collects, for each position of a layer, the highest attention that any piece pays to it."""

    def __init__(self, tokens: int, *, plus: bool) -> None:
        self._tokens, self._plus = tokens, plus
        self._query_norms: Tensor | None = None
        self._value_norms: Tensor | None = None
        self._received: Tensor | None = None
        self._seen: PromptLayer | None = None

    def enter(self, states: Tensor) -> None:
        """Store the Euclidean norms of attention's (B, N, hidden) inputs for the next `see`."""
        self._query_norms = torch.linalg.vector_norm(states.float(), dim=-1)

    def see(self, seen: PromptLayer) -> None:
        """Raise the collected attention to that of a piece's queries, where it is higher.

        Args:
            seen: the layer after it has read the piece; its queries are those of the piece.
        """
        self._seen = _without_queries(seen)
        norms: dict[str, Any] = {}
        if self._plus:
            if self._value_norms is None:
                self._value_norms = projected_norms(seen, self._tokens, _length)
            norms = {"query_norms": self._query_norms, "value_norms": self._value_norms}
        most = most_attention(seen, self._tokens, **norms)
        self._received = most if self._received is None else self._received.maximum(most)

    def prompt(self) -> PromptLayer:
        """Return the view of the layer from which a policy selects, with the collected attention.

        The view ends with the context, and has no queries. At least one piece must have been seen.
        """
        assert self._seen is not None
        protected = self._seen.protected
        return replace(
            self._seen,
            keys=self._seen.keys[:, :, : self._tokens],
            values=self._seen.values[:, :, : self._tokens],
            received=self._received,
            protected=None if protected is None else protected[..., : self._tokens],
        )


def _without_queries(layer: PromptLayer) -> PromptLayer:
    """Return the layer without its queries, so that their memory is freed.

    The empty tensor is a copy, because a view would keep all queries in memory.
    """
    return replace(layer, queries=layer.queries[:, :, :0].clone())


def _length(states: Tensor) -> Tensor:
    """Return the Euclidean norm of each state; the last axis is removed."""
    length: Tensor = torch.linalg.vector_norm(states, dim=-1)
    return length
