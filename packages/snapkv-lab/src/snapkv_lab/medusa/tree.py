"""Trees of candidates: which drafts are tried together, and which of them are accepted.

Medusa (Cai et al., 2024), sections 2.1.2 and 2.3. Head k drafts the token k + 1 positions ahead. A
path of the tree takes one of the most likely tokens of each head. Node 0 is the root: the token
that the model itself has chosen.
"""

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snapkv.errors import wrong

HEAD_RANKS = 10
"""How many tokens of each head a tree can try."""

NO_NODE = -1
"""The value that pads paths which are shorter than the longest one."""

EPSILON = 0.09
"""Typical acceptance: a token with this probability is always accepted (Medusa's
`posterior_threshold`).
"""

DELTA = 0.3
"""Typical acceptance: the factor that lowers the bound if the model is unsure
(`posterior_alpha`).
"""

Path = tuple[int, ...]


@dataclass(frozen=True)
class CandidateTree:
    """A tree of candidate tokens, which is described by the paths to its nodes.

    A path is a list of ranks: (0, 2) is the third choice of head 2 below the first choice of head
    1.

    Args:
        choices: the paths of all nodes except the root, in any order. They are sorted by length and
            then by their ranks; node i + 1 is the i-th path.

    Raises:
        InvalidArgumentError: a path has no parent, a rank is out of range, or a path is repeated.
    """

    choices: tuple[Path, ...]

    def __post_init__(self) -> None:
        """Sort the paths and check that they form a tree.

        Raises:
            InvalidArgumentError: a path has no parent, a rank is out of range, or a path is
                repeated.
        """
        paths = sorted((tuple(path) for path in self.choices), key=lambda path: (len(path), path))
        known: set[Path] = {()}
        for path in paths:
            fault = "is empty and belongs to the root" if not path else ""
            if path in known:
                fault = fault or "is repeated"
            elif path[:-1] not in known:
                fault = f"needs the path {path[:-1]} above it"
            elif not 0 <= path[-1] < HEAD_RANKS:
                fault = f"has a rank outside 0 to {HEAD_RANKS - 1}"
            if fault:
                raise wrong("choices", f"the path {path} {fault}", "Correct this path")
            known.add(path)
        object.__setattr__(self, "choices", tuple(paths))

    @classmethod
    def chain(cls, depth: int) -> "CandidateTree":
        """Create a tree with a single path, which takes the most likely token of `depth` heads."""
        return cls(tuple((0,) * length for length in range(1, depth + 1)))

    @classmethod
    def likeliest(cls, accuracies: Sequence[Sequence[float]], nodes: int) -> "CandidateTree":
        """Create the tree with the largest expected number of accepted tokens (section 2.3.3).

        Args:
            accuracies: for each head, at least one, how often its choice of each rank is right,
                from 0 to 1.
            nodes: the number of nodes below the root. There are fewer if the heads have not enough
                choices.
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
        """Return the tree without the paths that are longer than `depth`. Equal calls return the
        same object.
        """
        return CandidateTree(tuple(path for path in self.choices if len(path) <= depth))

    @property
    def depth(self) -> int:
        """The length of the longest path, which is the most tokens that are drafted ahead."""
        return max(map(len, self.choices), default=0)

    @property
    def is_chain(self) -> bool:
        """Whether no two candidates compete for the same position, as in a tree without drafts."""
        return len(self.choices) == self.depth

    @functools.cached_property
    def visible(self) -> Tensor:
        """The attention mask of the tree, in which each node sees itself and its ancestors: (1 + N,
        1 + N) bool, for the root and the N nodes below it.
        """
        seen = torch.eye(1 + len(self.choices), dtype=torch.bool)
        for node, parent in enumerate(self._parents[1:], start=1):
            seen[node] |= seen[parent]
        return seen

    @functools.cached_property
    def depths(self) -> Tensor:
        """The depth of each node in the tree: (1 + N,) int64, for the root, whose depth is 0, and
        the N nodes below it.
        """
        return torch.tensor([0, *map(len, self.choices)])

    @functools.cached_property
    def picks(self) -> Tensor:
        """The index of the token that each node takes from the candidates of all heads.

        (1 + N,) int64, for the root and the N nodes below it: indices into [root, `HEAD_RANKS`
        tokens of head 1, as many of head 2, ...].
        """
        return torch.tensor(
            [0, *(path[-1] + HEAD_RANKS * (len(path) - 1) + 1 for path in self.choices)]
        )

    @functools.cached_property
    def paths(self) -> Tensor:
        """The nodes on the path from the root to each leaf of the tree.

        (leaves, 1 + depth) int64, padded with `NO_NODE`. The longest paths come first; among paths
        of equal length, those with higher ranks come first.
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
        """The parent of each node. The root is its own parent."""
        node_of = {(): 0} | {path: node for node, path in enumerate(self.choices, start=1)}
        return [0, *(node_of[path[:-1]] for path in self.choices)]


def accept_greedily(paths: Tensor, tokens: Tensor, chosen: Tensor) -> list[int]:
    """Return the longest path of tokens that the model would have chosen itself.

    Args:
        paths: (leaves, 1 + depth) int64, nodes from the root to every leaf, padded with -1.
        tokens: (nodes,) int64, the candidate in every node.
        chosen: (nodes,) int64, the token that the model chooses after every node.

    Returns:
        The accepted nodes, root first; the root alone if no draft is right. Of paths with equal
        length, the first one counts.
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
    """Return the longest path of tokens that are plausible.

    A token is plausible if p > min(epsilon, delta * exp(-entropy)), as in Medusa, section 2.3.1.
    The generated text is not a sample of the model's distribution.

    Args:
        paths: as for `accept_greedily`.
        tokens: as for `accept_greedily`.
        probabilities: (nodes, V), the model's probabilities after every node, temperature included.
        epsilon: a token with this probability is accepted whatever the entropy.
        delta: the factor on the bound if the model is unsure.

    Returns:
        The accepted nodes, root first; the root alone if no draft is plausible. Of paths with equal
        length, the most likely one counts.
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
    """Return the number of tokens that are accepted on each path, without the root.

    Args:
        paths: as for `accept_greedily`.
        fits: (leaves, depth) bool, whether the token in each node below the root may be accepted.

    Returns:
        (leaves,) int64: how many candidates fit, up to the first that does not.
    """
    return (fits & (paths[:, 1:] != NO_NODE)).long().cumprod(dim=-1).sum(dim=-1)


def _nodes(paths: Tensor, lengths: Tensor, row: int) -> list[int]:
    nodes: list[int] = paths[row, : 1 + int(lengths[row])].tolist()
    return nodes
