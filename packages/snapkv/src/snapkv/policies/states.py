"""What a policy sees of one layer, and what it answers."""

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

Asked = tuple[Tensor, Callable[[Sequence[float]], None]]
"""Numbers on a device, and what judges them, or raises, once they are known."""

Unasked = list[Asked]


def require_answers(unasked: Sequence[Asked]) -> None:
    """Ask for all numbers at once, for which a GPU is waited for, and let each be judged."""
    if not unasked:
        return
    device = unasked[-1][0].device
    flat = [numbers.flatten().to(device, torch.float32) for numbers, _ in unasked]
    answers = iter(torch.cat(flat).tolist())
    for numbers, judge in unasked:
        judge([next(answers) for _ in range(numbers.numel())])


@dataclass(frozen=True, kw_only=True)
class LayerStates(AttentionStates):
    """What a policy sees of one layer, at the end of the prompt or behind it.

    Attributes:
        queries: (B, Hq, N, D), after rotary embedding and query norm.
        keys: (B, Hkv, S, D), all stored keys as attention sees them.
        pad_tokens: (B,) int64, leading pads of each row of the prompt, or None where none has any.
        stored_heads: heads of the cache where they differ from those of `keys`: models with latent
            attention (DeepSeek) store one latent that all heads share, so they share one set.
        layer_idx: index of the layer in the model.
        depth: how many compressed layers come before this one, of `num_layers`.
        protected: (B, 1 or heads of the cache, S) bool, slots whose tokens must stay, whatever
            their scores; None where none must.
    """

    layer_idx: int
    depth: int = 0
    num_layers: int = 1
    stored_heads: int | None = None
    protected: Tensor | None = None

    @property
    def leading_padding(self) -> Tensor | None:
        """(B,) leading slots of each row that hold no token, or None: here the pads."""
        return self.pad_tokens

    @property
    def without_empty_slots(self) -> AttentionStates:
        """The same states, in which the leading slots that hold no token count as padding."""
        return AttentionStates(self.queries, self.keys, self.score_options, self.leading_padding)

    @property
    def row_tokens(self) -> Tensor:
        """(B,) int64: slots of each row that hold a token."""
        total = torch.full((self.keys.shape[0],), self.keys.shape[2], device=self.keys.device)
        return total if self.leading_padding is None else total - self.leading_padding

    @functools.cached_property
    def row_lengths(self) -> list[int]:
        """`row_tokens` as B numbers, for which a GPU is waited for only where there is padding."""
        B, total = self.keys.shape[0], self.keys.shape[2]
        if self.leading_padding is None:
            return [total] * B
        return [total - padding_slots for padding_slots in self.leading_padding.tolist()]

    @property
    def num_kv_heads(self) -> int:
        """How many heads the cache stores, each with a set of its own."""
        return self.keys.shape[1] if self.stored_heads is None else self.stored_heads


