"""The records that a policy gets from a layer, and those that it returns."""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from snapkv import ops
from snapkv.ops import AttentionStates, Implementation, TokenCost
from snapkv.validation import DEFAULT_DECAY, FADING_SINKS

_Found = TypeVar("_Found")

DeferredCheck = tuple[Tensor, Callable[[Sequence[float]], None]]
"""Numbers on a device, and a function that raises if they are wrong, to be called with their
values."""

DeferredChecks = list[DeferredCheck]


def run_checks(checks: Sequence[DeferredCheck]) -> None:
    """Run all checks whose numbers are still on the device.

    The numbers of all checks are copied to the host at once, which waits for a GPU.

    Args:
        checks: the checks. Each one raises an error of its own if its numbers are wrong.
    """
    if not checks:
        return
    device = checks[-1][0].device
    flat = [numbers.flatten().to(device, torch.float32) for numbers, _ in checks]
    answers = iter(torch.cat(flat).tolist())
    for numbers, judge in checks:
        judge([next(answers) for _ in range(numbers.numel())])


@dataclass(frozen=True, kw_only=True)
class LayerStates(AttentionStates):
    """The tensors of one layer that a policy receives.

    A policy receives them at the end of the prompt or after a decode step.

    Attributes:
        queries: (B, Hq, N, D), after rotary embedding and query norm.
        keys: (B, Hkv, S, D), all stored keys as attention sees them.
        pad_tokens: (B,) int64, leading padding of each row of the prompt, or None if no row has
            any.
        stored_heads: heads of the cache if they differ from those of `keys`. Models with latent
            attention (DeepSeek) store one latent for all heads, so all heads keep the same
            positions.
        layer_idx: index of the layer in the model.
        depth: how many compressed layers come before this one, of `num_layers`.
        protected: (B, 1 or heads of the cache, S) bool, slots that must be kept whatever their
            scores; None if there are none.
    """

    layer_idx: int
    depth: int = 0
    num_layers: int = 1
    stored_heads: int | None = None
    protected: Tensor | None = None

    @property
    def leading_padding(self) -> Tensor | None:
        """The number of slots at the start of each row that hold no token.

        Shape: (B,) int64, or None.
        """
        return self.pad_tokens

    @property
    def without_empty_slots(self) -> AttentionStates:
        """The same queries and keys, with empty slots at the start marked as padding."""
        return AttentionStates(self.queries, self.keys, self.score_options, self.leading_padding)

    @property
    def row_tokens(self) -> Tensor:
        """The number of slots in each row that hold a token.

        Shape: (B,) int64 on the device.
        """
        total = torch.full((self.keys.shape[0],), self.keys.shape[2], device=self.keys.device)
        return total if self.leading_padding is None else total - self.leading_padding

    @functools.cached_property
    def row_lengths(self) -> list[int]:
        """The number of tokens in each row, as a list of integers.

        This waits for a GPU if there is padding.
        """
        B, total = self.keys.shape[0], self.keys.shape[2]
        if self.leading_padding is None:
            return [total] * B
        return [total - padding_slots for padding_slots in self.leading_padding.tolist()]

    @property
    def num_kv_heads(self) -> int:
        """The number of heads in the cache, each of which keeps its own positions."""
        return self.keys.shape[1] if self.stored_heads is None else self.stored_heads


