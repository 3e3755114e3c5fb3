"""The paper's Listing 1, written from the paper alone: what the authors' method keeps.

Keys stand once per query head, as they do in the paper's models; a grouped model repeats them
first (`repeat_keys`). Only the selection is modelled, as positions; gathering is ours to test
elsewhere.
"""

import torch
from torch import Tensor


def repeat_keys(keys: Tensor, query_heads: int) -> Tensor:
    """(B, Hkv, T, D) to (B, Hq, T, D): every query head of a group gets the group's keys."""
    copies = query_heads // keys.shape[1]
    return torch.cat(
        [keys[:, head : head + 1] for head in range(keys.shape[1]) for _ in range(copies)], dim=1
    )


def listing_scores(
    query_states: Tensor, key_states: Tensor, *, window_size: int, kernel_size: int, pooling: str
) -> Tensor:
    """Lines 9 to 13: attention of the window, summed over its queries, pooled. (B, H, P) float64.

    States are (B, H, T, D), of the whole prompt.
    """
    observed = query_states[..., -window_size:, :].double()
    head_dim = query_states.shape[-1]
    logits = torch.einsum("bhwd,bhtd->bhwt", observed, key_states.double()) / head_dim**0.5
    future = torch.ones(window_size, window_size, dtype=torch.bool).triu(diagonal=1)
    square = logits[..., -window_size:]
    square[..., future] += torch.finfo(square.dtype).min
    weights = logits.softmax(dim=-1)
    vote = weights[..., :-window_size].sum(dim=-2)
    pool = torch.nn.MaxPool1d if pooling == "max" else torch.nn.AvgPool1d
    return pool(kernel_size, stride=1, padding=kernel_size // 2)(vote)


def listing_kept(scores: Tensor, *, prompt_tokens: int, capacity: int) -> list[set[int]]:
    """Lines 5, 15 and 18 to 24: the kept positions of every (row, head), row by row.

    Args:
        scores: (B, H, P) from `listing_scores`.
        capacity: `max_capacity_prompt`, window included.
    """
    heads = scores.shape[0] * scores.shape[1]
    if prompt_tokens < capacity:
        return [set(range(prompt_tokens))] * heads
    prefix_tokens = scores.shape[-1]
    window_size = prompt_tokens - prefix_tokens
    indices = scores.topk(capacity - window_size, dim=-1).indices.flatten(0, 1)
    window = set(range(prefix_tokens, prompt_tokens))
    return [set(best.tolist()) | window for best in indices]
