"""Compute the log-likelihood of texts after a compressed prompt.

If a model is never or always right, counting its right answers gives no signal, but the loss of the
right answer does. It is computed with the cache from which the answer was generated, in its state
right after the prompt.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from snapkv.hf.cache import CompressedCache
from snapkv.hf.cache_argument import passed
from snapkv.hf.device_memory import out_of_memory_explained
from snapkv.hf.placement import device_of
from snapkv.policies import EvictingPolicy, Policy
from snapkv.storage.bits import KVCodes
from snapkv_app.control_words import content_ids
from snapkv_app.models import LoadedModel
from snapkv_app.plan.advice import prompt_memory_explained
from snapkv_app.prompt_end import PromptEnd
from snapkv_app.prompts import Prompt

_PIECE_TOKENS = 256
"""Tokens of a continuation per forward pass; the logits of all of them are stored."""


def log_likelihoods(
    loaded: LoadedModel,
    context: Tensor,
    continuations: Sequence[Tensor],
    policy: Policy,
    batch_size: int = 1,
    quantize: KVCodes | None = None,
) -> Iterator[tuple[float, bool]]:
    """Compute the log-probability of every continuation after a compressed context.

    The context is read one time, when the first result is requested. As in an answer, the first
    token is predicted from the complete context, and the later ones from the tokens that the policy
    keeps.

    Args:
        loaded: the model.
        context: (1, T) int64, T at least 1, on the device of the model.
        continuations: each (1, C) int64, C at least 1, on the device of the model.
        policy: selects the tokens of the context to keep.
        batch_size: the number of continuations that are read in one pass, each after a copy of the
            compressed context. If the policy evicts while generating, each continuation is read
            alone, token by token.
        quantize: the codes that quantize stored keys and values; None for the dtype of the model.

    Yields:
        For each continuation in order, the sum of the natural logarithms of its tokens'
        probabilities, and whether greedy decoding would generate exactly these tokens.

    Raises:
        InvalidArgumentError: the policy cannot compress this context.
        UnsupportedModelError: the model's cache cannot be compressed, or the model has no gate for
            a policy that needs one.
        OutOfMemoryError: the device is full.
    """
    model, policy = loaded.model, loaded.completed(policy)
    cache = CompressedCache(model, policy, quantize=quantize)
    with prompt_memory_explained(model, context.shape[1]), torch.inference_mode():
        cache.expect_tokens(context)
        logits = model(context, **passed(cache), logits_to_keep=1).logits
    end = PromptEnd(cache=cache, logits=logits)
    size = 1 if isinstance(policy, EvictingPolicy) else batch_size
    for start in range(0, len(continuations), size):
        with prompt_memory_explained(model, context.shape[1]), torch.inference_mode():
            found = _together(model, end.branch(), continuations[start : start + size])
        yield from found


def _together(
    model: Any, end: PromptEnd, continuations: Sequence[Tensor]
) -> list[tuple[float, bool]]:
    """Compute the results of `log_likelihoods` for several continuations in one padded batch.

    Changes the cache of `end` in place, so the caller must pass a branch, which has one row.

    Args:
        model: the model.
        end: the end of the context.
        continuations: B of them, each (1, C) int64; C may differ.

    Returns:
        For each continuation, the sum of its log-probabilities, and whether greedy decoding would
        generate it.
    """
    lengths = [continuation.shape[1] for continuation in continuations]
    rows = pad_sequence([one[0] for one in continuations], batch_first=True)
    for layer in end.cache.layers:  # recurrent ones, too, which take no other way to more rows
        layer.reorder_cache(torch.zeros(len(rows), dtype=torch.int64))
    repeated = PromptEnd(cache=end.cache, logits=end.logits.expand(len(rows), -1, -1))
    chosen, leading = log_probabilities(model, repeated, rows)
    return [
        (float(chosen[row, :length].sum()), bool(leading[row, :length].all()))
        for row, length in enumerate(lengths)
    ]


def log_probabilities(model: Any, end: PromptEnd, continuation: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of every token of the continuations, given those before it.

    All tokens except the last of each continuation are read into the cache of `end`, which changes
    it in place.

    Args:
        model: the model.
        end: the end of the prompt, with B rows.
        continuation: (B, C) int64, the tokens after the prompt; C at least 1.

    Returns:
        (B, C) float32, the natural logarithms of the probabilities, and (B, C) bool, whether each
        token is the most likely one.
    """
    cache, following = end.cache, continuation.shape[1] - 1
    # Eviction while generating depends on the steps.
    size = 1 if isinstance(cache.policy, EvictingPolicy) else _PIECE_TOKENS
    found = [_chosen(end.logits, continuation[:, :1])]
    for start in range(0, following, size):
        stop = min(start + size, following)
        part = continuation[:, start:stop]
        cache.expect_tokens(part)
        logits = model(part, **passed(cache)).logits
        found.append(_chosen(logits, continuation[:, start + 1 : stop + 1]))
    chosen, leading = zip(*found, strict=True)
    return torch.cat(chosen, dim=1), torch.cat(leading, dim=1)


