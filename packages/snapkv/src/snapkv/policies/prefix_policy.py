"""The base of methods that are a score and a budget, and keep the best positions and the window."""

import functools
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from snapkv.errors import InvalidTypeError, wrong
from snapkv.policies.base import Policy
from snapkv.policies.budget import AutoBudget, Budget, ByteBudget, TokenBudget
from snapkv.policies.prefix import Prefix
from snapkv.policies.spans import Spans, require_fit
from snapkv.policies.states import PromptLayer, Selection
from snapkv.validation import DEFAULT_BUDGET, DEFAULT_WINDOW, require_one_limit

_Score = TypeVar("_Score", bound=Callable[..., Any])


def of_any_layer(score: _Score) -> _Score:
    """Mark a `score` method as independent of the layer, so that layers can be stacked as rows.

    Returns:
        `score` itself.
    """
    vars(score)["of_any_layer"] = True
    return score


@dataclass(frozen=True)
class PrefixPolicy(Policy):
    """Keeps the window and the positions before it that have the best scores.

    Subclasses compute the scores.

    Args:
        budget: tokens kept per KV head and layer, window included; 1024 if neither is given. "auto"
            or an `AutoBudget` lets the votes choose, in methods that have votes; "12%", "64MiB" or
            a `ByteBudget` keeps as many tokens as fit into these bytes.
        keep_ratio: instead of `budget`, the fraction of the prefix to keep beside the window: k =
            floor(keep_ratio * prefix), in (0, 1] (Sec. 4, "voting"); at least the sinks.
        window_size: the last tokens of the prompt, always kept.

    Raises:
        InvalidArgumentError: a value is out of range, `budget` and `keep_ratio` are both given, the
            budget cannot hold the window and the sinks, or the votes are to choose it in a method
            without votes.
        InvalidTypeError: a value has the wrong type.
    """

    scores_after_drops: ClassVar[bool] = False
    """Whether `score` is right if tokens inside the prefix have been dropped."""

    scores_are_votes: ClassVar[bool] = False
    """Whether scores are shares of the window's attention, so that they can choose a budget."""

    compares_layers: ClassVar[bool] = False
    """Whether a score means the same in every layer, so that layers can share a budget by it."""

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
            problem = f"expected a number, or a text such as '12%', but got {self.budget!r}"
            raise wrong("budget", problem, "For example, use 1024 or '64MiB'", InvalidTypeError)
        if isinstance(self.budget, AutoBudget) and not self.scores_are_votes:
            problem = f"'auto' chooses the budget by votes, but the method {self.name} has no votes"
            raise wrong("budget", problem, "Use a number of tokens, or use SnapKV(budget='auto')")
        self.allocation.require_valid(self.window_size, self.sink_tokens)

    @property
    def sink_tokens(self) -> int:
        """The number of first tokens that each head keeps as attention sinks.

        They count towards the budget. It is 0 here; a method with sinks declares a parameter of
        this name.
        """
        return 0

    @functools.cached_property
    def allocation(self) -> Budget:
        """The budget as an object that can compute the number of positions to keep.

        It is `budget` if that is an `AutoBudget` or a `ByteBudget`, otherwise a `TokenBudget`.
        """
        if isinstance(self.budget, Budget):
            return self.budget
        return TokenBudget(self.budget, self.keep_ratio)  # type: ignore[arg-type] # never a text

    @property
    def most_tokens(self) -> int | None:
        return self.allocation.most_tokens

    @property
    def promised_window(self) -> int:
        return self.window_size

    @abstractmethod
    def score(self, layer: PromptLayer) -> Tensor:
        """Compute a score for each position before the window.

        It is not called for a prompt that is not longer than the window. Scores of padding are
        ignored, but must be there.

        Returns:
            (B, num_kv_heads or Hq, T - window_size) float32, higher is better. The tensor is not
            changed afterwards, so it may be a view.
        """

    def compute_scores(self, prefix: Prefix) -> Tensor:
        """Compute the scores of the prefix, and check their shape and dtype.

        `score` is not called for an empty prefix.

        Returns:
            (B, H, P), the tensor that `score` returned; an empty one for an empty prefix.

        Raises:
            InvalidArgumentError: the method returned another shape or dtype, or NaN. NaN is found
                later if `layer.deferred_checks` is a list.
        """
        layer = prefix.layer
        if prefix.slots:
            return prefix.check_scores(self.score(layer), self.name)
        heads = layer.queries.shape[1] if self.per_query_head else layer.num_kv_heads
        return layer.keys.new_zeros(len(layer.keys), heads, 0, dtype=torch.float32)

    def summed_weights(self, layer: PromptLayer) -> int:
        """Return the number of attention weights that are added up in one score.

        It is 1 if a score is not a sum.
        """
        del layer
        return 1

    def compute_shares(self, prefix: Prefix) -> Tensor:
        """Compute the share of the window's attention that each position receives.

        Scores that are not votes are returned as they are, except for the marked positions.

        Returns:
            (B, H, P) float32: infinity for positions that must be kept, minus infinity for padding.

        Raises:
            InvalidArgumentError: the method returned another shape or dtype, or NaN. NaN is found
                later if `layer.deferred_checks` is a list.
        """
        return prefix.mark_required(self.compute_scores(prefix) / self.summed_weights(prefix.layer))

    def prefix(self, layer: PromptLayer, *, per_head_budget: bool = False) -> Prefix:
        """Return the positions of the layer that come before the window.

        Args:
            layer: the layer at the end of the prompt.
            per_head_budget: as in `Prefix`.
        """
        return Prefix(layer, self.window_size, self.sink_tokens, per_head_budget)

    def counts(self, prefix: Prefix) -> list[int]:
        """Return the number of positions that each row keeps before its window.

        In the first layer it also checks that every layer can hold the protected tokens.

        Raises:
            InvalidArgumentError: the protected tokens do not fit; the size of a token is not known,
                for a budget in bytes; or `score` returned invalid scores, if the votes choose the
                budget.
            BudgetTooSmallError: a budget in bytes cannot hold the window and the sinks.
        """
        if not prefix.layer.depth:
            self._require_last_layer_fits(prefix)
        return self.allocation.counts(prefix, self.compute_shares)

    def select(self, layer: PromptLayer) -> Selection | None:
        """Select the window, the attention sinks and the best positions before the window.

        Returns:
            The selection, with the same number of tokens in all heads of a row; None if everything
            fits.

        Raises:
            InvalidArgumentError: the protected tokens do not fit; the size of a token is not known,
                for a budget in bytes; or `score` returned another shape or dtype, or NaN.
            BudgetTooSmallError: a budget in bytes cannot hold the window and the sinks.
        """
        prefix = self.prefix(layer)
        kept = self.counts(prefix)
        return None if prefix.keeps_all(kept) else prefix.select(self.compute_scores(prefix), kept)

    @property
    def is_layer_independent(self) -> bool:
        """Whether the `score` method is marked with `of_any_layer`."""
        return getattr(type(self).score, "of_any_layer", False)

    @functools.cached_property
    def can_select_stacked(self) -> bool:
        """Whether several layers can be passed to `select` at once, stacked as rows.

        This is so if `score` is marked with `of_any_layer` and no subclass has a `select` of its
        own.
        """
        return self.is_layer_independent and self.keeps_the_best

    @property
    def keeps_the_best(self) -> bool:
        """Whether the positions are selected by their scores alone.

        This is so unless a subclass has a `select` method of its own.
        """
        return type(self).select is PrefixPolicy.select

    @property
    def can_select_after_drops(self) -> bool:
        """Whether `select` still works after tokens inside the prompt have been dropped.

        The scores must allow it, and the budget must not depend on the length of the prompt.
        """
        return self.scores_after_drops and self.most_tokens is not None

    def require_protection(self, spans: Spans) -> None:
        """Check that the budget can hold all tokens in `spans`.

        Only spans that no prompt can hold are refused here: a span that reaches past the prompt's
        end is not counted in full. Without a fixed number of tokens as the budget, nothing is
        refused.

        Raises:
            InvalidArgumentError: `spans` have more tokens than the budget holds beside its window,
                or a subclass that selects in another way cannot protect tokens.
        """
        if not self.keeps_the_best:
            super().require_protection(spans)
        if (most := self.allocation.most_tokens) is not None:
            room = most - self.window_size
            if spans.among_first(room + 1) > room:
                self._require_fits(spans.tokens, room)

    def require_fit(self, layer: PromptLayer) -> None:
        """Check that every layer can hold all protected tokens and sinks of a prompt.

        The check looks at the last layer, which has the smallest budget, so one call is enough. If
        the votes choose the budget, only its limit `most` counts.

        Args:
            layer: any layer at the end of the prompt.

        Raises:
            InvalidArgumentError: the protected tokens and the sinks do not fit beside the window,
                or the budget is in bytes and the size of a token is not known.
            BudgetTooSmallError: a budget in bytes cannot hold the window and the sinks.
        """
        self._require_last_layer_fits(self.prefix(layer))

    def _require_last_layer_fits(self, prefix: Prefix) -> None:
        """Check that the last layer, which has the smallest budget, can hold all protected tokens.

        If the votes choose the budget, only its limit `most` counts.

        Raises:
            InvalidArgumentError: the protected tokens and the sinks do not fit beside the window.
            BudgetTooSmallError: a budget in bytes cannot hold the window and the sinks.
        """
        last = prefix.layer.at_depth(prefix.layer.num_layers - 1)
        rooms = self.allocation.counts(replace(prefix, layer=last), None)
        for tokens, room in zip(prefix.required_counts, rooms, strict=False):
            self._require_fits(tokens, room)

    def _require_fits(self, tokens: int, room: int) -> None:
        sinks = f", its {self.sink_tokens} sinks included" if self.sink_tokens else ""
        require_fit(self.name, tokens, room, f"before its window of {self.window_size}{sinks}")