@dataclass(frozen=True, kw_only=True)
class PromptLayer(LayerStates):
    """The tensors of one layer at the end of the prompt.

    Attributes:
        queries: the last ``policy.query_tokens`` queries of the prompt, fewer if it is shorter.
        values: (B, Hkv, S, Dv).
        rotation: rotates (B, H, N, D) states by (B, N) positions, float32; for `Policy.needs`.
        output_weight: (hidden, Hq * Dv), which maps the heads' outputs to the model's width; for
            `Policy.needs`.
        token_ids: (B, T) int64, padding included; for `Policy.needs`.
        received: (B, heads of the cache, T) float32, the most attention every position received
            while the text was read a second time; None if it was read once.
        token_cost: returns what a token costs in bytes, for a `ByteBudget`.
        votes_impl: the implementation of `snapkv.ops.window_votes` that counts the window's votes.
        deferred_checks: the list that gets the checks of scores and selections, to be run after the
            last layer, because they wait for a GPU; None to run them at once.
        stacked: how many layers are stacked as rows, see `stack`.
    """

    values: Tensor
    rotation: Callable[[Tensor, Tensor], Tensor] | None = None
    output_weight: Tensor | None = None
    token_ids: Tensor | None = None
    received: Tensor | None = None
    token_cost: Callable[[], TokenCost] | None = None
    votes_impl: Implementation = "auto"
    deferred_checks: DeferredChecks | None = None
    stacked: int = 1

    @classmethod
    def stack(cls, layers: "Sequence[PromptLayer]") -> "PromptLayer":
        """Stack several layers as the rows of one batch, so that they can be handled together.

        Args:
            layers: consecutive layers with the same `stack_key`; the rows of the first one come
                first.
        """
        if len(layers) == 1:
            return layers[0]
        joined: dict[str, Any] = {
            name: torch.cat([getattr(layer, name) for layer in layers])
            for name in ("queries", "keys", "values", "pad_tokens", "protected")
            if getattr(layers[0], name) is not None
        }
        return replace(layers[0], stacked=len(layers), **joined)

    @functools.cached_property
    def stack_key(self) -> tuple[Any, ...] | None:
        """A key that is equal for layers that can be stacked, or None if this layer cannot be."""
        if self.score_options.sink_logits is not None:  # each layer has its own
            return None
        keys, protected = self.keys, None if self.protected is None else self.protected.shape
        shapes = self.queries.shape, keys.shape, self.values.shape, protected
        options = self.score_options, self.stored_heads, self.pad_tokens is None
        return (*shapes, keys.dtype, keys.device, *options)

    @property
    def depths(self) -> list[int]:
        """The number of compressed layers that come before the layer of each row."""
        rows = len(self.keys) // self.stacked
        return [self.depth + row // rows for row in range(len(self.keys))]

    def compute_once(self, key: Hashable, compute: Callable[[Self], _Found]) -> _Found:
        """Return the result of a function, which is called only once for each key.

        Args:
            key: the name of the result.
            compute: is called with this layer if there is no result for `key` yet.
        """
        if key not in self._found:
            self._found[key] = compute(self)
        found: _Found = self._found[key]
        return found

    def at_depth(self, depth: int) -> "PromptLayer":
        """Return a copy of this layer with another depth.

        All rows have this depth. The copy shares the results of `compute_once`.
        """
        other = replace(self, depth=depth, stacked=1)
        other.__dict__.update(_found=self._found, row_lengths=self.row_lengths)
        return other

    @property
    def cost(self) -> TokenCost | None:
        """The number of bytes that a token takes, or None if it is not known."""
        if (cost := self.token_cost) is None:
            return None
        return self.compute_once("cost", lambda _: cost())

    @functools.cached_property
    def _found(self) -> dict[Hashable, Any]:
        return {}

    def is_among_first(self, tokens: int, slots: int) -> Tensor:
        """Return a mask of the slots that hold the first tokens of each row, or padding.

        Args:
            tokens: how many of the first tokens of each row.
            slots: the length of the mask.

        Returns:
            (B or 1, 1, slots) bool.
        """
        pads = 0 if self.pad_tokens is None else self.pad_tokens[:, None, None]
        return torch.arange(slots, device=self.keys.device)[None, None] < pads + tokens

    @property
    def pads(self) -> Tensor | None:
        """A mask of the padding at the start of each row.

        Shape: (B, 1, S) bool; None if there is none.
        """
        return None if self.pad_tokens is None else self.is_among_first(0, self.keys.shape[2])


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The positions of the prompt that a layer keeps.

    Attributes:
        keep_indices: (B, H, K) int64, slots of the prompt, ascending and unique, after a leading
            run of -1 if a row or head keeps fewer than K. H is Hkv; Hq if every query head keeps
            its own positions; 1 if all heads keep the same ones.
        prompt_tokens: T, the length of the prompt that the indices point into.
        padding_slots: (B,) int64, how many leading entries of a row are -1; None if no row has any.
        head_tokens: (B, H) int64 if heads keep different numbers of tokens: how many of the last
            entries along K are indices. None if all heads of a row keep the same number. On the
            host, because reading it from a GPU would wait.
        scores: (B, H or 1, T) float32, the scores that an `EvictingPolicy` gives every token of the
            prompt; they come back with each `DecodeStep`, for every head. None if no scores are
            needed.
        head_notes: (B, H, N) int64, numbers that an `EvictingPolicy` keeps for every head, which
            come back in the same way; or None.
        sink_tokens: how many of the first kept tokens move to the positions right before the token
            that follows them. Only for tokens that are neighbours, as a prompt's first tokens are.
    """

    keep_indices: Tensor
    prompt_tokens: int
    padding_slots: Tensor | None = None
    head_tokens: Tensor | None = None
    scores: Tensor | None = None
    head_notes: Tensor | None = None
    sink_tokens: int = 0

    @classmethod
    def of(cls, layer: PromptLayer, keep_indices: Tensor, **other_fields: Any) -> Self:
        """Create a selection from the indices of the positions to keep.

        Rows drop their padding before their tokens.

        Args:
            layer: the layer to select from.
            keep_indices: as in `Selection`.
            other_fields: the other fields of the selection.
        """
        T, K = layer.keys.shape[2], keep_indices.shape[-1]
        padding_slots = padding_left(T, K, layer.pad_tokens)
        return cls(
            keep_indices=keep_indices, prompt_tokens=T, padding_slots=padding_slots, **other_fields
        )

    @classmethod
    def keep_all(cls, layer: PromptLayer) -> Self:
        """Create a selection that keeps every position of the prompt."""
        every = torch.arange(layer.keys.shape[2], device=layer.keys.device)
        return cls.of(layer, every.expand(layer.keys.shape[0], layer.num_kv_heads, -1))

    @classmethod
    def of_mask(cls, kept: Tensor, *, per_head_budget: bool, **other_fields: Any) -> Self:
        """Create a selection from a mask of the positions to keep; this waits for a GPU.

        Args:
            kept: (B, H, T) bool.
            per_head_budget: whether heads may keep different numbers; else all heads of a row keep
                the same number.
            other_fields: the other fields of the selection.
        """
        counts = kept.sum(dim=-1).cpu()
        other_fields |= {"prompt_tokens": kept.shape[-1], "per_head_budget": per_head_budget}
        return cls.of_counts(ops.kept_indices(kept, int(counts.max())), counts, **other_fields)

    @classmethod
    def of_counts(
        cls, keep_indices: Tensor, counts: Tensor, *, per_head_budget: bool, **other_fields: Any
    ) -> Self:
        """Create a selection from indices and the number of positions that each head keeps.

        Args:
            keep_indices: as in `Selection`.
            counts: (B, H) int64 on the host, how many of the last entries of a head are indices.
            per_head_budget: as in `of_mask`.
            other_fields: the other fields of the selection.
        """
        if per_head_budget:
            other_fields["head_tokens"] = counts
        else:
            own = counts[:, 0].to(keep_indices.device, non_blocking=True)
            other_fields["padding_slots"] = keep_indices.shape[-1] - own
        return cls(keep_indices=keep_indices, **other_fields)

    def of_layers(self, layers: Sequence[PromptLayer]) -> "list[Selection | None]":
        """Split the selection of several stacked layers into one selection for each layer.

        This waits for a GPU if rows of different lengths are padded, or keep different numbers.

        Args:
            layers: the layers, of whose `PromptLayer.stack` this is the selection.

        Returns:
            One selection per layer; None for a layer that keeps everything.
        """
        if len(layers) == 1:
            return [self]
        tensors = {name: one for name, one in vars(self).items() if isinstance(one, Tensor)}
        rows = zip(*(one.chunk(len(layers)) for one in tensors.values()), strict=True)
        parts = [replace(self, **dict(zip(tensors, own, strict=True))) for own in rows]
        if self.head_tokens is None and self.padding_slots is None:
            return [*parts]
        return [part._of_layer(layer) for part, layer in zip(parts, layers, strict=True)]

    def _of_layer(self, layer: PromptLayer) -> "Selection | None":
        """Remove the first entries of the indices if no head uses them.

        Returns:
            The selection, or None if all positions are kept.
        """
        kept, empty = self.keep_indices, self.padding_slots
        if self.head_tokens is not None:
            counts = self.head_tokens.tolist()
        else:
            assert empty is not None
            counts = [[kept.shape[-1] - count] for count in empty.tolist()]
        most = max(map(max, counts))
        whole = zip(counts, layer.row_lengths, strict=True)
        if most == self.prompt_tokens and all({length} == set(row) for row, length in whole):
            return None
        unused, is_even = kept.shape[-1] - most, most == min(map(min, counts))
        has_padding = empty is not None and not (is_even and layer.pad_tokens is None)
        padding_slots = empty - unused if has_padding else None
        return replace(self, keep_indices=kept[..., unused:], padding_slots=padding_slots)


@dataclass(frozen=True, kw_only=True)
class VotesAtStake:
    """The votes of the window on the positions before it, some of which may be dropped.

    Attributes:
        votes: (B, H, P) float32, each the sum of `weights` attention weights.
        weights: how many attention weights a vote is the sum of.
        pad_tokens: (B,) leading padding of each row, or None.
    """

    votes: Tensor
    weights: int
    pad_tokens: Tensor | None = None

    @classmethod
    def joined(cls, several: "Sequence[VotesAtStake]") -> Self:
        """Join the votes of several layers, as if their heads were heads of one layer."""
        device = several[0].votes.device
        votes = torch.cat([each.votes.to(device) for each in several], dim=1)
        return cls(votes=votes, weights=several[0].weights, pad_tokens=several[0].pad_tokens)

    def faded_shares(self) -> Tensor:
        """Return the share of the window's attention that each position gets, with fading.

        A vote raises the positions after it; votes of the first tokens count as zero.

        Returns:
            (B, H, P) float32.
        """
        others = ops.fill_first(self.votes, FADING_SINKS, 0.0, self.pad_tokens)
        return ops.fade_votes(others, DEFAULT_DECAY) / self.weights


LEAST_VOTES = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True)
class LostVotes:
    """The votes that each head has lost because their positions were dropped.

    Attributes:
        mass: (B, H) float32, the fraction of all votes that fell on dropped positions.
        peak: (B, H) float32, the highest vote that a dropped position had, or was raised to by a
            position before it, as a share of the window's attention. It is computed with fading,
            whatever the method's own pooling, and without votes of the first tokens.
    """

    mass: Tensor
    peak: Tensor

    @classmethod
    def of(
        cls, votes: Tensor, lifted: Tensor, keep_indices: Tensor, prompt_tokens: int
    ) -> "LostVotes":
        """Compute how many votes are lost with a selection.

        Args:
            votes: (B, H, P) float32.
            lifted: (B, H, P) float32, `VotesAtStake.faded_shares`.
            keep_indices: as in `Selection`.
            prompt_tokens: as in `Selection`.
        """
        slots = prompt_tokens + 1
        P, shared = votes.shape[-1], votes.shape[1] // keep_indices.shape[1]
        if shared > 1:  # every query head has votes of its own
            keep_indices = keep_indices.repeat_interleave(shared, dim=1)
        # One slot more than the prompt has: an index of -1 is mapped to it.
        is_dropped = votes.new_ones(*votes.shape[:2], slots)
        dropped = is_dropped.scatter_(2, keep_indices % slots, 0.0)[..., :P]
        lost = (votes * dropped).sum(dim=-1)
        peak = torch.zeros_like(lost) if not P else (lifted * dropped).amax(dim=-1)
        return cls(mass=lost / votes.sum(dim=-1).clamp(min=LEAST_VOTES), peak=peak)


@dataclass(frozen=True, kw_only=True)
class DecodeStep(LayerStates):
    """The tensors of one layer after a decode step.

    New tokens have been stored, and attention has been computed.

    Attributes:
        queries: (B, Hq, Q, D), the queries of this step's tokens, which are in the last Q slots.
            For a policy with `history_tokens`, that many of the last queries, whether or not their
            tokens are stored.
        keys: if heads store different numbers of tokens, a head's keys are in its last slots, and
            the slots before them hold arbitrary numbers; `columns` tells which.
        columns: (B, H, S) int64, the column of every slot's token in the whole sequence, padding
            counted; -1 or the column of padding if a slot holds no token.
        scores: (B, H, S) float32, the policy's score of every slot; zero for new tokens. None if it
            has no scores.
        head_notes: (B, H, N) int64, the numbers that the policy keeps for every head, or None.
        token_ids: (B, N) int64, ids of this step's tokens; for `Policy.needs`.
        padding_slots: (B,) leading slots that hold padding, or None.
        seen_tokens: tokens seen since the start of the cache, dropped ones included.
    """

    columns: Tensor
    seen_tokens: int
    scores: Tensor | None = None
    head_notes: Tensor | None = None
    token_ids: Tensor | None = None
    padding_slots: Tensor | None = None

    @property
    def leading_padding(self) -> Tensor | None:
        """The number of padding slots at the start of each row that are still stored."""
        return self.padding_slots


@dataclass(frozen=True, kw_only=True)
class Eviction:
    """The slots of a layer that are kept after a decode step.

    Attributes:
        keep_indices: (B, H, K) int64, ascending slots to keep, -1 and H as in `Selection`; None
            keeps all.
        scores: (B, H or 1, S) float32, the new scores of the slots before eviction, or None.
        sink_tokens: as in `Selection`.
        padding_slots: (B,) int64, leading entries of `keep_indices` that hold no token; None if
            every row drops its padding before its tokens.
        per_head_budget: whether heads may keep different numbers of tokens from now on.
    """

    keep_indices: Tensor | None = None
    scores: Tensor | None = None
    sink_tokens: int = 0
    padding_slots: Tensor | None = None
    per_head_budget: bool = False

    @classmethod
    def of_mask(cls, kept: Tensor, **other_fields: Any) -> Self:
        """Create an eviction from a mask that marks the slots to keep.

        Waits for a GPU.

        Args:
            kept: (B, H, S) bool; all heads of a row keep the same number of slots.
            other_fields: the other fields of the eviction.
        """
        keep_indices = ops.kept_indices(kept)
        padding_slots = keep_indices.shape[-1] - kept[:, 0].sum(dim=-1)
        return cls(keep_indices=keep_indices, padding_slots=padding_slots, **other_fields)


def padding_left(slots: int, kept_slots: int, padding_slots: Tensor | None) -> Tensor | None:
    """Return the number of padding slots that are left after some slots have been dropped.

    Rows drop padding before their tokens.

    Args:
        slots: how many slots there were.
        kept_slots: how many slots are kept.
        padding_slots: (B,), how many of the first slots of each row were padding, or None.

    Returns:
        (B,), or None if `padding_slots` is None.
    """
    if padding_slots is None:
        return None
    return (padding_slots - (slots - kept_slots)).clamp(min=0)