def _chosen(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each token, and whether it is the most likely one.

    Args:
        logits: (B, N, V), for N tokens of each of B rows and a vocabulary of V tokens.
        ids: (B, N) int64, the tokens.

    Returns:
        (B, N) float32, natural logarithms, and (B, N) bool.
    """
    predicted = logits.float().log_softmax(dim=-1)
    chosen = predicted.gather(2, ids[:, :, None])[:, :, 0]
    return chosen, predicted.argmax(dim=-1) == ids


@dataclass(frozen=True, kw_only=True)
class References:
    """The tokens of the right answers to a prompt; an answer may consist of no token."""

    token_ids: Sequence[Sequence[int]]

    @classmethod
    def after(cls, prompt: Prompt, references: Sequence[str], loaded: LoadedModel) -> "References":
        """Tokenize reference answers as they would follow the prompt.

        A space is inserted before an answer, unless the prompt ends in whitespace or in a control
        token, or the answer begins with whitespace. If an answer would change the last tokens of
        the prompt, it is tokenized alone. The caller must not pass an empty answer.

        Raises:
            InvalidArgumentError: the tokenizer turns ordinary words of a text into control tokens.
        """
        tokenizer = loaded.tokenizer
        before: list[int] = prompt.encoded(tokenizer)[0]
        ends_in_marker = not tokenizer.decode(before[-1:], skip_special_tokens=True)
        joined = ends_in_marker or prompt.text[-1:].isspace()
        found = []
        for reference in references:
            text = reference if joined or reference[0].isspace() else f" {reference}"
            ids, _ = prompt.followed_by(tokenizer, text).encoded(tokenizer)
            own = ids[len(before) :]
            if ids[: len(before)] != before or not own:  # a token lies over the prompt's end
                own = content_ids(tokenizer, text)
            found.append(own)
        return cls(token_ids=found)

    def loss(self, loaded: LoadedModel, end: PromptEnd) -> float | None:
        """Compute the mean negative log-likelihood of the most likely reference.

        There must be at least one reference. The cache of `end` is not changed.

        Returns:
            The smallest loss in nats per token; None if any reference has no token, does not fit
            into the model's positions, or has a loss that is not finite.

        Raises:
            OutOfMemoryError: the device is full.
        """
        longest = end.cache.get_seq_length() + max(map(len, self.token_ids))
        if not all(self.token_ids):
            return None
        if loaded.max_tokens is not None and longest > loaded.max_tokens:
            return None
        with out_of_memory_explained(lambda: ""), torch.inference_mode():
            losses = [_loss(loaded, end.branch(), ids) for ids in self.token_ids]
        return min(losses) if all(map(math.isfinite, losses)) else None


def _loss(loaded: LoadedModel, end: PromptEnd, token_ids: Sequence[int]) -> float:
    ids = torch.tensor([token_ids], device=device_of(loaded.model))
    chosen, _ = log_probabilities(loaded.model, end, ids)
    return -float(chosen.mean())
