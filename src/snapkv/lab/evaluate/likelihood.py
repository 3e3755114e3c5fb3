"""How likely a text is behind a compressed context."""

import functools

import torch
from torch import Tensor

from snapkv.app.models import LoadedModel
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
    rest = continuation[:, :-1]
    # What a method drops while generating depends on its steps.
    steps = rest.shape[1] if isinstance(policy, EvictingPolicy) else min(rest.shape[1], 1)
    with out_of_memory_explained(advice), torch.inference_mode():
        logits = [model(context, past_key_values=cache, logits_to_keep=1).logits]
        for part in rest.chunk(steps, dim=1) if steps else ():
            logits.append(model(part, past_key_values=cache).logits)
        predicted = torch.cat(logits, dim=1).float().log_softmax(dim=-1)
    chosen = predicted.gather(2, continuation[:, :, None])
    greedy = bool((predicted.argmax(dim=-1) == continuation).all())
    return float(chosen.sum()), greedy
