"""CriticalKV (Feng et al., ICML 2026): what a value does to the output counts beside its vote."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from snapkv import ops
from snapkv.errors import UnsupportedModelError, wrong
from snapkv.policies.around import AroundScores
from snapkv.policies.base import Need
from snapkv.policies.prefix import Prefix
from snapkv.policies.prefix_policy import PrefixPolicy
from snapkv.policies.snapkv import SnapKV
from snapkv.policies.states import PromptLayer
from snapkv.token_cost import share_of
from snapkv.validation import require_ratio

_EPSILON = 1e-4
_POSITIONS_AT_ONCE = 1024


@dataclass(frozen=True)
class CriticalKV(AroundScores, PrefixPolicy):
    """Spends half of the budget by another policy's scores, and the rest by score times value.

    The value of a position is the L1 norm of what its head adds to the layer's output per unit of
    attention, ``W_O v``, averaged over the query heads of a KV head; the second half goes to the
    best ``(score + 1e-4) * norm``. A score of SnapKV counts there as in the authors' code: the mean
    attention of the window, not its sum. The window is kept as always and does not count towards
    either half. Scores that can be negative (KeyDiff) are first raised so that the lowest of a head
    is 0. Inside AdaKV the weighted scores also decide the heads' shares, where the authors use the
    votes alone.

    Args:
        policy: the method that scores, with its budget.
        first_share: the fraction of the prefix budget that is spent by the score alone, in (0, 1];
            1 is the policy itself.

    Raises:
        InvalidTypeError: `policy` does not score a prefix, or `first_share` is not a number.
        InvalidArgumentError: `first_share` is out of range, or `policy` does not keep its best
            scores.
    """

    name: ClassVar[str] = "criticalkv"

    budget: int | None = field(init=False)
    keep_ratio: float | None = field(init=False)
    window_size: int = field(init=False)
    policy: PrefixPolicy = field(default_factory=SnapKV, kw_only=False)
    _: KW_ONLY
    first_share: float = 0.5

    def __post_init__(self) -> None:
        self._require_scoring(", and wrap CriticalKV in AdaKV, not the other way round")
        require_ratio("first_share", self.first_share)
        for limit in ("budget", "keep_ratio", "window_size"):
            object.__setattr__(self, limit, getattr(self.policy, limit))

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | {"output_weight"}

    @property
    def sink_tokens(self) -> int:
        """The number of attention sinks of the wrapped policy; they count in the first share."""
        return self.policy.sink_tokens

    @property
    def most_tokens(self) -> int | None:
        return self.policy.most_tokens

    def counts(self, prefix: Prefix) -> list[int]:
        return self.policy.counts(prefix)

    def score(self, layer: PromptLayer) -> Tensor:
        """Compute scores that put the best positions of the wrapped policy first.

        These get the highest finite number, so the lower position comes first among them. The other
        positions follow in the order of score times value.

        Returns:
            (B, Hkv, P) float32; Hq heads if the policy scores query heads.

        Raises:
            UnsupportedModelError: the output projection does not take the heads' values side by
                side, or `layer` has none.
            InvalidArgumentError: the policy returned scores of another shape or dtype, or NaN; or
                the tokens that must be kept do not fit.
            BudgetTooSmallError: a budget in bytes cannot hold the window and the sinks.
        """
        prefix = self.prefix(layer)
        scores = self.policy.compute_scores(prefix)
        norms = projected_norms(layer, scores.shape[-1])
        norms = _to_12_bits(ops.reduce_group(norms, scores.shape[1], "mean"))
        means = _raised(scores, layer.pads) / self.policy.summed_weights(layer)
        weighed = (means + _EPSILON) * norms
        kept = [share_of(tokens, self.first_share) for tokens in self.counts(prefix)]
        first = prefix.select_best(scores, kept)
        chosen = torch.zeros(*scores.shape[:2], scores.shape[-1] + 1, dtype=torch.bool)
        chosen = chosen.to(scores.device).scatter(2, first % chosen.shape[-1], True)  # -1 is last
        return weighed.masked_fill(chosen[..., :-1], torch.finfo(scores.dtype).max)


def absolute_sum(states: Tensor) -> Tensor:
    """Return the sum of the absolute values over the last axis."""
    return states.abs().sum(dim=-1)


def projected_norms(
    layer: PromptLayer, prefix_tokens: int, norm: Callable[[Tensor], Tensor] = absolute_sum
) -> Tensor:
    """Compute how much the value of each position adds to the output of the layer.

    It is the norm of ``W_O v`` for each query head.

    Args:
        layer: a layer with `output_weight`.
        prefix_tokens: P, how many of the first positions, padding included.
        norm: computes the norm over the last axis; the L1 norm as in CriticalKV by default.

    Returns:
        (B, Hq, P) float32.

    Raises:
        UnsupportedModelError: the output projection does not take the heads' values side by side,
            or `layer` has none.
    """
    heads, size = layer.queries.shape[1], layer.values.shape[-1]
    weight = layer.output_weight
    if weight is None or weight.shape[1] != heads * size:
        found = "none" if weight is None else f"one of {weight.shape[1]} inputs"
        expected = f"expected an output projection of {heads} heads of {size} values"
        problem = f"{expected}, but got {found} in layer {layer.layer_idx}"
        raise wrong("model", problem, "Use a method that does not need it", UnsupportedModelError)
    group = heads // layer.values.shape[1]
    per_head = weight.float().view(weight.shape[0], heads, size)
    values = layer.values[:, :, :prefix_tokens].float()
    blocks = torch.split(values, _POSITIONS_AT_ONCE, dim=2)  # bounds the products, (B, P, hidden)
    norms = [
        torch.cat([norm(b[:, head // group] @ per_head[:, head].T) for b in blocks], -1)
        for head in range(heads)
    ]
    return torch.stack(norms, dim=1)


def _to_12_bits(norms: Tensor) -> Tensor:
    """Round the norms to 12 significant bits, so that equal tokens have equal norms.

    The last bits of equal values may differ in a batch. If two tokens have equal norms and votes,
    the lower position wins, in a batch as in a single row.
    """
    high = norms * (2**12 + 1)
    return high - (high - norms)


def _raised(scores: Tensor, pads: Tensor | None) -> Tensor:
    """Raise the scores of each head by a constant so that the lowest score is not negative.

    Heads without negative scores stay as they are. Padding is not counted for the lowest score.

    Args:
        scores: (B, H, P), which stays unchanged.
        pads: (B, 1, S) bool, True for padding; None if there is none.
    """
    real = scores if pads is None else scores.masked_fill(pads[..., : scores.shape[-1]], 0.0)
    return scores - real.amin(dim=-1, keepdim=True).clamp(max=0.0)
