"""Scissorhands (Liu et al., NeurIPS 2023): what was pivotal lately will be pivotal again."""

import functools
import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from snapkv import ops
from snapkv.errors import InvalidArgumentError, InvalidTypeError
from snapkv.policies.allocation import largest_remainder
from snapkv.policies.base import EvictingPolicy
from snapkv.policies.recent import keep_best_and_recent
from snapkv.policies.spans import Spans
from snapkv.policies.states import DecodeStep, Eviction, LayerStates, PromptLayer, Selection
from snapkv.validation import DEFAULT_BUDGET, require_choice, require_int


@dataclass(frozen=True)
class Scissorhands(EvictingPolicy):
    """Drops many tokens at once: those least often above the uniform level of attention lately.

    Whenever a head holds more than its budget, it counts for every token how many of the last
    `history` queries paid it more attention than the uniform level, keeps the `recent` last tokens,
    and drops the `drop` older ones with the lowest counts (Alg. 2), of equal counts the oldest
    first. So it holds between ``budget - drop + 1`` and ``budget`` tokens; ``drop=1`` holds the
    budget at every step. A prompt read in one pass is cut to the budget once.

    Choices where the paper leaves one. The printed Alg. 2 contradicts itself; this is the reading
    in which pivotal tokens stay. The counts are rebuilt where something is dropped, by the last
    queries over the tokens that are left, so the layer holds on to `history` queries. A small
    `drop` is slow: every drop compares all of them with all tokens again. Heads that share a KV
    head add their counts. The authors' code hides tokens inside the prompt instead and has no
    budget.

    Args:
        budget: tokens kept per KV head and layer, at most, on average over the layers.
        history: how many of the last queries count.
        recent: how many of the last tokens are never dropped, at least 1.
        drop: how many to drop at once; half of the layer's budget by default, as in the paper, or
            what `recent` leaves of it.
        threshold: the uniform level: 1 over the "tokens" of the sequence so far, as in the paper,
            or over the "slots" held before the drop.
        gamma: how much more the upper layers keep than the lower ones: budgets rise linearly from
            ``budget * (1 - gamma)`` to ``budget * (1 + gamma)``. The paper gives no formula.

    Raises:
        InvalidArgumentError: a value out of range, or a lowest layer without room for its `recent`
            tokens and a drop.
    """

    name: ClassVar[str] = "scissorhands"

    budget: int = DEFAULT_BUDGET
    _: KW_ONLY
    history: int = 400
    recent: int = 10
    drop: int | None = None
    threshold: Literal["tokens", "slots"] = "tokens"
    gamma: float = 0.0

    def __post_init__(self) -> None:
        """Check every parameter once, here."""
        for name in ("budget", "history", "recent"):
            require_int(name, getattr(self, name), minimum=1)
        if self.drop is not None:
            require_int("drop", self.drop, minimum=1)
        require_choice("threshold", self.threshold, ("tokens", "slots"))
        _require_gamma(self.gamma)
        self._check_room(self.recent + (self.drop or 1))

    def _check_room(self, least: int) -> None:
        """Raise unless the lowest layer has room for `least` tokens."""
        parts = f"more than recent={self.recent} tokens"
        if self.drop is not None:
            parts = f"recent={self.recent} tokens that stay and drop={self.drop} that go"
        if self.budget < least:
            raise InvalidArgumentError(
                f"budget: expected room for {parts}, got {self.budget}; a budget of at least "
                f"{least} would do"
            )
        if self.max_decode_tokens < least:
            most = math.floor((1 - least / self.budget) * 1000) / 1000
            raise InvalidArgumentError(
                f"gamma: expected room in the lowest layer for {parts}, got gamma={self.gamma}, "
                f"which leaves it {self.max_decode_tokens} of budget={self.budget}; gamma up to "
                f"{most}, or a budget of at least {math.ceil(least / (1 - self.gamma))}, would do"
            )

    @property
    def query_tokens(self) -> int:
        """The history."""
        return self.history

    @property
    def history_tokens(self) -> int:
        """The same while generating."""
        return self.history

    @property
    def max_decode_tokens(self) -> int:
        """The budget of the lowest layer."""
        return math.floor(self.budget * (1 - self.gamma) + 1e-9)

    def select(self, layer: PromptLayer) -> Selection:
        """Cut the prompt to the budget, once."""
        kept = layer.row_tokens.clamp(max=self._layer_budget(layer))
        if layer.keys.shape[2] <= int(kept.max()):
            return Selection.whole(layer)
        columns = torch.arange(layer.keys.shape[2], device=layer.keys.device)[None, None]
        counts = self._counts(layer, columns, layer.keys.shape[2])
        return Selection.of(layer, self._keep(counts, kept, layer))

    def evict(self, step: DecodeStep) -> Eviction:
        """Drop many at once from the rows that hold more than the budget."""
        budget = self._layer_budget(step)
        if step.keys.shape[2] <= budget:
            return Eviction()
        held = step.row_tokens
        cut = (held - self._layer_drop(budget)).clamp(max=budget)
        kept = torch.where(held > budget, cut, held)
        counts = self._counts(step, step.columns, step.seen_tokens)
        keep_indices = self._keep(counts, kept, step)
        fillers = None if step.filler_tokens is None else keep_indices.shape[-1] - kept
        return Eviction(keep_indices=keep_indices, filler_tokens=fillers)

    def require_protection(self, spans: Spans) -> None:
        """Raise unless the lowest layer has room for them right after a drop."""
        budget = self.max_decode_tokens
        room = budget + 1 - self._layer_drop(budget) - self.recent
        beside = f"beside its {self.recent} recent tokens when it has dropped"
        self._require_whole_spans(spans, room, beside)

    def _layer_budget(self, layer: LayerStates) -> int:
        return layer_budgets(self.budget, self.gamma, layer.num_layers)[layer.depth]

    def _layer_drop(self, budget: int) -> int:
        return min(budget // 2, budget - self.recent) if self.drop is None else self.drop

    def _counts(self, states: LayerStates, columns: Tensor, seen_tokens: int) -> Tensor:
        """(B, num_kv_heads, S) float32: how often each token was above the uniform level."""
        tokens = states.row_tokens
        if self.threshold == "tokens":
            pads = torch.zeros_like(tokens) if states.pad_tokens is None else states.pad_tokens
            tokens = seen_tokens - pads
        counts = ops.times_above(
            states.queries,
            states.keys,
            threshold=1.0 / tokens,
            columns=columns,
            seen_tokens=seen_tokens,
            pad_tokens=states.pad_tokens,
            score_options=states.score_options,
        )
        return ops.reduce_group(counts, states.num_kv_heads, "sum")

    def _keep(self, counts: Tensor, kept: Tensor, states: LayerStates) -> Tensor:
        """The recent tokens and the best of the others; of equal counts the newer is better."""
        ranks = counts.argsort(dim=-1, stable=True).argsort(dim=-1).float()
        older = kept - states.row_tokens.clamp(max=self.recent)
        return keep_best_and_recent(
            ranks, older, self.recent, states.leading_fillers, states.protected
        )


@functools.cache
def layer_budgets(budget: int, gamma: float, num_layers: int) -> tuple[int, ...]:
    """Budgets that rise linearly from the bottom layer to the top one and keep their mean."""
    steps = max(num_layers - 1, 1)
    shares = [budget * (1 + gamma * (2 * depth / steps - 1)) for depth in range(num_layers)]
    if num_layers == 1:
        shares = [float(budget)]
    return tuple(largest_remainder(shares, budget * num_layers))


def _require_gamma(gamma: object) -> None:
    if isinstance(gamma, bool) or not isinstance(gamma, int | float):
        raise InvalidTypeError(
            f"gamma: expected a number from 0 to below 1, got {gamma!r} of type "
            f"{type(gamma).__name__}; pass 0 for equal layers"
        )
    if not 0 <= gamma < 1:
        raise InvalidArgumentError(
            f"gamma: expected a number from 0 to below 1, got {gamma}; pass 0 for equal layers"
        )
