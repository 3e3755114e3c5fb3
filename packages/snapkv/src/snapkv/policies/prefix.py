"""The positions before the window of a layer: which must be kept, and which score best."""

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snapkv import ops
from snapkv.errors import wrong
from snapkv.policies.states import DeferredChecks, PromptLayer, Selection, run_checks


def _require_number(name: str, highest: Sequence[float]) -> None:
    """Raise an error if the scores of a policy contain NaN.

    Args:
        name: the name of the policy.
        highest: one number, the highest score, which is NaN if any score is.

    Raises:
        InvalidArgumentError: `highest` holds NaN.
    """
    if math.isnan(highest[0]):
        remedy = "Compute scores in float32, and do not divide by numbers that may be 0"
        raise wrong("score", f"the method {name} returned scores that are NaN", remedy)


@dataclass(frozen=True)
class Prefix:
    """The positions of a prompt that come before the observation window.

    Attributes:
        layer: the layer at the end of the prompt; its rows may be those of several stacked layers.
        window_size: the last tokens of the prompt, which every head keeps.
        sink_tokens: attention sinks, first tokens of every row that each head keeps whatever their
            scores. If they do not all fit beside the window, the first of them.
        per_head_budget: whether heads or layers keep different numbers of tokens around a mean.
    """

    layer: PromptLayer
    window_size: int
    sink_tokens: int
    per_head_budget: bool = False

    @functools.cached_property
    def slots(self) -> int:
        """The number of slots before the window, padding included.

        It is 0 if the whole prompt fits into the window.
        """
        return max(0, self.layer.keys.shape[2] - self.window_size)

    @functools.cached_property
    def lengths(self) -> list[int]:
        """The number of tokens of each row before the window, without padding.

        The first access waits for a GPU if there is padding.
        """
        return [max(0, tokens - self.window_size) for tokens in self.layer.row_lengths]

    @property
    def sinks(self) -> list[int]:
        """The number of attention sinks in each row that lie before the window."""
        return [min(self.sink_tokens, tokens) for tokens in self.lengths]

    @functools.cached_property
    def must_stay(self) -> Tensor | None:
        """A mask of the protected positions and the attention sinks, which every head must keep.

        Shape: (B, 1 or H, P) bool. It is None if no position is protected, even if there are sinks.
        """
        layer, slots = self.layer, self.slots
        if layer.protected is None:
            return None
        sinks = layer.is_among_first(self.sink_tokens, slots) & ~layer.is_among_first(0, slots)
        return sinks | layer.protected[..., :slots]

    def keeps_all(self, kept: list[int]) -> bool:
        """Return whether nothing is dropped except for padding that all rows have.

        Args:
            kept: how many positions each row keeps before its window.
        """
        return not self.slots or (self.slots <= max(kept) and kept == self.lengths)

    @functools.cached_property
    def required_counts(self) -> list[int]:
        """The number of protected positions and attention sinks before the window in each row.

        It is the largest number over the heads of the row. The list is empty if no position is
        protected, even if there are sinks. The first access waits for a GPU.
        """
        must_stay = self.must_stay
        return [] if must_stay is None else must_stay.sum(dim=-1).amax(dim=-1).tolist()

    def check_scores(self, scores: Tensor, name: str) -> Tensor:
        """Check the scores that a policy has returned, and return the same tensor.

        NaN is looked for outside padding only. If `layer.deferred_checks` is a list, this check is
        appended to it and raises its error later.

        Args:
            scores: what `PrefixPolicy.score` returned. It must be (B, H, P) floating point, where H
                is 1 or a multiple of the number of KV heads.
            name: the name of the policy, for the message.

        Raises:
            InvalidArgumentError: `scores` is not a tensor, has another shape or dtype, or contains
                NaN.
        """
        batch, heads, tokens = self.layer.keys.shape[0], self.layer.keys.shape[1], self.slots
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        fits = isinstance(got, tuple) and len(got) == 3 and (got[0], got[2]) == (batch, tokens)
        if not fits or (got[1] != 1 and got[1] % heads) or not scores.is_floating_point():
            dtype = f" of {scores.dtype}" if isinstance(scores, Tensor) else ""
            expected = f"a float tensor with the shape ({batch}, {heads}, {tokens}) from {name}"
            raise wrong(
                "score",
                f"expected {expected}, which is (rows, KV heads, positions before the window), "
                f"but got {got}{dtype}",
                "Return the scores of layer.keys[:, :, : -self.window_size], without the window",
            )
        if tokens:
            pads, deferred = self.layer.pad_tokens, self.layer.deferred_checks
            own = scores if pads is None else ops.fill_first(scores, 0, 0.0, pads)
            checks: DeferredChecks = [(own.amax(), functools.partial(_require_number, name))]
            run_checks(checks) if deferred is None else deferred.extend(checks)
        return scores

    def mark_required(self, scores: Tensor) -> Tensor:
        """Replace the scores of protected positions and attention sinks by infinity.

        Padding gets minus infinity.

        Args:
            scores: (B, H, P) float32, which stays unchanged.

        Returns:
            (B, H, P) float32; `scores` itself if nothing was replaced.
        """
        if (must_stay := self.must_stay) is not None:
            heads = scores.shape[1] // must_stay.shape[1]
            scores = scores.masked_fill(must_stay.repeat_interleave(heads, dim=1), math.inf)
        pads = self.layer.pad_tokens
        scores = ops.fill_first(scores, self.sink_tokens, math.inf, pads)
        return scores if pads is None else ops.fill_first(scores, 0, -math.inf, pads)

    def select_best(self, scores: Tensor, kept: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """Return the indices of the positions that must be kept and of the best others.

        Of equal scores the lower position wins.

        Args:
            scores: (B, H, P) float32, which stays unchanged.
            kept: how many positions each row keeps before its window, sinks and protected positions
                included; or B lists of H numbers, one for each head.

        Returns:
            (B, H, K) int64, ascending, after a run of -1 in heads that keep fewer than the largest
            number, K. If `scores` have one head, but heads protect different positions, the result
            has a head for each.
        """
        return ops.keep_best(
            scores,
            kept,
            self.layer.pad_tokens,
            first_tokens=self.sink_tokens,
            protected=self.must_stay,
        )

    def select(self, scores: Tensor, kept: list[int]) -> Selection:
        """Select the window and the best positions before it, the same number in every head.

        Args:
            scores: (B, H, P) float32, which stays unchanged.
            kept: how many positions each row keeps before its window, sinks and protected positions
                included.
        """
        best = self.select_best(scores, kept)
        tokens, window = self.layer.keys.shape[2], self._window(best)
        keep_indices, padding_slots = torch.cat([best, window], dim=-1), None
        if self.layer.pad_tokens is not None or min(kept) < max(kept):
            own = list(map(operator.add, kept, self.window_tokens))
            padding_slots = keep_indices.shape[-1] - ops.on_device(own, best.device)
        return Selection(
            keep_indices=keep_indices, prompt_tokens=tokens, padding_slots=padding_slots
        )

    def select_by_head(self, scores: Tensor, kept: list[list[int]]) -> Selection:
        """Select the window and the best positions before it, a different number in each head.

        Args:
            scores: (B, H, P) float32, which stays unchanged.
            kept: B lists of H numbers, how many positions each head keeps before its window, sinks
                and protected positions included.

        Returns:
            A selection with `head_tokens`; with a single head, one with `padding_slots` instead.
        """
        best, pads = self.select_best(scores, kept), self.layer.pad_tokens
        window = self._window(best)
        if pads is not None:
            window = window.masked_fill(window < pads[:, None, None], -1)
        keep_indices = torch.cat([best, window], dim=-1)
        rows = zip(kept, self.window_tokens, strict=True)
        tokens = [[each + more for each in row] for row, more in rows]
        return Selection.of_counts(
            keep_indices,
            torch.tensor(tokens),
            per_head_budget=len(tokens[0]) > 1,  # a single head, or one latent for all heads
            prompt_tokens=self.layer.keys.shape[2],
        )

    def _window(self, best: Tensor) -> Tensor:
        tokens = self.layer.keys.shape[2]
        window = torch.arange(tokens - self.window_size, tokens, device=best.device)
        return window.expand(*best.shape[:2], -1)

    @property
    def window_tokens(self) -> list[int]:
        """The number of tokens of each row that are in the window, without padding."""
        return list(map(operator.sub, self.layer.row_lengths, self.lengths))
