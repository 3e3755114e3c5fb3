"""The base of methods that keep all of the most recent tokens and the best of the older ones."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from snapkv import ops
from snapkv.errors import wrong
from snapkv.policies.base import EvictingPolicy
from snapkv.policies.budget import require_tokens
from snapkv.policies.states import DecodeStep, Eviction, LayerStates, PromptLayer, Selection
from snapkv.validation import DEFAULT_BUDGET, require_int


class BestAndRecent(EvictingPolicy):
    """A policy that keeps the most recent tokens and the best of the older tokens.

    It evicts at the end of the prompt and during decoding. Subclasses compute the scores and the
    number of tokens to keep.
    """

    @property
    @abstractmethod
    def recent_tokens(self) -> int:
        """The number of tokens at the end that are always kept."""

    @abstractmethod
    def rate(self, states: LayerStates) -> Tensor:
        """Compute a score for each slot, at the end of the prompt and after a decode step.

        The scores of the recent tokens and of empty slots are not used.

        Returns:
            (B, H or 1, S) float32, higher is better.
        """

    def of_prompt(self, tokens: int, states: LayerStates) -> int:
        """Return the number of tokens of a row to keep at the end of the prompt.

        The default is the smaller one of `tokens` and `max_decode_tokens`.

        Args:
            tokens: how many tokens the row has.
            states: the layer.
        """
        assert self.max_decode_tokens is not None
        return min(tokens, self.max_decode_tokens)

    def of_step(self, tokens: int, states: LayerStates) -> int:
        """Return the number of tokens of a row to keep after a decode step.

        The default is that of the prompt. The result is `tokens` if nothing is to be evicted now.

        Args:
            tokens: how many tokens the row holds.
            states: the layer.
        """
        return self.of_prompt(tokens, states)

    def select(self, layer: PromptLayer) -> Selection:
        """Select the recent tokens of the prompt and the best of the older ones.

        Returns:
            The selection, without scores. It keeps everything if all of it fits.
        """
        if layer.keys.shape[2] <= self.of_prompt(max(layer.row_lengths), layer):
            return Selection.keep_all(layer)
        kept = [self.of_prompt(tokens, layer) for tokens in layer.row_lengths]
        return Selection.of(layer, self.keep(layer, self.rate(layer), kept))

    def evict(self, step: DecodeStep) -> Eviction:
        """Select the recent slots and the best of the older ones after a decode step.

        Returns:
            The slots to keep, without scores; all slots if no row is to evict any now.
        """
        slots = step.keys.shape[2]
        if self.of_step(slots, step) == slots:
            return Eviction()
        kept = [self.of_step(tokens, step) for tokens in step.row_lengths]
        keep_indices = self.keep(step, self.rate(step), kept)
        if step.padding_slots is None:
            return Eviction(keep_indices=keep_indices)
        own = ops.on_device(kept, keep_indices.device)
        return Eviction(keep_indices=keep_indices, padding_slots=keep_indices.shape[-1] - own)

    def keep(self, states: LayerStates, scores: Tensor, kept: list[int]) -> Tensor:
        """Select the recent slots and the best of the older slots.

        Args:
            states: the layer.
            scores: (B, H, S) float32, which stays unchanged.
            kept: how many slots each row keeps, the recent and the protected ones included.

        Returns:
            (B, H, max(kept)) int64, ascending. A row that keeps fewer begins with -1. If it has
            fewer tokens than are recent, its padding follows in the place of the missing ones.
        """
        slots, recent = states.keys.shape[2], self.recent_tokens
        older, protected = max(slots - recent, 0), states.protected
        best = ops.keep_best(
            scores[..., :older],
            [own - min(held, recent) for own, held in zip(kept, states.row_lengths, strict=True)],
            states.leading_padding,
            protected=None if protected is None else protected[..., :older],
        )
        last = torch.arange(older, slots, device=scores.device)
        return torch.cat([best, last.expand(*best.shape[:2], -1)], dim=-1)


class SplitBudget(BestAndRecent):
    """A policy that splits its budget into older tokens and recent tokens.

    A subclass calls `split_budget` when it is created, so that no part of the budget is None.
    """

    budget: int | None
    recent: int | None

    @property
    def max_decode_tokens(self) -> int:
        assert self.budget is not None
        return self.budget

    @property
    def recent_tokens(self) -> int:
        assert self.recent is not None
        return self.recent


def split_budget(policy: Any, first: str, *, default_recent: Callable[[int], int]) -> None:
    """Compute the missing parts of a budget that consists of older and recent tokens.

    Changes the fields `budget`, `first` and `recent` of `policy` in place; two of them determine
    the third. If none is given, the budget is `DEFAULT_BUDGET`.

    Args:
        policy: the frozen policy being built. Fields that were not given are None.
        first: the name of the field with the older part, which may be 0; the recent one is at least
            1.
        default_recent: returns the recent part of a budget if only the budget is given.

    Raises:
        InvalidTypeError: a value is no integer.
        InvalidArgumentError: a value is out of range, the parts do not add up to the budget, or the
            budget is in bytes.
    """
    require_tokens(policy)
    budget, head, tail = policy.budget, getattr(policy, first), policy.recent
    for name, value, minimum in (("budget", budget, 1), (first, head, 0), ("recent", tail, 1)):
        if value is not None:
            require_int(name, value, minimum=minimum)
    if budget is None:
        budget = DEFAULT_BUDGET if head is None or tail is None else head + tail
    if tail is None:
        tail = budget - head if head is not None else default_recent(budget)
    if head is None:
        head = budget - tail
    if head < 0 or tail < 1 or head + tail != budget:
        expected = f"expected the sum of {first} and recent, where recent is at least 1"
        problem = f"{expected}, but got budget={budget}, {first}={head} and recent={tail}"
        raise wrong("budget", problem, f"Use a budget of at least {max(head, 0) + 1}")
    for name, value in (("budget", budget), (first, head), ("recent", tail)):
        object.__setattr__(policy, name, value)
