"""One layer of a compressed cache: stores fewer tokens than it has seen."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from snapkv import ops
from snapkv.cache.keeping import keep_tokens, last_tokens, pads_first
from snapkv.cache.parked import ParkedTokens
from snapkv.cache.query_tail import RememberedQueries
from snapkv.cache.ragged import RaggedStates
from snapkv.cache.sinks import move_sinks
from snapkv.errors import CacheMismatchError, InvalidArgumentError
from snapkv.policies import EvictingPolicy, Eviction, Policy, PromptLayer, Selection
from snapkv.policies.base import ALL_QUERIES
from snapkv.policies.states import fillers_left
from snapkv.rotary import Rotation


class CompressedLayer(RememberedQueries):
    """Keys and values of the tokens that were kept, in ascending order of position.

    The layer reports every token it has seen and stores only some, the contract of transformers'
    own sliding layers, so positions and masks stay true. It moves tensors; which of them to keep
    is the policy's business, when to ask it is `snapkv.attention`'s.

    Attributes:
        depth, num_layers: which of how many compressed layers this is.
        rotation, output_projection: parts of the model's layer, where the policy needs them.
        compresses_turns: whether every later prompt brings the layer back to its budget.
        refresh_every: choose again after as many tokens behind the prompt; None for never.
        recall_due: the next tokens are read over all that was seen, and vote on it.
        chosen_at: tokens seen when the layer last chose what to keep.
        observer: is shown every pass before the prompt ends, or None.
    """

    compresses_turns = False
    refresh_every: int | None = None
    recall_due = False
    chosen_at = 0
    observer: Callable[[PromptLayer], None] | None = None

    def __init__(
        self,
        policy: Policy,
        layer_idx: int,
        *,
        depth: int = 0,
        num_layers: int = 1,
        rotation: Rotation | None = None,
        output_projection: Any = None,
    ) -> None:
        super().__init__(policy)
        self.layer_idx = layer_idx
        self.depth = depth
        self.num_layers = num_layers
        self.rotation = rotation
        self.output_projection = output_projection
        self._grows_in_place = not isinstance(policy, EvictingPolicy)  # that moves it all

    # What transformers asks of a layer.

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new tokens; returns all stored keys and values, new ones last."""
        if self.recall_due:
            self.recall()
        self._require_batch(key_states.shape[0])
        self.cumulative_length += key_states.shape[-2]
        self._num_kv_heads = key_states.shape[1]
        if self.kept is not None and self.keys.shape[1] != key_states.shape[1]:
            repeats = self.keys.shape[1] // key_states.shape[1]
            key_states = key_states.repeat_interleave(repeats, dim=1)
            value_states = value_states.repeat_interleave(repeats, dim=1)
        return self._append(key_states, value_states)

    def _require_batch(self, batch: int) -> None:
        if self._is_filled and self.keys.shape[0] != batch:
            raise CacheMismatchError(
                f"past_key_values: expected a batch of {self.keys.shape[0]}, the size the cache "
                f"was filled with, got {batch}; call cache.reset() or make a new CompressedCache"
            )

    @property
    def is_croppable(self) -> bool:
        """Whether the last tokens can be taken back without a trace."""
        return not isinstance(self.policy, EvictingPolicy)

    def get_seq_length(self) -> int:
        """Tokens seen, not slots stored: positions are counted from it."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns, offset): the stored slots stand for the last columns of the full mask."""
        stored = self.cumulative_length if self.recall_due else self.stored_tokens
        return stored + query_length, self.cumulative_length - stored

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; takes a non-positive count, as transformers does.

        Raises:
            InvalidArgumentError: a positive count, or more than can be taken back: of a compressed
                prompt only the run of tokens at its end is still whole.
        """
        if tokens_to_remove > 0:
            raise InvalidArgumentError(
                f"tokens_to_remove: expected zero or a negative number of tokens to remove, got "
                f"{tokens_to_remove}; pass -n to remove the last n tokens"
            )
        if tokens_to_remove == 0:
            return
        count = -tokens_to_remove
        if self.parked is not None and self.kept is not None and count > self._whole_tail():
            self.recall()
        self._require_croppable(count)
        self.take_back(count)

    def take_back(self, count: int) -> None:
        """Forget the last tokens, which are whole: rejected ones, or those of a refused pass."""
        self.keys = self.keys[..., :-count, :]
        self.values = self.values[..., :-count, :]
        self.cumulative_length -= count
        self.chosen_at = min(self.chosen_at, self.cumulative_length)
        self.gaps = self._gaps_so_far()
        if not self.cumulative_length:
            self.gaps = self.pad_tokens = None
            self.hides_more_than_padding = False
        self.recall_due = False
        if self.parked is not None:
            self.parked.crop(self.cumulative_length)
        if self.kept is not None and self.ragged is None:
            self.kept = self.kept[..., : self.stored_tokens]
        if self.slot_scores is not None and self.ragged is None:
            self.slot_scores = self.slot_scores[..., : self.stored_tokens]
        if self.token_ids is not None:
            self.token_ids = self.token_ids[:, :-count]
        if self._query_tail is not None:
            self._query_tail = self._query_tail[..., :-count, :]

    def _require_croppable(self, count: int) -> None:
        if not self.is_croppable and self.kept is not None:
            raise InvalidArgumentError(
                f"tokens_to_remove: expected at most 0, since none of the tokens that "
                f"{self.policy.name} has counted and evicted by is still whole, got {count}; reset "
                "the cache and read the shorter text again, or use a policy that only compresses "
                "prompts"
            )
        whole = self.stored_tokens if self.kept is None else self._whole_tail()
        if count > whole:
            raise InvalidArgumentError(
                f"tokens_to_remove: expected at most {whole}, the tokens at the end of layer "
                f"{self.layer_idx} that are still whole, got {count}; reset the cache and read "
                "the shorter prompt again"
            )

    def _whole_tail(self) -> int:
        """How many of the last tokens every head and row still stores."""
        if self.ragged is not None:
            return self.stored_tokens
        last = torch.arange(
            self.cumulative_length - self.stored_tokens,
            self.cumulative_length,
            device=self.keys.device,
        )
        whole = (self.columns() == last).flip(-1).cumprod(dim=-1).sum(dim=-1)
        return min(int(whole.min()), self.stored_tokens - 1)  # never all: older ones are gone

    def reset(self) -> None:
        """Empty the layer; the object stays usable for another prompt of any batch size."""
        self.keys = self.values = None
        self.is_initialized = False
        self.cumulative_length = 0
        self.hides_more_than_padding = False
        self.kept = self.pad_tokens = self.filler_tokens = self.gaps = None
        self.held = False
        self.ragged = self.slot_scores = self._query_tail = self.sinks = None
        self.head_notes = self.token_ids = None
        self.recall_due, self.chosen_at = False, 0
        if self.parked is not None:
            self.parked.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put the rows in the order of `beam_idx`."""
        self._map_rows(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self._map_rows(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows in `indices`."""
        self._map_rows(lambda rows: rows[indices.to(rows.device), ...])

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if not self._is_filled:
            return
        if self.ragged is not None:
            self.ragged = self.ragged.select_rows(change(torch.arange(self.keys.shape[0])))
        if self.sinks is not None:
            self.sinks = self.sinks.map_rows(change)
        if self.parked is not None:
            self.parked.map_rows(change)
        for name in (
            "keys",
            "values",
            "kept",
            "pad_tokens",
            "filler_tokens",
            "gaps",
            "slot_scores",
            "head_notes",
            "token_ids",
            "_query_tail",
        ):
            rows = getattr(self, name)
            if rows is not None:
                setattr(self, name, change(rows))
        self._fit_to_longest_head()

    def _fit_to_longest_head(self) -> None:
        """Where the row of the longest head is gone, there are fewer slots in the padded layout."""
        if self.ragged is None or self.kept is None:
            return
        unused = self.kept.shape[-1] - self.ragged.longest_tokens
        self.kept = self.kept[..., unused:]
        if self.slot_scores is not None:
            self.slot_scores = self.slot_scores[..., unused:]

    # What the attention seam asks of a layer.

    def remember_ids(self, token_ids: Tensor) -> None:
        """Take the new tokens' ids, behind those of the prompt or instead of the last step's."""
        if self.kept is None and self.token_ids is not None:
            token_ids = torch.cat([self.token_ids, token_ids], dim=1)
        self.token_ids = token_ids

    def hold(self, selection: Selection) -> None:
        """Keep a part of a prompt that is still coming in."""
        self.kept = self._selected_columns(selection)
        self.keys = keep_tokens(self.keys, selection)
        self.values = keep_tokens(self.values, selection)
        self.held = True

    def _selected_columns(self, selection: Selection) -> Tensor:
        """(B, H, K) int32: the columns of the slots that a selection names, -1 where of none."""
        indices = selection.keep_indices
        heads = max(indices.shape[1], self.keys.shape[1])
        indices = indices.expand(-1, heads, -1)
        if self.kept is not None:
            repeats = heads // self.keys.shape[1]
            indices = _columns_of(indices, self.columns().repeat_interleave(repeats, dim=1))
        return indices.to(torch.int32)

    def end_prompt(self, selection: Selection | None, prompt: PromptLayer) -> None:
        """Note that the prompt has been read, and what of it to keep.

        Tokens behind the prompt (drafts of the same forward pass) stay behind what is kept. Where
        turns follow, it is all that was seen so far or, without recall, all that is stored.
        """
        self._query_tail = None
        if self.history_tokens:
            self._query_tail = last_tokens(prompt.queries, self.history_tokens).clone()
        self.pad_tokens = prompt.pad_tokens
        self.held = False
        self.chosen_at = self.cumulative_length - (self.stored_tokens - prompt.keys.shape[2])
        if selection is None:
            return
        columns = self._selected_columns(selection)
        self.head_notes = selection.head_notes
        if self.token_ids is not None:
            self.token_ids = self.token_ids[:, selection.prompt_tokens :]
        self.park(selection.prompt_tokens)
        if selection.head_tokens is not None:
            self._keep_ragged(selection)
        else:
            self.keys = keep_tokens(self.keys, selection)
            self.values = keep_tokens(self.values, selection)
        self.kept = columns
        if selection.scores is not None:
            kept = selection.keep_indices.expand(-1, self.keys.shape[1], -1)
            self.slot_scores = selection.scores.gather(2, kept.clamp(min=0))
        self.filler_tokens = selection.filler_tokens
        self.hides_more_than_padding = self._fillers_outnumber_padding(self.chosen_at)
        self._move_on(selection.sink_tokens)

    def _keep_ragged(self, selection: Selection) -> None:
        self.ragged = RaggedStates.gather(self.keys, self.values, selection)
        repeats = selection.keep_indices.shape[1] // self.keys.shape[1]
        for name in ("keys", "values"):
            behind = getattr(self, name)[..., selection.prompt_tokens :, :]
            setattr(self, name, behind.repeat_interleave(repeats, dim=1))  # a copy, no view

    def expect_turns(self, parked: ParkedTokens | None, refresh_every: int | None) -> None:
        """From now on every later prompt votes too, on what is stored or on all that is parked.

        The window of a short prompt begins in the turn before it, so the last queries are held.
        """
        self.compresses_turns, self.parked, self.refresh_every = True, parked, refresh_every
        if self.policy.query_tokens != ALL_QUERIES:
            self.history_tokens = self.policy.query_tokens

    def park(self, tokens: int) -> None:
        """Put those of the first tokens off the device that are not yet; the layer is whole."""
        if self.parked is not None:
            done = self.parked.tokens
            self.parked.append(self.keys[:, :, done:tokens], self.values[:, :, done:tokens])

    def settle(self) -> None:
        """Called after every step behind a prompt."""

    def set_aside(self) -> None:
        """Between two pieces of a prompt, hold nothing on the device."""
        if self.parked is None:
            return
        self.park(self.cumulative_length)
        self.keys, self.values = self.keys[:, :, :0].clone(), self.values[:, :, :0].clone()
        self.kept = torch.empty(self.keys.shape[:3], dtype=torch.int32, device=self.keys.device)
        self.recall_due = True

    def begin_at(self, tokens: int, pads: Tensor, *, forget_queries: bool) -> None:
        """Have seen that many columns, nothing on the device: each row has pads, then tokens."""
        assert self.parked is not None
        self.parked.shift(pads, tokens)
        self.cumulative_length = tokens
        if forget_queries:
            self._query_tail = None

    def recall(self) -> None:
        """Hold every token that was seen again, as before anything was dropped."""
        self.recall_due = False
        if self.kept is None or self.parked is None:
            return
        behind = self.stored_tokens - (self.cumulative_length - self.parked.tokens)
        repeats = self.keys.shape[1] // self._num_kv_heads
        tail = (states[:, ::repeats, behind:] for states in (self.keys, self.values))
        self.keys, self.values = self.parked.with_tail(*tail)
        self.kept = self.filler_tokens = self.ragged = None
        self.hides_more_than_padding = False

    def absorb_pads(self) -> None:
        """Where heads differ in length, let no pads stand among the tokens behind the prompt."""
        if self.ragged is None or self.gaps is None:
            return
        if not bool(self.visible_columns(self.stored_tokens).all()):
            self.absorb_tail()

    def absorb_tail(self) -> None:
        """Give every head of different length its part of the tokens behind the prompt."""
        if self.ragged is None or not self.stored_tokens:
            return
        columns, scores = self.columns(), self.scores_with(self.stored_tokens)
        real = None if self.gaps is None else self.visible_columns(self.stored_tokens)
        self.ragged = self.ragged.with_tail(self.keys, self.values, real)
        if real is not None:
            columns[..., columns.shape[-1] - self.stored_tokens :].masked_fill_(~real[:, None], -1)
            order = pads_first(columns >= 0)
            columns = columns.gather(-1, order)[..., -self.ragged.longest_tokens :]
            if scores is not None:
                scores = scores.gather(-1, order)[..., -self.ragged.longest_tokens :]
        self.kept, self.slot_scores = columns.to(torch.int32), scores
        self.keys, self.values = self.keys[..., :0, :].clone(), self.values[..., :0, :].clone()

    def note(self, eviction: Eviction) -> None:
        """Drop what a step of decoding evicts, and keep what the policy notes of the rest."""
        self.slot_scores = eviction.scores
        if eviction.keep_indices is None:
            return
        slots, fillers = self.stored_tokens, self.filler_tokens
        kept = eviction.keep_indices.expand(-1, self.keys.shape[1], -1)
        self.kept = _columns_of(kept, self.columns()).to(torch.int32)
        if self.slot_scores is not None:
            self.slot_scores = self.slot_scores.gather(2, kept.clamp(min=0))
        if self.ragged is not None:
            self.ragged = self.ragged.keep(kept)
            return
        self.keys = ops.gather_tokens(self.keys, kept)
        self.values = ops.gather_tokens(self.values, kept)
        self.filler_tokens = eviction.filler_tokens
        if eviction.filler_tokens is None:
            self.filler_tokens = fillers_left(slots, kept.shape[-1], fillers)
        self.hides_more_than_padding = self._fillers_outnumber_padding(self.cumulative_length)
        self._move_on(eviction.sink_tokens)

    def _move_on(self, sink_tokens: int) -> None:
        """Number the first tokens by their place in the cache."""
        if not sink_tokens or self.cumulative_length == self.stored_tokens:
            return
        assert self.rotation is not None
        self.sinks = move_sinks(
            self.keys, sink_tokens, self._dropped_tokens(), self.rotation, self.sinks
        )


def _columns_of(slots: Tensor, columns: Tensor) -> Tensor:
    """The columns that slots stand for; -1 stays."""
    return columns.gather(2, slots.clamp(min=0)).masked_fill(slots < 0, -1)
