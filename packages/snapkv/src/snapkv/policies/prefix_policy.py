"""A method that is a score and a budget: the best of what stands before the window stay."""

import functools
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from snapkv.errors import InvalidArgumentError, InvalidTypeError
from snapkv.policies.base import Policy
from snapkv.policies.budget import AutoBudget, Budget, ByteBudget, TokenBudget
from snapkv.policies.prefix import Prefix
from snapkv.policies.spans import Spans, require_room
from snapkv.policies.states import PromptLayer, Selection
from snapkv.validation import DEFAULT_BUDGET, DEFAULT_WINDOW, require_one_limit

_Score = TypeVar("_Score", bound=Callable[..., Any])


def of_any_layer(score: _Score) -> _Score:
    """Mark a `score` that goes by a row's states alone: layers may be shown to it as rows."""
    vars(score)["of_any_layer"] = True
    return score


@dataclass(frozen=True)
class PrefixPolicy(Policy):
    """Keeps the window and the best-scored positions before it; subclasses give the scores.

    Args:
        budget: tokens kept per KV head and layer, window included; 1024 if neither is given.
            "auto", or an `AutoBudget`, lets the votes choose, for methods that have some; "12%",
            "64MiB", or a `ByteBudget`, keeps what fits into so many bytes.
        keep_ratio: instead of `budget`, the fraction of the prefix to keep beside the window:
            k = floor(keep_ratio * prefix), in (0, 1] (Sec. 4, "voting"); the sinks at least.
        window_size: the last tokens of the prompt, always kept.

    Raises:
        InvalidArgumentError: a value out of range, or both `budget` and `keep_ratio`.
        InvalidTypeError: a value of the wrong type.
    """

    rates_what_is_held: ClassVar[bool] = False
    """Whether `score` is right where tokens between those of the prefix have been dropped."""

    scores_are_votes: ClassVar[bool] = False
    """Whether a budget may be chosen by the scores, as shares of the window's attention."""

    compares_layers: ClassVar[bool] = False
    """Whether a score means the same in every layer, so that these can share a budget by it."""

    budget: int | str | AutoBudget | ByteBudget | None = None
    _: KW_ONLY
    keep_ratio: float | None = None
    window_size: int = DEFAULT_WINDOW

    def __post_init__(self) -> None:
        if self.budget is None and self.keep_ratio is None:
            object.__setattr__(self, "budget", DEFAULT_BUDGET)
        require_one_limit(self.budget, self.keep_ratio)
        object.__setattr__(self, "budget", AutoBudget.read(ByteBudget.read(self.budget)))
        if isinstance(self.budget, str):
            raise InvalidTypeError(
                f"budget: expected a number of tokens, 'auto', or bytes as '12%' or '64MiB', got "
                f"{self.budget!r}; pass one of them"
            )
        if isinstance(self.budget, AutoBudget) and not self.scores_are_votes:
            raise InvalidArgumentError(
                f"budget: expected a number of tokens with {self.name}, since 'auto' uses the "
                "votes of SnapKV, got 'auto'; pass a number, or use SnapKV(budget='auto')"
            )
        self.allocation.require_valid(self.window_size, self.sink_tokens)

    @property
    def sink_tokens(self) -> int:
        """Attention sinks; none here: methods that have some declare a parameter of this name.

        They count towards the budget.
        """
        return 0

    @functools.cached_property
    def allocation(self) -> Budget:
        """Where the budget becomes positions of every layer."""
        if isinstance(self.budget, Budget):
            return self.budget
        return TokenBudget(self.budget, self.keep_ratio)  # type: ignore[arg-type] # no text by now

    @property
    def most_tokens(self) -> int | None:
        """The budget."""
        return self.allocation.most_tokens

    @property
    def promised_window(self) -> int:
        return self.window_size

    @abstractmethod
    def score(self, layer: PromptLayer) -> Tensor:
        """Rate the prefix: (B, num_kv_heads or Hq, T - window_size) float32, higher first."""

    def scored(self, prefix: Prefix) -> Tensor:
        """`score`, whose shape and dtype are right; a method is not asked about no prefix."""
        layer = prefix.layer
        if prefix.slots:
            return prefix.checked(self.score(layer), self.name)
        heads = layer.queries.shape[1] if self.per_query_head else layer.num_kv_heads
        return layer.keys.new_zeros(len(layer.keys), heads, 0, dtype=torch.float32)

    def summed_weights(self, layer: PromptLayer) -> int:
        """How many attention weights a score is the sum of; 1 where it is none, or their mean."""
        del layer
        return 1

    def rated(self, prefix: Prefix) -> Tensor:
        """(B, H, P) float32: votes as shares of the window's attention, other scores as they are.

        What must stay is inf, pads are -inf.
        """
        return prefix.ranked(self.scored(prefix) / self.summed_weights(prefix.layer))

    def prefix(self, layer: PromptLayer, *, per_head_budget: bool = False) -> Prefix:
        """What of the layer stands before the window."""
        return Prefix(layer, self.window_size, self.sink_tokens, per_head_budget)

    def counts(self, prefix: Prefix) -> list[int]:
        """B numbers: positions that each row keeps; refused where what must stay does not fit."""
        if not prefix.layer.depth:
            self._require_room(prefix)
        return self.allocation.counts(prefix, self.rated)

    def select(self, layer: PromptLayer) -> Selection | None:
        """Keep the sinks, the best of the prefix and the window, or everything where it fits."""
        prefix = self.prefix(layer)
        kept = self.counts(prefix)
        return None if prefix.fits(kept) else prefix.select(self.scored(prefix), kept)

    @property
    def scores_any_layer(self) -> bool:
        """Whether `score` goes by a row's states alone; one that a subclass brings says so."""
        return getattr(type(self).score, "of_any_layer", False)

    @functools.cached_property
    def chooses_of_stacks(self) -> bool:
        """Where its score does."""
        return self.scores_any_layer and self.keeps_the_best

    @property
    def keeps_the_best(self) -> bool:
        """Whether it leaves the choice to the scores."""
        return type(self).select is PrefixPolicy.select

    @property
    def chooses_from_a_part(self) -> bool:
        """Where its scores do, and its budget does not go by the prompt's length."""
        return self.rates_what_is_held and self.most_tokens is not None

    def require_protection(self, spans: Spans) -> None:
        """Raise where no prompt that is compressed leaves them room, or a subclass chooses."""
        if not self.keeps_the_best:
            super().require_protection(spans)
        if (most := self.allocation.most_tokens) is not None:
            room = most - self.window_size
            if spans.among_first(room + 1) > room:
                self._require_fits(spans.tokens, room)

    def require_room(self, layer: PromptLayer) -> None:
        self._require_room(self.prefix(layer))

    def _require_room(self, prefix: Prefix) -> None:
        """Raise unless what must stay fits into the last layer, which keeps least."""
        last = prefix.layer.at(prefix.layer.num_layers - 1)
        rooms = self.allocation.counts(replace(prefix, layer=last), None)
        for tokens, room in zip(prefix.needed, rooms, strict=False):
            self._require_fits(tokens, room)

    def _require_fits(self, tokens: int, room: int) -> None:
        sinks = f", its {self.sink_tokens} sinks included" if self.sink_tokens else ""
        require_room(self.name, tokens, room, f"before its window of {self.window_size}{sinks}")