@dataclass(frozen=True, kw_only=True)
class PromptLayer(LayerStates):
    """One layer's attention states at the end of the prompt.

    Attributes:
        queries: the last ``policy.query_tokens`` queries of the prompt, fewer where it is shorter.
        values: (B, Hkv, S, Dv).
        rotation: turns (B, H, N, D) states on by (B, N) positions, float32; for `Policy.needs`.
        output_weight: (hidden, Hq * Dv), what maps the heads' outputs to the model's width; for
            `Policy.needs`.
        token_ids: (B, T) int64, pads included; for `Policy.needs`.
        received: (B, heads of the cache, T) float32, the most attention every position received
            while the text was read again; None where it was read once.
        token_cost: what a token costs in bytes, for a `ByteBudget`.
        votes_impl: the implementation of `snapkv.ops.window_votes` that counts the window's votes.
        unasked: takes the highest score, NaN where one is, and the faults of a selection, to be
            asked for behind the last layer, since a GPU is waited for then; None to ask at once.
        stacked: how many layers it stands for, see `stack`.
    """

    values: Tensor
    rotation: Callable[[Tensor, Tensor], Tensor] | None = None
    output_weight: Tensor | None = None
    token_ids: Tensor | None = None
    received: Tensor | None = None
    token_cost: Callable[[], TokenCost] | None = None
    votes_impl: Implementation = "auto"
    unasked: Unasked | None = None
    stacked: int = 1

    @classmethod
    def stack(cls, layers: "Sequence[PromptLayer]") -> "PromptLayer":
        """Layers of one `kind`, neighbours, as rows of a batch: those of the first layer first."""
        if len(layers) == 1:
            return layers[0]
        joined: dict[str, Any] = {
            name: torch.cat([getattr(layer, name) for layer in layers])
            for name in ("queries", "keys", "values", "pad_tokens", "protected")
            if getattr(layers[0], name) is not None
        }
        return replace(layers[0], stacked=len(layers), **joined)

    @functools.cached_property
    def kind(self) -> tuple[Any, ...] | None:
        """What layers have in common that can be stacked; None where it stands by itself."""
        if self.score_options.sink_logits is not None:  # which are the layer's own
            return None
        keys, protected = self.keys, None if self.protected is None else self.protected.shape
        shapes = self.queries.shape, keys.shape, self.values.shape, protected
        options = self.score_options, self.stored_heads, self.pad_tokens is None
        return (*shapes, keys.dtype, keys.device, *options)

    @property
    def depths(self) -> list[int]:
        """B numbers: how many compressed layers come before that of each row."""
        rows = len(self.keys) // self.stacked
        return [self.depth + row // rows for row in range(len(self.keys))]

    def once(self, key: Hashable, compute: Callable[[Self], _Found]) -> _Found:
        """What `compute` gives of it, computed the first time somebody asks for it by that key."""
        if key not in self._found:
            self._found[key] = compute(self)
        found: _Found = self._found[key]
        return found

    def at(self, depth: int) -> "PromptLayer":
        """The same at another depth, in all rows; what was computed once stays so."""
        other = replace(self, depth=depth, stacked=1)
        other.__dict__.update(_found=self._found, row_lengths=self.row_lengths)
        return other

    @property
    def cost(self) -> TokenCost | None:
        """What a token costs in bytes, computed once; None where that is not known."""
        if (cost := self.token_cost) is None:
            return None
        return self.once("cost", lambda _: cost())

    @functools.cached_property
    def _found(self) -> dict[Hashable, Any]:
        return {}

    def is_among_first(self, tokens: int, slots: int) -> Tensor:
        """(B or 1, 1, slots) bool: which of the first slots hold a row's first tokens, or pads."""
        pads = 0 if self.pad_tokens is None else self.pad_tokens[:, None, None]
        return torch.arange(slots, device=self.keys.device)[None, None] < pads + tokens

    @property
    def pads(self) -> Tensor | None:
        """(B, 1, S) bool: which slots are leading pads of the prompt; None where none is."""
        return None if self.pad_tokens is None else self.is_among_first(0, self.keys.shape[2])


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which positions of the prompt a layer keeps.

    Attributes:
        keep_indices: (B, H, K) int64, ascending and unique, slots of the prompt, after a leading
            run of -1 where a row or head keeps fewer than K. H is Hkv, or Hq where every query head
            keeps its own set, or 1 where all heads share one.
        prompt_tokens: T, the length of the prompt the indices point into.
        padding_slots: (B,) int64, how many leading entries of a row are -1; None where no row has
            any.
        head_tokens: (B, H) int64 where heads keep different numbers of tokens: how many of the last
            entries along K are indices. None where all heads of a row keep the same number. Not on
            the device, or it is waited for.
        scores: (B, H or 1, T) float32, what an `EvictingPolicy` has noted of every token of the
            prompt; it comes back with each `DecodeStep`, for every head. None where nothing needs
            to be remembered.
        head_notes: (B, H, N) int64, what an `EvictingPolicy` has noted of every head, which comes
            back in the same way; or None.
        sink_tokens: how many of the first kept tokens move on to the positions right before the
            token that follows them. Only where those tokens are neighbours, as a prompt's first
            tokens are.
    """

    keep_indices: Tensor
    prompt_tokens: int
    padding_slots: Tensor | None = None
    head_tokens: Tensor | None = None
    scores: Tensor | None = None
    head_notes: Tensor | None = None
    sink_tokens: int = 0

    @classmethod
    def of(cls, layer: PromptLayer, keep_indices: Tensor, **noted: Any) -> Self:
        """A selection whose rows drop their pads before their tokens."""
        T, K = layer.keys.shape[2], keep_indices.shape[-1]
        padding_slots = padding_left(T, K, layer.pad_tokens)
        return cls(keep_indices=keep_indices, prompt_tokens=T, padding_slots=padding_slots, **noted)

    @classmethod
    def whole(cls, layer: PromptLayer) -> Self:
        """Every position of the prompt."""
        every = torch.arange(layer.keys.shape[2], device=layer.keys.device)
        return cls.of(layer, every.expand(layer.keys.shape[0], layer.num_kv_heads, -1))

    @classmethod
    def of_mask(cls, kept: Tensor, *, per_head_budget: bool, **noted: Any) -> Self:
        """What a mask keeps, (B, H, T) bool; the same number in all heads, or heads their own.

        A GPU is waited for.
        """
        counts = kept.sum(dim=-1).cpu()
        noted |= {"prompt_tokens": kept.shape[-1], "per_head_budget": per_head_budget}
        return cls.of_counts(ops.kept_indices(kept, int(counts.max())), counts, **noted)

    @classmethod
    def of_counts(
        cls, keep_indices: Tensor, counts: Tensor, *, per_head_budget: bool, **noted: Any
    ) -> Self:
        """Right-aligned slots of which each head keeps so many, (B, H), not on the device."""
        if per_head_budget:
            noted["head_tokens"] = counts
        else:
            own = counts[:, 0].to(keep_indices.device, non_blocking=True)
            noted["padding_slots"] = keep_indices.shape[-1] - own
        return cls(keep_indices=keep_indices, **noted)

    def of_layers(self, layers: Sequence[PromptLayer]) -> "list[Selection | None]":
        """Its parts, where it was made of the `PromptLayer.stack` of these; None for all of one.

        A GPU is waited for where rows of different length, or that keep different numbers, are
        padded.
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
        """Without the first entries, where all heads keep fewer; None where they keep all."""
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
    """Votes of the window on its prefix, which a choice may drop.

    Attributes:
        votes: (B, H, P) float32, each the sum of so many `weights` of attention.
        pad_tokens: (B,) leading pads of each row, or None.
    """

    votes: Tensor
    weights: int
    pad_tokens: Tensor | None = None

    @classmethod
    def joined(cls, several: "Sequence[VotesAtStake]") -> Self:
        """Those of layers, which differ in votes alone, side by side as heads."""
        device = several[0].votes.device
        votes = torch.cat([each.votes.to(device) for each in several], dim=1)
        return cls(votes=votes, weights=several[0].weights, pad_tokens=several[0].pad_tokens)

    def lifted(self) -> Tensor:
        """As shares of the window's attention, lifted by those before them: (B, H, P) float32."""
        others = ops.fill_first(self.votes, FADING_SINKS, 0.0, self.pad_tokens)
        return ops.fade_votes(others, DEFAULT_DECAY) / self.weights


LEAST_VOTES = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True)
class LostVotes:
    """What every head lost of the votes on its prefix.

    Attributes:
        mass: (B, H) float32, the part of all votes that fell on dropped positions.
        peak: (B, H) float32, the highest vote that a dropped position had or was lifted to by one
            before it, as a share of the window's attention. It goes by fading, whatever the
            method's own pooling, and by no votes of the first tokens.
    """

    mass: Tensor
    peak: Tensor

    @classmethod
    def of(
        cls, votes: Tensor, lifted: Tensor, keep_indices: Tensor, prompt_tokens: int
    ) -> "LostVotes":
        """Measured on votes and, after fading, shares, both (B, H, P), and on what was kept.

        `keep_indices` and `prompt_tokens` are those of a `Selection`.
        """
        slots = prompt_tokens + 1
        P, shared = votes.shape[-1], votes.shape[1] // keep_indices.shape[1]
        if shared > 1:  # every query head has votes of its own
            keep_indices = keep_indices.repeat_interleave(shared, dim=1)
        is_dropped = votes.new_ones(*votes.shape[:2], slots)  # -1 has the last one
        dropped = is_dropped.scatter_(2, keep_indices % slots, 0.0)[..., :P]
        lost = (votes * dropped).sum(dim=-1)
        peak = torch.zeros_like(lost) if not P else (lifted * dropped).amax(dim=-1)
        return cls(mass=lost / votes.sum(dim=-1).clamp(min=LEAST_VOTES), peak=peak)


