"""One layer of a compressed cache: stores fewer tokens than it has seen."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from snapkv import ops
from snapkv.cache.queries import QueryMemory
from snapkv.cache.slots import LayerState, SlotMap
from snapkv.errors import wrong
from snapkv.policies import EvictingPolicy, Policy, PromptLayer, Selection
from snapkv.policies.spans import Spans
from snapkv.storage.base import TokenStore
from snapkv.storage.bits import KVCodes
from snapkv.storage.dense import DenseStore
from snapkv.storage.lent_tail import LentTail, UsedSlots
from snapkv.storage.offload import OffloadedTokens
from snapkv.storage.ragged import Counts
from snapkv.storage.ragged_store import CodedStore, RaggedStore

Rotation = Callable[[Tensor, Tensor], Tensor]
"""A function that rotates (B, H, N, D) states by (B, N) positions; it computes in float32."""


@dataclass(frozen=True, kw_only=True)
class LayerIdentity:
    """Which layer of the model a compressed layer belongs to, and what its policy needs from it.

    Attributes:
        layer_idx: index of the layer in the model.
        depth: index of the layer among the compressed layers.
        num_layers: how many layers of the model are compressed.
        rotation: applies the model's rotary embedding to keys; None if the policy does not need it.
        output_projection: the module after attention; None if the policy does not need it.
        readers: how many later layers store nothing and attend to the keys and values of this one.
    """

    layer_idx: int
    depth: int = 0
    num_layers: int = 1
    rotation: Rotation | None = None
    output_projection: Any = None
    readers: int = 0


class CompressedLayer(DynamicLayer):
    """A cache layer that stores the keys and values of the kept tokens, in ascending positions.

    The layer reports the number of tokens that it has seen, although it stores only some of them.
    The sliding-window layers of transformers do the same, so transformers computes the right
    positions and masks. The policy decides which tokens to keep, and `snapkv.hf.attention` decides
    when the policy selects.

    Attributes:
        codes: the quantized form of what is kept of a prompt; None to store it unchanged.
        store: the keys and values of the stored tokens.
        slots: which token is in which slot of the store.
        state: other tensors about the tokens, such as their scores.
        queries: the last queries, which may vote again.
        offloaded: all tokens of the turns so far, off the device, if the layer has recall.
        chooses_again: whether the layer compresses again at the end of every later prompt.
        protect: positions of the whole conversation that must not be evicted; None for none.
    """

    supports_early_init = False

    def __init__(self, policy: Policy, identity: LayerIdentity, codes: KVCodes | None) -> None:
        # The constructor of `DynamicLayer` is not called, because it assigns `keys` and `values`,
        # which are properties here.
        self.policy, self.identity, self.codes = policy, identity, codes
        self.queries = QueryMemory(policy)
        self.store: TokenStore = DenseStore()
        self.slots, self.state, self._seen_tokens = SlotMap(), LayerState(), 0
        self.offloaded = OffloadedTokens()
        self.chooses_again = False
        self.protect: Spans | None = None

    # The interface of a transformers cache layer.

    @property
    def keys(self) -> Any:
        return self.store.keys

    @property
    def values(self) -> Any:
        return self.store.values

    @property
    def is_initialized(self) -> bool:
        return self.store.is_filled

    @property
    def is_compileable(self) -> bool:
        return self.store.has_room

    @property
    def is_croppable(self) -> bool:
        return not isinstance(self.policy, EvictingPolicy)

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,
        coming: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Append new tokens and return all stored keys and values, with the new ones at the end.

        If the offloaded tokens are due, the caller must have restored them.

        Args:
            key_states: (B, H, N, D).
            value_states: (B, H, N, Dv).
            *args: ignored.
            coming: how many tokens of the prompt follow these tokens; None if these tokens come
                after the end of the prompt.
            **kwargs: ignored.

        Returns:
            The (B, H', S, D) keys and (B, H', S, Dv) values that attention is passed. If heads
            hold different numbers of tokens, only those of the tail; see `TokenStore`.
        """
        # The policy chooses from exact keys and values, so quantized ones become dense again.
        may_choose = self.slots.kept is None or self.chooses_again
        if may_choose and coming is not None and isinstance(self.store, CodedStore):
            self._hold_dense(self.store)
        if not self.store.has_room:
            self._seen_tokens += key_states.shape[-2]
        evicts = isinstance(self.policy, EvictingPolicy)
        return self.store.append(key_states, value_states, coming or 0, in_place=not evicts)

    def get_seq_length(self) -> int:
        """Return the number of tokens seen, evicted ones included.

        transformers counts the positions of new tokens from this number.
        """
        return self.seen_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many columns the attention mask has, and the number of its first column.

        The stored slots are treated as the last columns of the full mask.

        Args:
            query_length: how many tokens the next forward pass reads.
        """
        if self.offloaded.is_due or (self.slots.kept is None and not self.store.has_room):
            return self.columns + query_length, self.slots.removed_tokens
        store = self.store
        return store.tail.columns(query_length), self.slots.count_seen(store.unmasked_slots)

    def reset(self) -> None:
        """Remove all tokens and everything that the layer remembers about them."""
        self.store, self.slots, self.state = DenseStore(), SlotMap(), type(self.state)()
        self._seen_tokens, self.queries.held = 0, None
        self.offloaded.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the batch rows by the rows `beam_idx`, in that order.

        Does nothing if the layer is empty.

        Args:
            beam_idx: (new B,) integers, the old row for every new one. A row may be left out or
                repeated.
        """
        if not self.store.is_filled:
            return
        before = self.store.slots
        self.store = self.store.select_rows(beam_idx)
        self.slots, self.state = self.slots.select_rows(beam_idx), self.state.select_rows(beam_idx)
        self.queries.select_rows(beam_idx)
        self.offloaded.select_rows(beam_idx)
        unused = before - self.store.slots  # positive if the row with the longest head was left out
        if unused:
            self.slots = self.slots.without_first(unused)
            self.state = self.state.without_first(unused)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, such as rejected drafts or the tokens of a refused forward pass.

        The caller must have checked with `snapkv.cache.taking_back` that the layer can do it.

        Args:
            tokens_to_remove: zero, or minus the number of tokens to remove, as in transformers.
        """
        tokens = -tokens_to_remove
        if not tokens:
            return
        slots, columns = self.slots.without_last(tokens, self.store.slots)
        left = self.store.slots - columns
        store = self.store.truncate(columns) if columns else self.store
        self.state = self.state.cropped(columns, left)
        self.replace_tokens(store, slots.cropped(columns, left))
        self.queries.crop(columns)
        self.offloaded.truncate(self.columns)

    def __copy__(self) -> Self:
        """Return a layer that can read other tokens from now on.

        Both layers share all tensors except those that are changed in place.
        """
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied.offloaded, copied.store = copy.copy(self.offloaded), copy.copy(self.store)
        copied.queries = copy.copy(self.queries)
        copied.release_append_buffer()
        return copied

    # What the layer holds.

    @property
    def seen_tokens(self) -> int:
        """The number of tokens that the layer has seen, evicted and dropped ones included."""
        return self.slots.count_seen(self.store.slots) if self.store.has_room else self._seen_tokens

    @property
    def columns(self) -> int:
        """The number of columns: all tokens seen, padding included, but not the dropped tokens.

        If the rows have dropped different numbers of tokens, the smallest number is left out.
        """
        return self.slots.count_columns(self.store.slots)

    @property
    def held_bytes(self) -> int:
        """The bytes of the stored keys and values, including the copies of rotated sinks."""
        sinks = self.state.sink_keys
        return self.store.held_bytes + (0 if sinks is None else sinks.nbytes)

    @property
    def other_states(self) -> dict[str, Any]:
        """The layer's recurrent states, by the names of the attributes in transformers."""
        return {}

    def stored_columns(self) -> Tensor:
        """Return the column of the token in every slot.

        The layer must not be empty.

        Returns:
            (B, H, S) int64, negative for an empty slot.
        """
        columns = self.slots.columns(self.store.slots, self.keys.device)
        return columns.expand(*self.keys.shape[:2], -1)

    def stored_positions(self) -> Tensor:
        """Return the position of every stored token in the text of its row.

        Returns:
            (B, H, S) int64, ascending, -1 for padding. An empty layer has B = H = S = 0.
        """
        if not self.store.is_filled:
            return torch.empty(0, 0, 0, dtype=torch.int64)
        return self.slots.positions_of(self.stored_columns())

    # What else the wrapped attention needs from a layer.

    def remember_ids(self, token_ids: Tensor) -> None:
        """Remember the ids of the new tokens, for policies that look at token ids.

        They are appended to the ids of the same turn. After the turn they replace the ids of the
        last decode step.

        Args:
            token_ids: (B, N) integers.
        """
        known = self.state.token_ids
        if self.queries.held is not None and known is not None:
            token_ids = torch.cat([known, token_ids], dim=1)
        self.state = replace(self.state, token_ids=token_ids)

    # Evicting and quantizing.

    def select(
        self, kept: Tensor, tokens: int, counts: Counts | None = None, **changes: Any
    ) -> None:
        """Keep some of the first `tokens` slots, and all slots after them. Evict the others.

        Args:
            kept: (B, H', K) int64, the slots to keep, as in `TokenStore.select`.
            tokens: the number of slots from which they were selected.
            counts: how many slots each head keeps; None if all heads keep the same number.
            **changes: new values for other fields of `slots`.
        """
        every_head = kept.expand(-1, max(kept.shape[1], self.store.keys.shape[1]), -1)
        columns = self.slots.columns_of(every_head, tokens)
        self.store = self.store.select(kept, tokens, counts)
        self.slots = self.slots.with_kept(columns, self.slots.count_columns(tokens), **changes)

    def token_cost(self, query_heads: int) -> ops.TokenCost:
        """Return how many bytes the kept tokens of this layer take.

        Args:
            query_heads: how many query heads the layer has. They count if each of them keeps tokens
                of its own; otherwise the KV heads do.
        """
        heads = query_heads if self.policy.per_query_head else self.keys.shape[1]
        return self.store.token_cost(heads, self.codes)

    def end_prompt(
        self, prompt: PromptLayer, selection: Selection | None = None, **lost: Tensor
    ) -> None:
        """Record that the prompt has been read, and evict the tokens that were not selected.

        Args:
            prompt: the prompt's states in this layer. In a later turn, these are all tokens seen so
                far or, without recall, all stored tokens.
            selection: what to keep; None to evict nothing now.
            **lost: the lost votes, as fields of `LayerState`.

        Raises:
            InvalidArgumentError: the selection moves attention sinks, and the heads hold different
                numbers of tokens.
            OutOfMemoryError: there is no room for the offloaded tokens.
        """
        slots = self.slots
        self.queries.end_prompt(prompt.queries)
        self.state = replace(self.state, **{"lost_mass": None, "lost_peak": None, **lost})
        pads = prompt.pad_tokens if slots.kept is None else slots.pads
        self.slots = replace(slots, pads=pads, chosen_at=slots.count_seen(prompt.keys.shape[2]))
        if selection is not None:
            self.keep(selection)

    def keep(self, selection: Selection) -> None:
        """Keep the selected tokens of a prompt, and evict the others.

        A layer with recall offloads all tokens of the prompt first.

        Raises:
            InvalidArgumentError: the selection moves attention sinks, and the heads hold different
                numbers of tokens.
            OutOfMemoryError: there is no room for the offloaded tokens.
        """
        tokens, kept = selection.prompt_tokens, selection.keep_indices
        self.offloaded.append_up_to(tokens, self.store)
        head_tokens, padding_slots = selection.head_tokens, selection.padding_slots
        counts = None if head_tokens is None else tuple(map(tuple, head_tokens.tolist()))
        self.select(kept, tokens, counts, padding_slots=padding_slots)
        ids, scores = self.state.token_ids, self.state.slot_scores
        if selection.scores is not None:
            scores = scores_of_slots(selection.scores, kept, self.keys.shape[1])
        ids = None if ids is None else ids[:, tokens:]
        self.state = replace(
            self.state, head_notes=selection.head_notes, slot_scores=scores, token_ids=ids
        )
        if selection.sink_tokens:
            self.move_sinks(selection.sink_tokens)

    def move_sinks(self, sink_tokens: int) -> None:
        """Rotate the keys of the attention sinks to the positions right before the other tokens.

        Does nothing if no token has been evicted.

        Args:
            sink_tokens: how many of the first stored tokens are sinks.

        Raises:
            InvalidArgumentError: the heads hold different numbers of tokens.
        """
        if not self.slots.evicted_tokens:
            return
        if self.store.ragged is not None:
            raise wrong(
                "sink_tokens",
                f"{self.policy.name} cannot move {sink_tokens} attention sinks, because the heads "
                "keep different numbers of tokens",
                "Do not move the sinks to other positions",
            )
        assert self.identity.rotation is not None
        gap, state = self.slots.evicted_by_row(), self.state
        before = (state.sink_keys, state.sinks_moved)
        keys, moved = self.store.move_sinks(sink_tokens, gap, self.identity.rotation, before)
        self.state = replace(self.state, sink_keys=keys, sinks_moved=moved)

    def _hold_dense(self, store: RaggedStore) -> None:
        self.store, padding = DenseStore.of(store)
        if self.slots.kept is not None and bool(padding.any()):
            self.slots = replace(self.slots, padding_slots=padding)

    # Memory for the decode steps of one `generate`, which may be replayed without Python.

    def allocate_append_buffer(self, used: UsedSlots, draft_tokens: int) -> None:
        """Allocate an append buffer of fixed address and size for the next tokens.

        Until `release_append_buffer`, new tokens are written into this buffer.

        Args:
            used: how many free slots the buffer has; it counts the tokens in them.
            draft_tokens: how many tokens of a pass may be removed again.
        """
        self.store = self.store.with_room(used, self.slots.leading_padding)
        self.slots = self.slots.without_padding()
        self.queries.own(draft_tokens)

    def release_append_buffer(self) -> None:
        """Replace the fixed append buffer by one that grows.

        Does nothing if there is no fixed buffer.
        """
        if not isinstance(tail := self.store.tail, LentTail):
            return
        self.store.leave_room()
        if isinstance(self.store, RaggedStore) and self.store.was_dense:
            self._hold_dense(self.store)
        self._seen_tokens = self.slots.count_seen(self.store.slots)
        self.queries.own(tail.drafts)
        self.store.finalize_step(tail.drafts)

    def replace_tokens(self, store: TokenStore, slots: SlotMap) -> None:
        """Replace the stored tokens and their slots, and update the number of tokens seen.

        Args:
            store: the new keys and values.
            slots: which token is in which slot of `store`.
        """
        self.store, self.slots = store, slots
        self._seen_tokens = slots.count_seen(store.slots)


def scores_of_slots(scores: Tensor, kept: Tensor, heads: int) -> Tensor:
    """Look up the scores of the slots that each head keeps.

    Args:
        scores: (B, `heads` or 1, S) float32, the score of every slot.
        kept: (B, `heads` or 1, K) int64, slots; -1 for none.
        heads: how many heads the result has.

    Returns:
        (B, heads, K) float32. The score of a slot -1 is arbitrary.
    """
    kept = kept.expand(-1, heads, -1).clamp(min=0)
    return scores.expand(-1, heads, -1).gather(2, kept)
