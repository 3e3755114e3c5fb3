"""How likely a text is behind a compressed context."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from snapkv.app.models import LoadedModel
from snapkv.app.prompt_end import PromptEnd
from snapkv.hf.cache import CompressedCache
from snapkv.plan import free_bytes, out_of_memory_explained, prompt_advice
from snapkv.policies import EvictingPolicy, Policy


def log_likelihood(
    loaded: LoadedModel, context: Tensor, continuation: Tensor, policy: Policy
) -> tuple[float, bool]:
    """Of one continuation, see `log_likelihoods`."""
    (found,) = log_likelihoods(loaded, context, [continuation], policy)
    return found


def log_likelihoods(
    loaded: LoadedModel,
    context: Tensor,
    continuations: Sequence[Tensor],
    policy: Policy,
    batch_size: int = 1,
) -> Iterator[tuple[float, bool]]:
    """Log-probability of every continuation behind a context that is read and compressed once."""
    model, policy = loaded.model, loaded.completed(policy)
    cache = CompressedCache(model, policy)
    advice = functools.partial(prompt_advice, model, context.shape[1], free_bytes(model.device))
    with out_of_memory_explained(advice), torch.inference_mode():
        cache.expect_tokens(context)
        logits = model(context, past_key_values=cache, logits_to_keep=1).logits
    end = PromptEnd(cache=cache, logits=logits)
    size = 1 if isinstance(policy, EvictingPolicy) else batch_size
    for start in range(0, len(continuations), size):
        with out_of_memory_explained(advice), torch.inference_mode():
            found = _together(model, end.branch(), continuations[start : start + size])
        yield from found


def _together(
    model: Any, end: PromptEnd, continuations: Sequence[Tensor]
) -> list[tuple[float, bool]]:
    """Of each continuation, all read at once; tokens behind the shorter ones change nothing."""
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
    """Log-probability of every token of a continuation, those before it being given."""
    cache, following = end.cache, continuation.shape[1] - 1
    # What a method drops while generating depends on its steps.
    size = 1 if isinstance(cache.policy, EvictingPolicy) else _PIECE_TOKENS
    found = [_chosen(end.logits, continuation[:, :1])]
    for start in range(0, following, size):
        stop = min(start + size, following)
        part = continuation[:, start:stop]
        cache.expect_tokens(part)
        logits = model(part, past_key_values=cache).logits
        found.append(_chosen(logits, continuation[:, start + 1 : stop + 1]))
    chosen, leading = zip(*found, strict=True)
    return torch.cat(chosen, dim=1), torch.cat(leading, dim=1)


_PIECE_TOKENS = 256
"""Tokens of a continuation that are read at once; the logits of all of them are held."""


def _chosen(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities (B, N) of the tokens (B, N) behind logits (B, N, V); whether each leads."""
    predicted = logits.float().log_softmax(dim=-1)
    chosen = predicted.gather(2, ids[:, :, None])[:, :, 0]
    return chosen, predicted.argmax(dim=-1) == ids
