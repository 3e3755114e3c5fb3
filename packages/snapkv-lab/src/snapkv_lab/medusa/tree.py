"""Trees of candidates: which drafts are tried together, and which of them are accepted.

Medusa (Cai et al., 2024), sections 2.1.2 and 2.3. Head k drafts the token k + 1 places ahead; a
path of the tree takes one of the most likely tokens of each head. Node 0 is the root, the token the
model itself has chosen.
"""

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snapkv.errors import InvalidArgumentError

HEAD_RANKS = 10
"""How many tokens of each head a tree can try."""

NO_NODE = -1
"""Fills up the paths that are shorter than the longest."""

EPSILON = 0.09
"""Typical acceptance: a token this likely is always accepted (Medusa's `posterior_threshold`)."""

DELTA = 0.3
"""Typical acceptance: how much less will do where the model is unsure (`posterior_alpha`)."""

Path = tuple[int, ...]


@dataclass(frozen=True)
class CandidateTree:
    """Paths below the root, each a list of ranks: (0, 2) is the third choice of head 2 below the
    first choice of head 1.

    Args:
        choices: the paths of all nodes but the root, in any order. They are sorted by length, then
            by their ranks; node i + 1 is the i-th of them.

    Raises:
        InvalidArgumentError: a path without its parent, a rank out of range, or one path twice.
    """

    choices: tuple[Path, ...]

    def __post_init__(self) -> None:
        """Sort the paths and check that they make a tree."""
        paths = sorted((tuple(path) for path in self.choices), key=lambda path: (len(path), path))
        known: set[Path] = {()}
        for path in paths:
            fault = "an empty path, the root's" if not path else ""
            if path in known:
                fault = fault or "it twice"
            elif path[:-1] not in known:
                fault = f"no path {path[:-1]} above it"
            elif not 0 <= path[-1] < HEAD_RANKS:
                fault = f"a rank that is not 0 to {HEAD_RANKS - 1}"
            if fault:
                raise InvalidArgumentError(
                    f"choices: expected every path once, below its parent, of ranks from 0 to "
                    f"{HEAD_RANKS - 1}, got {path} with {fault}; correct it"
                )
            known.add(path)
        object.__setattr__(self, "choices", tuple(paths))

    @classmethod
    def chain(cls, depth: int) -> "CandidateTree":
        """The first choice of each of `depth` heads, one below the other."""
        return cls(tuple((0,) * length for length in range(1, depth + 1)))

    @classmethod
    def likeliest(cls, accuracies: Sequence[Sequence[float]], nodes: int) -> "CandidateTree":
        """The tree with the longest expected acceptance (section 2.3.3).

        Args:
            accuracies: for each head, how often its choice of each rank is right.
            nodes: how many nodes below the root.
        """
        chosen: list[Path] = []
        waiting: list[tuple[float, Path]] = [
            (-share, (rank,)) for rank, share in enumerate(accuracies[0][:HEAD_RANKS])
        ]
        heapq.heapify(waiting)
        while waiting and len(chosen) < nodes:
            negative, path = heapq.heappop(waiting)
            chosen.append(path)
            if len(path) < len(accuracies):
                for rank, share in enumerate(accuracies[len(path)][:HEAD_RANKS]):
                    heapq.heappush(waiting, (negative * share, (*path, rank)))
        return cls(tuple(chosen))

    @functools.lru_cache  # noqa: B019 # trees are few and small
    def pruned(self, depth: int) -> "CandidateTree":
        """The tree without paths longer than `depth`: as deep as there are heads, or room."""
        return CandidateTree(tuple(path for path in self.choices if len(path) <= depth))

    @property
    def depth(self) -> int:
        """Length of the longest path."""
        return max(map(len, self.choices), default=0)

    @property
    def is_chain(self) -> bool:
        """Whether no two candidates compete."""
        return len(self.choices) == self.depth

    @functools.cached_property
    def visible(self) -> Tensor:
        """(1 + N, 1 + N) bool: each node sees itself, its ancestors and the root."""
        seen = torch.eye(1 + len(self.choices), dtype=torch.bool)
        for node, parent in enumerate(self._parents[1:], start=1):
            seen[node] |= seen[parent]
        return seen

    @functools.cached_property
    def depths(self) -> Tensor:
        """(1 + N,) int64: how far after the root each node is in the text."""
        return torch.tensor([0, *map(len, self.choices)])

    @functools.cached_property
    def picks(self) -> Tensor:
        """(1 + N,) int64: places in [root, `HEAD_RANKS` of head 1, as many of head 2, ...]."""
        return torch.tensor(
            [0, *(path[-1] + HEAD_RANKS * (len(path) - 1) + 1 for path in self.choices)]
        )

    @functools.cached_property
    def paths(self) -> Tensor:
        """(leaves, 1 + depth) int64: the nodes from the root to every leaf, then `NO_NODE`.

        The longest come first, of equal length those of higher ranks.
        """
        inner = set(self._parents[1:])
        leaves = [node for node in range(1 + len(self.choices)) if node not in inner]
        rows = []
        for leaf in sorted(leaves, reverse=True):
            row = [leaf]
            while row[-1]:
                row.append(self._parents[row[-1]])
            rows.append(row[::-1] + [NO_NODE] * (1 + self.depth - len(row)))
        return torch.tensor(rows)

    @functools.cached_property
    def _parents(self) -> list[int]:
        """The node above each; the root's own for the root."""
        node_of = {(): 0} | {path: node for node, path in enumerate(self.choices, start=1)}
        return [0, *(node_of[path[:-1]] for path in self.choices)]


def accept_greedily(paths: Tensor, tokens: Tensor, chosen: Tensor) -> list[int]:
    """The longest path of candidates that the model would have chosen itself.

    Args:
        paths: (leaves, 1 + depth) int64, nodes from the root to every leaf, then -1.
        tokens: (nodes,) int64, the candidate in every node.
        chosen: (nodes,) int64, the token the model takes after every node.

    Returns:
        The accepted nodes, root first; of paths of equal length, those of the first.
    """
    lengths = _accepted(paths, tokens[paths[:, 1:]] == chosen[paths[:, :-1]])
    return _nodes(paths, lengths, int(lengths.argmax()))


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
        paths: as for `accept_greedily`.
        tokens: as for `accept_greedily`.
        probabilities: (nodes, V), the model's after every node, temperature included.
        epsilon: a token this likely is accepted whatever the entropy.
        delta: factor on the bound where the model is unsure.

    Returns:
        The accepted nodes, root first; of paths of equal length, those of the most likely.
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
    return _nodes(paths, lengths, int(likelihood.argmax()))


def _accepted(paths: Tensor, fits: Tensor) -> Tensor:
    """(leaves,) int64: how many candidates of every path fit, up to the first that does not."""
    return (fits & (paths[:, 1:] != NO_NODE)).long().cumprod(dim=-1).sum(dim=-1)


def _nodes(paths: Tensor, lengths: Tensor, row: int) -> list[int]:
    nodes: list[int] = paths[row, : 1 + int(lengths[row])].tolist()
    return nodes
