"""One layer of a compressed cache: stores fewer tokens than it has seen."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

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
from snapkv.storage.offload import OffloadedTokens
from snapkv.storage.ragged import Counts
from snapkv.storage.ragged_store import CodedStore, RaggedStore

Turns = Literal["append", "compress", "recall"]
"""What becomes of a later prompt: stored whole after what was kept; its end votes on what was
kept; or it votes on all that was seen."""

Rotation = Callable[[Tensor, Tensor], Tensor]
"""Turns (B, H, N, D) states on by (B, N) positions, float32."""


@dataclass(frozen=True, kw_only=True)
class LayerIdentity:
    """Which layer of the model it is, its place among the compressed ones, and its parts.

    `rotation`, which turns keys on, and `output_projection`, the module behind attention, are None
    where the policy does not need them. So many later layers, its `readers`, store nothing and
    attend to what it stores.
    """

    layer_idx: int
    depth: int = 0
    num_layers: int = 1
    rotation: Rotation | None = None
    output_projection: Any = None
    readers: int = 0


class CompressedLayer(DynamicLayer):
    """Keys and values of the tokens that were kept, in ascending order of position.

    The layer reports every token it has seen and stores only some, the contract of transformers'
    own sliding layers, so positions and masks stay true. Which tokens to keep is the policy's
    business, when to ask it is `snapkv.hf.attention`'s.

    Attributes:
        codes: what is kept of a prompt is held in these; None for as it came.
        store: keys and values of the stored tokens.
        slots: which token stands in which slot of the store.
        state: what else is known of the tokens.
        queries: the last queries, which may vote again.
        offloaded: all tokens of the turns so far, off the device, if the layer has recall.
        turns: what becomes of a later prompt.
        protect: positions of the whole conversation that must stay; None for none.
    """

    supports_early_init = False

    def __init__(self, policy: Policy, identity: LayerIdentity, codes: KVCodes | None) -> None:
        # Not transformers' own, which would assign keys and values.
        self.policy, self.identity, self.codes = policy, identity, codes
        self.queries = QueryMemory(policy)
        self.store: TokenStore = DenseStore()
        self.slots, self.state, self._seen_tokens = SlotMap(), LayerState(), 0
        self.offloaded = OffloadedTokens()
        self.turns: Turns = "append"
        self.protect: Spans | None = None

    # What transformers asks of a layer.

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

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The store is made with the first tokens."""

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,
        coming: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Append new tokens; returns all stored keys and values, new ones last.

        They are of a prompt at whose end the policy may choose, of which so many more are `coming`;
        None where they are not. Where that chooses from all, what codes stand for is held again.
        """
        store, chooses = self.store, self.slots.kept is None or self.turns != "append"
        if self.offloaded.is_due:
            self.recall()
        elif chooses and coming is not None and isinstance(store, CodedStore):
            self._hold_dense(store)
        if not self.store.has_room:
            self._seen_tokens += key_states.shape[-2]
        evicts = isinstance(self.policy, EvictingPolicy)
        return self.store.append(key_states, value_states, coming or 0, in_place=not evicts)

    def get_seq_length(self) -> int:
        """Tokens seen, not slots stored: positions are counted from it."""
        return self.seen_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (columns, offset): stored slots stand for the last columns of the full mask."""
        if self.recall_due or (self.slots.kept is None and not self.store.has_room):
            return self.columns + query_length, self.slots.removed_tokens
        store = self.store
        return store.tail.columns(query_length), self.slots.seen(store.unmasked_slots)

    def reset(self) -> None:
        self.store, self.slots, self.state = DenseStore(), SlotMap(), type(self.state)()
        self._seen_tokens, self.queries.held = 0, None
        self.offloaded.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Hold the rows in that order; some may go, some come twice."""
        if not self.store.is_filled:
            return
        before = self.store.slots
        self.store = self.store.select_rows(beam_idx)
        self.slots, self.state = self.slots.select_rows(beam_idx), self.state.select_rows(beam_idx)
        self.queries.select_rows(beam_idx)
        self.offloaded.select_rows(beam_idx)
        unused = before - self.store.slots  # where the row of the longest head is gone
        if unused:
            self.slots = self.slots.without_first(unused)
            self.state = self.state.without_first(unused)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, such as rejected drafts or those of a refused pass.

        The caller must have asked `snapkv.cache.taking_back` whether the layer can.

        Args:
            tokens_to_remove: zero or a negative number, as in transformers.
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
        """A layer that goes on by itself; no tensor is copied but those that are written over."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied.offloaded, copied.store = copy.copy(self.offloaded), copy.copy(self.store)
        copied.queries = copy.copy(self.queries)
        copied.leave_room()
        return copied

    @property
    def chooses_again(self) -> bool:
        """Whether every later prompt brings it back to its budget."""
        return self.turns != "append"

    # What it holds.

    @property
    def seen_tokens(self) -> int:
        """Tokens seen, whatever became of them: a number, but where a step counts on the device."""
        return self._counted_tokens if self.store.has_room else self._seen_tokens

    @property
    def _counted_tokens(self) -> int:
        return self.slots.seen(self.store.slots)

    @property
    def columns(self) -> int:
        """Tokens seen but those that every row was told to drop, pads counted."""
        return self.slots.columns_by(self.store.slots)

    @property
    def held_bytes(self) -> int:
        """Bytes of the stored keys and values, second copies included, measured on the tensors."""
        return self.store.held_bytes + self._sink_bytes

    @property
    def index_bytes(self) -> int:
        """Bytes of what is held beside the keys and values, measured on the tensors."""
        noted = self.slots.nbytes + self.state.nbytes - self._sink_bytes
        return noted + self.queries.nbytes + self.store.index_bytes

    @property
    def other_states(self) -> dict[str, Any]:
        """What the layer carries besides tokens, by the names of transformers' attributes."""
        return {}

    @property
    def _sink_bytes(self) -> int:
        return 0 if self.state.sink_keys is None else self.state.sink_keys.nbytes

    def stored_columns(self) -> Tensor:
        """Return (B, H, S) int64: the column of every slot; negative where it holds no token."""
        columns = self.slots.columns(self.store.slots, self.keys.device)
        return columns.expand(*self.keys.shape[:2], -1)

    def stored_positions(self) -> Tensor:
        """Return (B, H, S) int64: the true position of every stored token, ascending; -1 for a pad.

        An empty layer has B = H = S = 0.
        """
        if not self.store.is_filled:
            return torch.empty(0, 0, 0, dtype=torch.int64)
        return self.slots.positions_of(self.stored_columns())

    def _note(self, **known: Any) -> None:
        self.state = replace(self.state, **known)

    # What else the wrapped attention asks of a layer.

    def remember_ids(self, token_ids: Tensor) -> None:
        """Take the new tokens' ids, behind those of its turn, or instead of the last step's."""
        known = self.state.token_ids
        if self.queries.held is not None and known is not None:
            token_ids = torch.cat([known, token_ids], dim=1)
        self._note(token_ids=token_ids)

    # What becomes of its tokens.

    def select(
        self, kept: Tensor, tokens: int, counts: Counts | None = None, **changes: Any
    ) -> None:
        """Keep some of the first `tokens` slots, and all slots that come after them.

        Args:
            kept: (B, H', K) int64, slots as in `TokenStore.select`.
            tokens: how many slots were chosen from.
            counts: how many of them each head keeps, if heads differ.
            **changes: other fields of the `SlotMap` that change with it.
        """
        every_head = kept.expand(-1, max(kept.shape[1], self.store.keys.shape[1]), -1)
        columns = self.slots.columns_of(every_head, tokens)
        self.store = self.store.select(kept, tokens, counts)
        self.slots = self.slots.chosen(columns, self.slots.columns_by(tokens), **changes)

    def token_cost(self, query_heads: int) -> ops.TokenCost:
        """What tokens cost that the heads keep, or so many query heads with sets of their own."""
        heads = query_heads if self.policy.per_query_head else self.keys.shape[1]
        return self.store.token_cost(heads, self.codes)

    def end_prompt(self, selection: Selection | None, prompt: PromptLayer, **lost: Tensor) -> None:
        """Note that the prompt has been read, and keep of it what was chosen.

        Where turns follow, the prompt is all that was seen so far or, without recall, all that is
        stored. What of the votes is `lost` is noted, see `LayerState`.
        """
        self.note_end(prompt, **lost)
        if selection is not None:
            self.keep(selection)

    def note_end(self, prompt: PromptLayer, **lost: Tensor) -> None:
        """Note that the prompt has been read; `lost` as in `end_prompt`."""
        slots = self.slots
        self.queries.end_prompt(prompt.queries)
        self._note(**{"lost_mass": None, "lost_peak": None, **lost})
        pads = prompt.pad_tokens if slots.is_whole else slots.pads
        chosen_at = slots.seen(prompt.keys.shape[2])
        self.slots = replace(slots, pads=pads, chosen_at=chosen_at)

    def kept_slots(self, prompt_tokens: int) -> int:
        """Behind a prompt of so many tokens: the slots of what was kept of it."""
        return prompt_tokens if self.slots.kept is None else self.slots.chosen_slots

    def in_heads(self, tokens: int) -> RaggedStore:
        """Its store, of which so many first slots are what heads keep."""
        store = self.store
        if isinstance(store, DenseStore):
            store = store.ragged_from(self.slots.leading_padding, tokens)
        assert isinstance(store, RaggedStore)
        return store

    def hold_codes(self, store: CodedStore, tokens: int) -> None:
        """Replace the first `tokens` slots by their codes, which are in `store`.

        With recall, the exact keys and values are offloaded first, unless some token was evicted:
        then all of them have been.
        """
        whole, self.store = self.store, store
        self.slots = self.slots.without_padding()
        if self.slots.kept is None:
            self.offloaded.append_up_to(tokens, whole)

    def keep(self, selection: Selection) -> None:
        """Keep the selected slots of a prompt; with recall, offload all tokens first."""
        tokens, kept = selection.prompt_tokens, selection.keep_indices
        self.offloaded.append_up_to(tokens, self.store)
        head_tokens, padding_slots = selection.head_tokens, selection.padding_slots
        counts = None if head_tokens is None else tuple(map(tuple, head_tokens.tolist()))
        self.select(kept, tokens, counts, padding_slots=padding_slots)
        ids, scores = self.state.token_ids, self.state.slot_scores
        if selection.scores is not None:
            scores = scores_of_slots(selection.scores, kept, self.keys.shape[1])
        ids = None if ids is None else ids[:, tokens:]
        self._note(head_notes=selection.head_notes, slot_scores=scores, token_ids=ids)
        if selection.sink_tokens:
            self.move_sinks(selection.sink_tokens)

    def keep_rows(self, rows: Tensor, counts: Counts, columns: Tensor) -> None:
        """Keep some tokens of every head of a prompt; with recall, offload all tokens first.

        Args:
            rows: (N,) int64, which tokens: places in the list of all tokens, head by head.
            counts: how many of them each head keeps.
            columns: (B, H, K) int32, the columns of these tokens; -1 in front if a head keeps
                fewer than K.
        """
        tokens, device = self.store.slots, self.store.keys.device
        at = self.slots.columns_by(tokens)
        self.offloaded.append_up_to(tokens, self.store)
        if isinstance(self.store, DenseStore):
            self.store = self.store.ragged_from(None, tokens)
        assert isinstance(self.store, RaggedStore)
        self.store.select_flat(rows.to(device), counts)
        self.slots = self.slots.chosen(columns.to(device), at, padding_slots=None)
        ids = self.state.token_ids
        self._note(head_notes=None, token_ids=None if ids is None else ids[:, tokens:])

    def move_sinks(self, sink_tokens: int) -> None:
        """Rotate the first keys as if their tokens stood right before the other stored tokens.

        Raises:
            InvalidArgumentError: heads hold different numbers of tokens.
        """
        if not self.slots.evicted_tokens:
            return
        if self.store.ragged is not None:
            raise wrong(
                "sink_tokens",
                f"expected 0 where heads keep different numbers of tokens, got {sink_tokens} of "
                f"{self.policy.name}",
                "Leave the sinks at their own positions",
            )
        assert self.identity.rotation is not None
        gap, state = self.slots.evicted_by_row(), self.state
        before = (state.sink_keys, state.sinks_moved)
        keys, moved = self.store.move_sinks(sink_tokens, gap, self.identity.rotation, before)
        self._note(sink_keys=keys, sinks_moved=moved)

    def _hold_dense(self, store: RaggedStore) -> None:
        self.store, padding = DenseStore.of(store)
        if self.slots.kept is not None and bool(padding.any()):
            self.slots = replace(self.slots, padding_slots=padding)

    # Room for the steps of one `generate`, which may be replayed without Python.

    def take_room(self, tokens: int) -> None:
        """Have room for `tokens` more tokens, at addresses that stay until `leave_room`."""
        self.store = self.store.with_room(tokens, self.slots.leading_padding)
        self.slots = self.slots.without_padding()
        self.queries.own()

    def leave_room(self) -> None:
        """Grow again as before; without effect if no room was taken."""
        if not self.store.has_room:
            return
        self.store.leave_room()
        if isinstance(self.store, RaggedStore) and self.store.was_dense:
            self._hold_dense(self.store)
        self._seen_tokens = self._counted_tokens
        self.queries.own()
        self.store.finalize_step()

    # What was dropped and comes back.

    @property
    def recall_due(self) -> bool:
        """Whether the next tokens must find the offloaded ones restored, because they are of a
        prompt whose end votes on all of them.
        """
        return self.offloaded.is_due

    @property
    def holds_all(self) -> bool:
        """Whether the store holds the exact keys and values of every token that was seen."""
        return self.slots.kept is None and not self.store.has_room and self.store.is_exact

    def recall(self) -> None:
        """Restore the offloaded tokens in front of the newer ones, as if nothing was evicted."""
        self.offloaded.is_due = False
        if self.holds_all:
            return
        tail = self.store.last(self.columns - self.offloaded.tokens)
        keys, values = self.offloaded.with_tail(*tail)
        store = DenseStore().fill(keys, values, self.store.num_kv_heads)
        self.replace_tokens(store, self.slots.whole())

    def replace_tokens(self, store: TokenStore, slots: SlotMap) -> None:
        """Hold the tokens of another store from now on; `slots` says which they are."""
        self.store, self.slots = store, slots
        self._seen_tokens = self._counted_tokens


def scores_of_slots(scores: Tensor, kept: Tensor, heads: int) -> Tensor:
    """(B, heads, K): the (B, heads or 1, S) scores of (B, heads or 1, K) slots; any for -1."""
    kept = kept.expand(-1, heads, -1).clamp(min=0)
    return scores.expand(-1, heads, -1).gather(2, kept)
