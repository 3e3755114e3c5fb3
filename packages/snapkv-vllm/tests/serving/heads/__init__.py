from snapkv import AdaKV, SnapKV
from snapkv_vllm.admission.plans import PromptSelector, reserved_tokens

PARTED = PromptSelector(AdaKV(SnapKV(64)))


def held_tokens(kept_tokens, prompt_tokens, block_tokens):
    """Return the number of tokens for which space is reserved if heads keep `kept_tokens` on
    average.
    """
    return reserved_tokens(PARTED, kept_tokens, prompt_tokens, block_tokens)


def shared_out(draw, budget, heads, prompt):
    """Share `budget` tokens per head out at random, so that each head keeps at least one and at
    most `prompt` tokens.

    Returns:
        The number of tokens of each head.
    """
    kept = [1] * heads
    for _ in range((budget - 1) * heads):
        kept[draw.choice([head for head in range(heads) if kept[head] < prompt])] += 1
    return kept


def spread(laid, states, slots):
    """Write the kept states of all heads to the places that `laid` computes.

    Args:
        laid: the `HeadPlaces` of a request.
        states: (..., H, K, D), right-aligned.
        slots: how many slots the request has per head.

    Returns:
        A tensor of shape (..., H, slots, D), as the blocks of the request store it.
    """
    found = laid.make_output(states, slots)
    laid.scatter(states, found, slots)
    return found[..., :-1, :].reshape(*laid.kept.shape, slots, states.shape[-1])
