"""A threshold in place of a budget: what a head keeps is what scores highly enough."""

from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

import torch

from snapkv import ops
from snapkv.errors import InvalidArgumentError
from snapkv.policies.around import AroundScores
from snapkv.policies.base import PrefixPolicy
from snapkv.policies.budget import AutoBudget
from snapkv.policies.snapkv import SnapKV
from snapkv.policies.states import PromptLayer, Selection
from snapkv.validation import require_finite


@dataclass(frozen=True)
class ScoreThreshold(AroundScores):
    """Keeps what another policy scores highly enough, so how much depends on the prompt.

    A head keeps the window, the policy's sinks, and every position of the prefix whose score is at
    least `at_least`; of more than the policy's limit allows, the best. So heads, layers and rows
    keep different numbers of tokens, and the bytes held are those of the tokens kept, as in AdaKV.

    As `DMSPress` of kvpress, after the inference of Dynamic Memory Sparsification (Łańcucki et al.,
    2025, arXiv 2506.05345) without its trained evictors. There what scores lower is masked and
    stays in memory, and there is no limit; `sliding_window_size` is the policy's `window_size`.
    Tokens behind the prompt all stay, as with `decoding=False`.

    Args:
        policy: the method that scores. Its budget, window included, or `keep_ratio` is the most
            that a head keeps; `keep_ratio=1.0` for no limit.
        at_least: the lowest score that is kept, in the units of the policy's scores:

            - SnapKV, PyramidKV: pooled attention, the mean over the window's queries and the query
              heads of a KV head (the highest of these with ``group_reduce="max"``), in [0, 1]; the
              votes of a head add up to at most 1 before pooling. `AutoBudget.lost_vote` if left
              out.
            - KVzip: the highest attention of any query, in [0, 1]; with `plus` times the ratio of
              the two norms.
            - KVzap: the logarithm of that, as its gate foretells it.
            - ExpectedAttention: expected attention times the norm of the value.
            - KeyDiff: minus a cosine, in [-1, 1].
            - LagKV: the share of the piece that stands out less; its ratings with `cross_scoring`.
            - Random: uniform, so that 1 - `at_least` of the prefix is kept.

    Raises:
        InvalidTypeError: `policy` does not score a prefix, or `at_least` is not a number.
        InvalidArgumentError: a policy that chooses by itself, ranks by more than one score, or
            whose budget is "auto"; no finite `at_least`.
    """

    name: ClassVar[str] = "score-threshold"
    parts_heads: ClassVar[bool] = True

    policy: PrefixPolicy = field(default_factory=SnapKV)
    _: KW_ONLY
    at_least: float | None = None

    def __post_init__(self) -> None:
        self._require_scoring()
        if isinstance(self.policy, AroundScores):
            raise InvalidArgumentError(
                f"policy: expected a method whose scores are of one kind, got {self.policy.name}, "
                "which puts what another one scores best before all else; pass SnapKV, KVzip or "
                "another that goes around none"
            )
        if isinstance(self.policy.budget, AutoBudget):
            raise InvalidArgumentError(
                "policy: expected a budget in tokens or a keep_ratio, the most that a head keeps, "
                f"got {self.policy.budget!r}, a threshold of its own; leave one of both out"
            )
        if self.at_least is not None or not self.policy.scores_are_votes:
            remedy = f"pass the lowest score of {self.policy.name} that is kept"
            require_finite("at_least", self.at_least, remedy)

    @property
    def threshold(self) -> float:
        """The lowest score that is kept: `at_least`, or what goes for votes."""
        return AutoBudget.lost_vote if self.at_least is None else float(self.at_least)

    @property
    def layers_alike(self) -> bool:
        """Never: the scores choose how many."""
        return False

    def select(self, layer: PromptLayer) -> Selection | None:
        """Keep the window in every head, and of the prefix what scores highly enough."""
        self.require_room(layer.uneven())
        prefix = self.policy.prefix(layer)
        if not any(prefix.lengths):
            return None
        rated = self.policy.rated(layer)
        limits = torch.tensor(self.policy.kept_prefix_tokens(layer.uneven()), device=rated.device)
        counts = torch.minimum((rated >= self.threshold).sum(dim=-1), limits[:, None])
        if all(set(row) == {own} for row, own in zip(counts.tolist(), prefix.lengths, strict=True)):
            return None
        best = ops.keep_best(rated, counts, layer.pad_tokens)
        return prefix.select_by_head(best, counts)
