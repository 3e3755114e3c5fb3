"""One layer of a compressed cache: stores fewer tokens than it has seen."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from snapkv import ops
from snapkv.cache.queries import QueryMemory
from snapkv.cache.slots import LayerState, SlotMap, require_removable
from snapkv.errors import InvalidArgumentError
from snapkv.policies import EvictingPolicy, Eviction, Policy, PromptLayer, Selection
from snapkv.policies.spans import Spans
from snapkv.policies.states import padding_left
from snapkv.storage.base import TokenStore
from snapkv.storage.bits import KVCodes
from snapkv.storage.dense import DenseStore
from snapkv.storage.kinds import restored
from snapkv.storage.offload import OffloadedTokens
from snapkv.storage.ragged import Counts, tokens_of
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
        offloaded: all tokens of the turns so far, off the device; None where dropped is dropped.
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
        self.offloaded: OffloadedTokens | None = None
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
        if self.offloaded is not None and self.offloaded.is_due:
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
        if self.offloaded is not None:
            self.offloaded.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Hold the rows in that order; some may go, some come twice."""
        if not self.store.is_filled:
            return
        before = self.store.slots
        self.store = self.store.select_rows(beam_idx)
        self.slots, self.state = self.slots.select_rows(beam_idx), self.state.select_rows(beam_idx)
        self.queries.select_rows(beam_idx)
        if self.offloaded is not None:
            self.offloaded.select_rows(beam_idx)
        unused = before - self.store.slots  # where the row of the longest head is gone
        if unused:
            self.slots = self.slots.without_first(unused)
            self.state = self.state.without_first(unused)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, a non-positive count, as transformers has it."""
        count = require_removable(tokens_to_remove)
        self.require_croppable(count)
        if self.must_recall(count):
            self.recall()
        self.take_back(count)

    def require_croppable(self, count: int) -> None:
        """Refuse to take back tokens that some head does not hold, and that cannot be recalled."""
        is_compressed = self.slots.kept is not None
        can_recall = self.offloaded is not None and count <= self.seen_tokens
        removed = self._removed_among_last(min(count, self.seen_tokens))
        if len(set(removed)) > 1:
            raise InvalidArgumentError(
                f"tokens_to_remove: expected tokens of which each row has dropped as many, got "
                f"{count}, of which the rows have dropped {', '.join(map(str, removed))}; take "
                "back fewer, or give each conversation a cache of its own"
            )
        count -= removed[0]
        if not count or (is_compressed and can_recall):
            return
        if is_compressed and not self.is_croppable:
            raise InvalidArgumentError(
                f"tokens_to_remove: expected at most 0, since none of the tokens that "
                f"{self.policy.name} has counted and evicted by is still whole, got {count}; reset "
                "the cache and read the shorter text again, or use a policy that only compresses "
                "prompts"
            )
        self.slots.require_whole(count, self.store, self.identity.layer_idx)

    def must_recall(self, count: int) -> bool:
        """Whether so many of the last tokens cannot be taken back before all are recalled.

        Where nothing was dropped, what would be left must be as it came: codes are not.
        """
        count -= self._removed_among_last(count)[0]
        if not count or self.offloaded is None:
            return False
        if self.slots.kept is None:
            return not self.store.is_exact and self.columns - count < self.offloaded.tokens
        return count > self.slots.whole_tail(self.store)

    def take_back(self, count: int) -> None:
        """Forget the last tokens, which are whole: rejected ones, or those of a refused pass."""
        if not count:
            return
        slots = self.slots.truncated(count, self.store)
        count -= self._removed_among_last(count)[0]
        left = self.store.slots - count
        self.store = self.store.crop(count) if count else self.store
        self.slots, self.state = slots.cropped(count, left), self.state.cropped(count, left)
        self.queries.crop(count)
        self._seen_tokens = self._counted_tokens
        if self.offloaded is not None:
            self.offloaded.crop(self.columns)

    def _removed_among_last(self, count: int) -> list[int]:
        """How many of the last tokens seen each row was told to drop."""
        if self.slots.removed_spans is None:
            return [0]
        return self.slots.removed_among_last(count, self.store)

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

    def check_integrity(self) -> None:
        """Raise AssertionError where the numbers are not those of the slots and the store."""
        slots, store = self.slots, self.store
        assert self.seen_tokens == self._counted_tokens, "tokens seen"
        assert slots.chosen_slots <= store.slots, "slots of what was chosen"
        assert slots.chosen_at <= self.seen_tokens, "tokens seen at the last choice"
        assert 0 <= slots.removed_tokens <= self.seen_tokens, "tokens that are no columns"

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

    def stored_positions(self) -> Tensor:
        """(B, H, S) int64: true position of every stored token, ascending; -1 for a pad."""
        if not self.store.is_filled:
            return torch.empty(0, 0, 0, dtype=torch.int64)
        return self.slots.positions(self.store)

    def _note(self, **known: Any) -> None:
        self.state = replace(self.state, **known)

    # What else the wrapped attention asks of a layer.

    def remember_ids(self, token_ids: Tensor) -> None:
        """Take the new tokens' ids, behind those of its turn, or instead of the last step's."""
        known = self.state.token_ids
        if self.queries.held is not None and known is not None:
            token_ids = torch.cat([known, token_ids], dim=1)
        self._note(token_ids=token_ids)

    def protected_slots(self, spans: Spans, slots: int, pads: Tensor | None) -> Tensor:
        """(B, 1 or H, slots) bool: which of the first slots stand for positions in these spans.

        `pads` are (B,) leading ones of a first prompt, or None; it knows those of later ones.
        """
        if self.slots.kept is not None:
            return spans.cover(self.slots.positions(self.store)[..., :slots])
        columns = torch.arange(slots, device=self.keys.device).expand(len(self.keys), 1, -1)
        return spans.cover(replace(self.slots, pads=pads).positions_of(columns))

    # What becomes of its tokens.

    def restore(
        self, kind: str, stored: dict[str, Any], slots: SlotMap, state: LayerState | None = None
    ) -> None:
        """Hold what a file or a document holds: a store of that kind, by its `state()`."""
        self.store = restored(kind, stored)
        self.slots = slots if self.store.ragged is None else slots.without_padding()
        self.state = self.state if state is None else state
        self._seen_tokens = self._counted_tokens

    def restore_chosen(
        self, keys: Tensor, values: Tensor, places: Tensor, tokens: int, *, per_head_budget: bool
    ) -> None:
        """Hold (B, H, K, D) keys and values of what was chosen of a prompt of so many tokens.

        Places are (B, H, K), ascending; where `per_head_budget`, behind a leading run of -1 in
        heads that hold fewer.
        """
        state: dict[str, Any] = dict(keys=keys, values=values, num_kv_heads=keys.shape[1])
        kind, K = DenseStore.kind, keys.shape[2]
        if per_head_budget:
            order = torch.arange(K, device=keys.device).where(places >= 0, -1)
            store = RaggedStore.gather(DenseStore().fill(**state), order, K)
            kind, state = RaggedStore.kind, store.state()
        self.restore(kind, state, SlotMap().chosen(places, tokens, chosen_at=tokens))

    def _keep_slots(
        self, kept: Tensor, tokens: int, counts: Counts | None = None, **changes: Any
    ) -> None:
        """Keep some of so many first slots: what these stand for has been chosen from."""
        columns = self.slots.columns_of(kept, self.store)
        self.store = self.store.keep(kept, tokens, counts)
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
        """Hold so many first slots as these codes; what they change is offloaded.

        Where tokens were dropped, all of them have been.
        """
        whole, self.store = self.store, store
        self.slots = self.slots.without_padding()
        if self.slots.kept is None:
            self._offload(whole, tokens)

    def keep(self, selection: Selection) -> None:
        """Keep the selected slots of a prompt."""
        tokens, kept = selection.prompt_tokens, selection.keep_indices
        self._offload(self.store, tokens)
        head_tokens, padding_slots = selection.head_tokens, selection.padding_slots
        counts = None if head_tokens is None else tuple(map(tuple, head_tokens.tolist()))
        self._keep_slots(kept, tokens, counts, padding_slots=padding_slots)
        ids, scores = self.state.token_ids, self.state.slot_scores
        if selection.scores is not None:
            scores = _of_slots(selection.scores, kept, self.keys.shape[1])
        ids = None if ids is None else ids[:, tokens:]
        self._note(head_notes=selection.head_notes, slot_scores=scores, token_ids=ids)
        if selection.sink_tokens:
            self._move_sinks(selection.sink_tokens)

    def keep_rows(self, rows: Tensor, counts: Counts, columns: Tensor) -> None:
        """Keep (N,) rows of what heads hold, one after the other, so many of each head.

        They stand in these (B, H, K) columns, behind a leading run of -1.
        """
        tokens, device = self.store.slots, self.store.keys.device
        at = self.slots.columns_by(tokens)
        self._offload(self.store, tokens)
        if isinstance(self.store, DenseStore):
            self.store = self.store.ragged_from(None, tokens)
        assert isinstance(self.store, RaggedStore)
        self.store.keep_rows(rows.to(device), counts)
        self.slots = self.slots.chosen(columns.to(device), at, padding_slots=None)
        ids = self.state.token_ids
        self._note(head_notes=None, token_ids=None if ids is None else ids[:, tokens:])

    def apply_eviction(self, eviction: Eviction) -> None:
        """Drop what a step of decoding evicts, and keep what the policy notes of the rest."""
        scores, heads = eviction.scores, self.keys.shape[1]
        if eviction.keep_indices is None:
            self._note(slot_scores=None if scores is None else scores.expand(-1, heads, -1))
            return
        slots, kept = self.store.slots, eviction.keep_indices.expand(-1, heads, -1)
        self._note(slot_scores=None if scores is None else _of_slots(scores, kept, heads))
        ragged, padding_slots = eviction.per_head_budget, eviction.padding_slots
        if ragged or self.store.ragged is not None:  # whose heads hold none
            padding_slots = None
        elif padding_slots is None:
            padding_slots = padding_left(slots, kept.shape[-1], self.slots.padding_slots)
        counts = tokens_of(kept) if ragged and self.store.ragged is None else None
        self._keep_slots(kept, slots, counts, padding_slots=padding_slots)
        if eviction.sink_tokens:
            self._move_sinks(eviction.sink_tokens)

    def absorb_tail(self) -> None:
        """Give every head of different length its part of the tokens behind the prompt."""
        store, tail = self.store, self.store.tail.tokens
        if not isinstance(store, RaggedStore) or not tail:
            return
        columns, end = self.slots.columns(self.store), self.columns
        self._note(slot_scores=self.state.scores_with(tail))
        store.absorb_tail()
        self.slots = self.slots.chosen(columns, end)

    def _move_sinks(self, sink_tokens: int) -> None:
        """Number the first tokens by their place in the cache."""
        if not self.slots.evicted_tokens:
            return
        if self.store.ragged is not None:
            raise InvalidArgumentError(
                f"sink_tokens: expected 0 where heads keep different numbers of tokens, got "
                f"{sink_tokens} of {self.policy.name}; leave the sinks at their own positions"
            )
        assert self.identity.rotation is not None
        gap, state = self.slots.evicted_by_row(self.store), self.state
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

    # What a user says of spans.

    def drop(self, spans: Sequence[Spans]) -> None:
        """Hold none of each row's spans any more, nor off the device."""
        store, slots = self.store, self.slots
        stays = self.slots_without(spans)
        every = torch.arange(self.columns, device=stays.device).expand(len(spans), 1, -1)
        positions = slots.positions_of(every)
        left = ~_cover(spans, positions)[:, 0]
        if self.offloaded is not None and self.offloaded.tokens:
            self._offload_tail()
            self.offloaded.only(left & (positions[:, 0] >= 0))
        self.queries.drop(left, positions[:, 0])
        slots = slots.without(spans, store, stays)
        self.store = self.store.only(stays)
        self.store.finalize_step()
        if slots.kept is not None:  # ragged heads hold no padding
            is_ragged = self.store.ragged is not None
            padding_slots = None if is_ragged else self.store.slots - stays[:, 0].sum(dim=-1)
            slots = slots.chosen(slots.kept, slots.start, padding_slots=padding_slots)
        self.slots = slots

    def slots_without(self, spans: Sequence[Spans]) -> Tensor:
        """(B, H, S) bool: the slots that hold a token of none of its row's spans."""
        positions = self.stored_positions()
        return (positions >= 0) & ~_cover(spans, positions)

    def _offload_tail(self) -> None:
        """Put all that was seen off the device, for less to take its place."""
        assert self.offloaded is not None
        if tokens := self.columns - self.offloaded.tokens:
            self.offloaded.append(*self.store.last(tokens), is_limited=False)

    # What was dropped and comes back.

    @property
    def recall_due(self) -> bool:
        """Whether the next tokens are read over all that was seen, and vote on it."""
        return self.offloaded is not None and self.offloaded.is_due

    @property
    def holds_all(self) -> bool:
        """Whether all that was seen is at hand as it came."""
        return self.slots.kept is None and not self.store.has_room and self.store.is_exact

    def _offload(self, whole: TokenStore, tokens: int) -> None:
        """Put those of the first tokens off the device that are not yet."""
        if self.offloaded is not None:
            done = self.offloaded.tokens
            if tokens > done:
                self.offloaded.append(
                    whole.keys[:, :, done:tokens], whole.values[:, :, done:tokens]
                )

    def set_aside(self) -> None:
        """Between two pieces of a prompt, hold nothing on the device."""
        if self.offloaded is None:
            return
        self._offload(self.store, self.columns)
        none = torch.empty(*self.keys.shape[:2], 0, dtype=torch.int64, device=self.keys.device)
        self._keep_slots(none, self.store.slots)
        self.offloaded.is_due = True

    def begin_at(self, tokens: int, pads: Tensor, *, forget_queries: bool) -> None:
        """Have seen that many columns, nothing on the device: each row has pads, then tokens."""
        assert self.offloaded is not None
        self.offloaded.shift(pads, tokens)
        self.slots = replace(self.slots, start=tokens)
        self._seen_tokens = self._counted_tokens
        if forget_queries:
            self.queries.held = None

    def recall(self) -> None:
        """Hold every token that was seen again, as before anything was dropped."""
        if self.offloaded is None:
            return
        self.offloaded.is_due = False
        if self.holds_all:
            return
        tail = self.store.last(self.columns - self.offloaded.tokens)
        keys, values = self.offloaded.with_tail(*tail)
        self.store = DenseStore().fill(keys, values, self.store.num_kv_heads)
        self.slots = self.slots.whole()
        self._seen_tokens = self._counted_tokens


def _cover(spans: Sequence[Spans], positions: Tensor) -> Tensor:
    """(B, H, S) bool: which positions lie in a span of their row."""
    return torch.stack([own.cover(row) for own, row in zip(spans, positions, strict=True)])


def _of_slots(scores: Tensor, kept: Tensor, heads: int) -> Tensor:
    """(B, heads, K): the (B, heads or 1, S) scores of (B, heads or 1, K) slots; any for -1."""
    kept = kept.expand(-1, heads, -1).clamp(min=0)
    return scores.expand(-1, heads, -1).gather(2, kept)
