"""How likely a text is behind a compressed context."""

import functools
from typing import Any

import torch
from torch import Tensor

from snapkv.app.models import LoadedModel
from snapkv.app.prompt_end import PromptEnd
from snapkv.hf.cache import CompressedCache
from snapkv.plan import free_bytes, out_of_memory_explained, prompt_advice
from snapkv.policies import EvictingPolicy, Policy


def log_likelihood(
    loaded: LoadedModel, context: Tensor, continuation: Tensor, policy: Policy
) -> tuple[float, bool]:
    """Log-probability of a continuation behind a compressed context.

    The first token is predicted by the whole context, as the first token of an answer is; the
    others attend to what was kept.

    Args:
        loaded: the model.
        context: (1, T) int64, T at least 1.
        continuation: (1, C) int64.
        policy: what the cache keeps of the context.

    Returns:
        The sum of the tokens' log-probabilities, and whether each is the likeliest.
    """
    model = loaded.model
    cache = CompressedCache(model, policy)
    advice = functools.partial(prompt_advice, model, context.shape[1], free_bytes(model.device))
    with out_of_memory_explained(advice), torch.inference_mode():
        cache.expect_tokens(context)
        logits = model(context, past_key_values=cache, logits_to_keep=1).logits
        end = PromptEnd(cache=cache, logits=logits)
        chosen, greedy = log_probabilities(model, end, continuation)
    return float(chosen.sum()), greedy


def log_probabilities(model: Any, end: PromptEnd, continuation: Tensor) -> tuple[Tensor, bool]:
    """Log-probability of every token of a continuation, those before it being given.

    Args:
        model: whose cache it is.
        end: what the continuation is read behind; all but its last token is in the cache then.
        continuation: (1, C) int64, C at least 1.

    Returns:
        (C,) fp32, and whether each token is the likeliest.
    """
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
    return torch.cat([chosen for chosen, _ in found]), all(greedy for _, greedy in found)


_PIECE_TOKENS = 256
"""Tokens of a continuation that are read at once; the logits of all of them are held."""


def _chosen(logits: Tensor, ids: Tensor) -> tuple[Tensor, bool]:
    """Log-probabilities (N,) of the tokens (1, N) that logits (1, N, V) are for; if they lead."""
    predicted = logits.float().log_softmax(dim=-1)
    greedy = bool((predicted.argmax(dim=-1) == ids).all())
    return predicted.gather(2, ids[:, :, None]).flatten(), greedy
