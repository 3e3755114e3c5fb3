"""Which drafts are accepted: greedily, by plausibility, or by rejection sampling.

Pure functions of what was drafted and what the model says of it.
"""

import torch
from torch import Tensor

from snapkv.decoding.tree import NO_NODE

EPSILON = 0.09
"""Typical acceptance: a token this likely is always accepted (Medusa's `posterior_threshold`)."""

DELTA = 0.3
"""Typical acceptance: how much less will do where the model is unsure (`posterior_alpha`)."""


def accept_greedily(paths: Tensor, tokens: Tensor, chosen: Tensor) -> list[int]:
    """The longest path of candidates that the model would have chosen itself.

    Args:
        paths: (leaves, 1 + depth) int64, nodes from the root to every leaf, then -1.
        tokens: (nodes,) int64, the candidate in every node.
        chosen: (nodes,) int64, the token the model takes behind every node.

    Returns:
        The accepted nodes, root first; of paths of equal length, those of the first.
    """
    lengths = _accepted(paths, tokens[paths[:, 1:]] == chosen[paths[:, :-1]])
    best = int(lengths.argmax())
    return _nodes(paths, best, int(lengths[best]))


def accept_typically(
    paths: Tensor,
    tokens: Tensor,
    probabilities: Tensor,
    *,
    epsilon: float = EPSILON,
    delta: float = DELTA,
) -> list[int]:
    """The longest path of candidates that are plausible: p > min(epsilon, delta * exp(-entropy)).

    Medusa, section 2.3.1. What is generated is no sample of the model's distribution.

    Args:
        paths: (leaves, 1 + depth) int64, nodes from the root to every leaf, then -1.
        tokens: (nodes,) int64, the candidate in every node.
        probabilities: (nodes, V), the model's behind every node, temperature included.
        epsilon: a token this likely is accepted whatever the entropy.
        delta: factor on the bound where the model is unsure.

    Returns:
        The accepted nodes, root first; of paths of equal length, those of the likeliest.
    """
    above, below = paths[:, :-1], paths[:, 1:]
    entropy = torch.special.entr(probabilities).sum(dim=-1)
    bound = (delta * (-entropy).exp()).clamp(max=epsilon)
    of_tokens = probabilities[above, tokens[below]]
    lengths = _accepted(paths, of_tokens > bound[above])
    logs = of_tokens.clamp(min=torch.finfo(of_tokens.dtype).tiny).log()
    taken = torch.arange(logs.shape[1], device=logs.device) < lengths[:, None]
    likelihood = (logs * taken).sum(dim=-1)
    likelihood = likelihood.masked_fill(lengths < lengths.amax(), -torch.inf)
    best = int(likelihood.argmax())
    return _nodes(paths, best, int(lengths[best]))


def accept_sampled(
    drafts: Tensor, draft_probabilities: Tensor, probabilities: Tensor
) -> tuple[int, int]:
    """Accept drafts so that the text is a sample of the model's own distribution.

    Leviathan et al. (2023), algorithm 1: a draft stays with probability min(1, p / q); the first
    that does not is replaced by a draw from the part of p above q.

    Args:
        drafts: (N,) int64, drawn one behind the other.
        draft_probabilities: (N, V), q, which they were drawn from.
        probabilities: (N + 1, V), p, the model's before every draft and behind the last.

    Returns:
        How many drafts are accepted, and the token behind them.
    """
    places = torch.arange(len(drafts), device=drafts.device)
    ratio = probabilities[places, drafts] / draft_probabilities[places, drafts]
    stays = torch.rand(len(drafts), device=drafts.device) < ratio
    accepted = int(stays.long().cumprod(dim=0).sum())
    rest = probabilities[accepted]
    if accepted < len(drafts):
        above = (rest - draft_probabilities[accepted]).clamp(min=0)
        rest = above if bool(above.any()) else rest  # equal but for rounding
    return accepted, int(torch.multinomial(rest, 1))


def _accepted(paths: Tensor, fits: Tensor) -> Tensor:
    """(leaves,) int64: how many candidates of every path fit, up to the first that does not."""
    return (fits & (paths[:, 1:] != NO_NODE)).long().cumprod(dim=-1).sum(dim=-1)


def _nodes(paths: Tensor, row: int, accepted: int) -> list[int]:
    nodes: list[int] = paths[row, : 1 + accepted].tolist()
    return nodes