@dataclass(frozen=True, kw_only=True)
class DecodeStep(LayerStates):
    """One layer's states right after the attention of tokens behind the prompt.

    Attributes:
        queries: (B, Hq, Q, D), of the tokens of this step, the last Q slots; for a policy with
            `history_tokens` as many of the last queries, whether or not their tokens are stored.
        keys: where heads store different numbers of tokens, those of a head are its last slots, and
            before them stands anything; `columns` says so.
        columns: (B, H, S) int64, column of every slot in the whole sequence, pads counted, -1 or a
            pad's where a slot holds no token.
        scores: (B, H, S) float32, what the policy has noted of every slot; zero for new tokens.
            None where it notes nothing.
        head_notes: (B, H, N) int64, what the policy has noted of every head, or None.
        token_ids: (B, N) int64, of the tokens of this step; for `Policy.needs`.
        padding_slots: (B,) leading slots that hold pads, or None.
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
        """Its padding slots; those of the prompt's pads that are still stored are among them."""
        return self.padding_slots


@dataclass(frozen=True, kw_only=True)
class Eviction:
    """Which KV cache slots a step of decoding leaves in a layer.

    Attributes:
        keep_indices: (B, H, K) int64, ascending slots to keep, -1 and H as in `Selection`; None
            keeps all.
        scores: (B, H or 1, S) float32 for the slots before eviction, to be noted; or None.
        sink_tokens: as in `Selection`.
        padding_slots: (B,) int64, leading entries of `keep_indices` that hold no token; None where
            every row drops its padding before its tokens.
        per_head_budget: whether heads may keep different numbers of tokens from now on.
    """

    keep_indices: Tensor | None = None
    scores: Tensor | None = None
    sink_tokens: int = 0
    padding_slots: Tensor | None = None
    per_head_budget: bool = False

    @classmethod
    def of_mask(cls, kept: Tensor, **noted: Any) -> Self:
        """What a mask keeps: (B, H, S) bool."""
        keep_indices = ops.kept_indices(kept)
        padding_slots = keep_indices.shape[-1] - kept[:, 0].sum(dim=-1)
        return cls(keep_indices=keep_indices, padding_slots=padding_slots, **noted)


def padding_left(slots: int, kept_slots: int, padding_slots: Tensor | None) -> Tensor | None:
    """(B,) padding slots that remain where rows drop those before their tokens."""
    if padding_slots is None:
        return None
    return (padding_slots - (slots - kept_slots)).clamp(min=0)
