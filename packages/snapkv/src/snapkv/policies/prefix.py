"""What stands before the window of a layer: what of it must stay, which of it is best."""

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snapkv import ops
from snapkv.errors import InvalidArgumentError
from snapkv.policies.states import PromptLayer, Selection, Unasked, require_answers


def _require_number(name: str, highest: Sequence[float]) -> None:
    """Raise where somebody's highest score is NaN."""
    if math.isnan(highest[0]):
        raise InvalidArgumentError(
            f"score: expected numbers from {name}, of which the best are kept, got NaN; divide "
            "by nothing that may be 0, and compute in float32"
        )


@dataclass(frozen=True)
class Prefix:
    """A layer at the end of the prompt, to a method with a window and sinks of this size.

    Attributes:
        sink_tokens: attention sinks, first tokens of every row that each head keeps, whatever their
            scores; where there is less room beside the window, the first of them.
        per_head_budget: whether heads or layers keep numbers of their own, around a mean.
    """

    layer: PromptLayer
    window_size: int
    sink_tokens: int
    per_head_budget: bool = False

    @functools.cached_property
    def slots(self) -> int:
        """How many slots stand before the window, pads counted."""
        return max(0, self.layer.keys.shape[2] - self.window_size)

    @functools.cached_property
    def lengths(self) -> list[int]:
        """B numbers: tokens of each row before the window."""
        return [max(0, tokens - self.window_size) for tokens in self.layer.row_lengths]

    @property
    def sinks(self) -> list[int]:
        """B numbers: attention sinks that each row has."""
        return [min(self.sink_tokens, tokens) for tokens in self.lengths]

    @functools.cached_property
    def must_stay(self) -> Tensor | None:
        """Positions that every head keeps whatever their scores: (B, 1 or H, P) bool.

        None where there are none but sinks at most.
        """
        layer, slots = self.layer, self.slots
        if layer.protected is None:
            return None
        sinks = layer.is_among_first(self.sink_tokens, slots) & ~layer.is_among_first(0, slots)
        return sinks | layer.protected[..., :slots]

    def fits(self, kept: list[int]) -> bool:
        """Whether rows that keep so much drop nothing, pads that all of them share included."""
        return not self.slots or (self.slots <= max(kept) and kept == self.lengths)

    @functools.cached_property
    def needed(self) -> list[int]:
        """B numbers: what the head needs for what must stay that needs most; empty for none."""
        must_stay = self.must_stay
        return [] if must_stay is None else must_stay.sum(dim=-1).amax(dim=-1).tolist()

    def checked(self, scores: Tensor, name: str) -> Tensor:
        """The scores, refused where a method of somebody's own gives others than it has to."""
        batch, heads, tokens = self.layer.keys.shape[0], self.layer.keys.shape[1], self.slots
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        fits = isinstance(got, tuple) and len(got) == 3 and (got[0], got[2]) == (batch, tokens)
        if not fits or (got[1] != 1 and got[1] % heads) or not scores.is_floating_point():
            kind = f" of {scores.dtype}" if isinstance(scores, Tensor) else ""
            raise InvalidArgumentError(
                f"score: expected ({batch}, {heads}, {tokens}) floating-point numbers from {name}, "
                f"one for each KV head and each position before the window, got {got}{kind}; "
                "score layer.keys[:, :, : -self.window_size], not the window"
            )
        if tokens:
            pads, unasked = self.layer.pad_tokens, self.layer.unasked
            own = scores if pads is None else ops.fill_first(scores, 0, 0.0, pads)
            asked: Unasked = [(own.amax(), functools.partial(_require_number, name))]
            require_answers(asked) if unasked is None else unasked.extend(asked)
        return scores

    def ranked(self, scores: Tensor) -> Tensor:
        """Scores, (B, H, P), infinite for what must stay, and below all others for pads."""
        if (must_stay := self.must_stay) is not None:
            heads = scores.shape[1] // must_stay.shape[1]
            scores = scores.masked_fill(must_stay.repeat_interleave(heads, dim=1), math.inf)
        pads = self.layer.pad_tokens
        scores = ops.fill_first(scores, self.sink_tokens, math.inf, pads)
        return scores if pads is None else ops.fill_first(scores, 0, -math.inf, pads)

    def best(self, scores: Tensor, kept: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """What must stay and the best, as `ops.keep_best`."""
        return ops.keep_best(
            scores,
            kept,
            self.layer.pad_tokens,
            first_tokens=self.sink_tokens,
            protected=self.must_stay,
        )

    def select(self, scores: Tensor, kept: list[int]) -> Selection:
        """Keep so much of every row, the same number in all heads, and the window."""
        best = self.best(scores, kept)
        tokens, window = self.layer.keys.shape[2], self._window(best)
        keep_indices, padding_slots = torch.cat([best, window], dim=-1), None
        if self.layer.pad_tokens is not None or min(kept) < max(kept):
            own = list(map(operator.add, kept, self.window_tokens))
            padding_slots = keep_indices.shape[-1] - ops.on_device(own, best.device)
        return Selection(
            keep_indices=keep_indices, prompt_tokens=tokens, padding_slots=padding_slots
        )

    def select_by_head(self, scores: Tensor, kept: list[list[int]]) -> Selection:
        """The same, right-aligned, where heads keep B lists of H numbers of their own."""
        best, pads = self.best(scores, kept), self.layer.pad_tokens
        window = self._window(best)
        if pads is not None:
            window = window.masked_fill(window < pads[:, None, None], -1)
        keep_indices = torch.cat([best, window], dim=-1)
        rows = zip(kept, self.window_tokens, strict=True)
        tokens = [[each + more for each in row] for row, more in rows]
        return Selection.of_counts(
            keep_indices,
            torch.tensor(tokens),
            per_head_budget=len(tokens[0]) > 1,  # one head, or one latent for all: rows differ
            prompt_tokens=self.layer.keys.shape[2],
        )

    def _window(self, best: Tensor) -> Tensor:
        tokens = self.layer.keys.shape[2]
        window = torch.arange(tokens - self.window_size, tokens, device=best.device)
        return window.expand(*best.shape[:2], -1)

    @property
    def window_tokens(self) -> list[int]:
        """B numbers: how many tokens of each row stand in the window."""
        return list(map(operator.sub, self.layer.row_lengths, self.lengths))
