from snapkv import AdaKV, SnapKV
from snapkv_vllm.admission.plans import PromptSelector, reserved_tokens

PARTED = PromptSelector(AdaKV(SnapKV(64)))


def held_tokens(kept_tokens, prompt_tokens, block_tokens):
    """Tokens that are counted for heads that keep so many on average."""
    return reserved_tokens(PARTED, kept_tokens, prompt_tokens, block_tokens)


def shared_out(draw, budget, heads, prompt):
    """As many tokens as there are, with at least one in every head and none with too many."""
    kept = [1] * heads
    for _ in range((budget - 1) * heads):
        kept[draw.choice([head for head in range(heads) if kept[head] < prompt])] += 1
    return kept


def spread(laid, states, slots):
    """What all heads kept, as blocks hold it: (..., H, slots, D)."""
    found = laid.make_output(states, slots)
    laid.scatter(states, found, slots)
    return found[..., :-1, :].reshape(*laid.kept.shape, slots, states.shape[-1])
