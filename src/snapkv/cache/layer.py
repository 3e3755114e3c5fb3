"""One layer of a compressed cache: stores fewer tokens than it has seen."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from snapkv import ops
from snapkv.cache.keeping import keep_tokens, last_tokens
from snapkv.cache.ragged import RaggedStates
from snapkv.errors import CacheMismatchError, InvalidArgumentError
from snapkv.policies import EvictingPolicy, Eviction, Policy, PromptLayer, Selection
from snapkv.policies.base import fillers_left
from snapkv.rotary import Rotation


class CompressedLayer(DynamicLayer):
    """Keys and values of the tokens that were kept, in ascending order of position.

    The layer reports every token it has seen and stores only some, the contract of transformers'
    own sliding layers, so positions and masks stay true. It moves tensors; which of them to keep
    is the policy's business, when to ask it is `snapkv.attention`'s.

    Attributes:
        keys, values: (B, H, S, D), S stored slots. H is Hkv, or Hq where a policy keeps one set
            per query head.
        cumulative_length: tokens seen since the last reset.
        kept: (B, H, K) int32, prompt columns of the first K slots, or None while nothing was
            dropped.
        pad_tokens: (B,) leading pads of each row of the prompt, or None.
        filler_tokens: (B,) leading slots that hold pads, or None.
        ragged: what the heads keep of the prompt where each keeps a number of its own; `keys` and
            `values` then hold only what came behind the prompt.
        slot_scores: (B, H, S) float32, what an evicting policy has noted of every slot, or None.
        sink_keys: (B, H, start, D), the keys of tokens that have been moved on as they were before,
            or None; `keys` holds them as they are now.
        rotation, output_projection: parts of the model's layer, where the policy needs them.
        hides_more_than_padding: attention needs a mask of the layer's own.
    """

    keys: Any  # None until the first update
    values: Any

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
        super().__init__()
        self.policy = policy
        self.layer_idx = layer_idx
        self.depth = depth
        self.num_layers = num_layers
        self.rotation = rotation
        self.output_projection = output_projection
        self.cumulative_length = 0
        self.kept: Tensor | None = None
        self.pad_tokens: Tensor | None = None
        self.filler_tokens: Tensor | None = None
        self.hides_more_than_padding = False
        self.ragged: RaggedStates | None = None
        self.slot_scores: Tensor | None = None
        self.sink_keys: Tensor | None = None
        self._sinks_moved: Tensor | None = None
        self._query_tail: Tensor | None = None
        self._history_tokens = policy.history_tokens if isinstance(policy, EvictingPolicy) else 0
        self._num_kv_heads = 0

    # What transformers asks of a layer.

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new tokens; returns all stored keys and values, new ones last."""
        self._require_batch(key_states.shape[0])
        self.cumulative_length += key_states.shape[-2]
        self._num_kv_heads = key_states.shape[1]
        if self.kept is not None and self.keys.shape[1] != key_states.shape[1]:
            repeats = self.keys.shape[1] // key_states.shape[1]
            key_states = key_states.repeat_interleave(repeats, dim=1)
            value_states = value_states.repeat_interleave(repeats, dim=1)
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys, values

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
        stored = self.stored_tokens
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
        self._require_croppable(count)
        self.keys = self.keys[..., :-count, :]
        self.values = self.values[..., :-count, :]
        self.cumulative_length -= count
        if self.kept is not None and self.ragged is None:
            self.kept = self.kept[..., : self.stored_tokens]
        if self.slot_scores is not None:
            self.slot_scores = self.slot_scores[..., : self.stored_tokens]
        if self._query_tail is not None:
            self._query_tail = self._query_tail[..., :-count, :]

    def _require_croppable(self, count: int) -> None:
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
        self.kept = self.pad_tokens = self.filler_tokens = None
        self.ragged = self.slot_scores = self._query_tail = None
        self.sink_keys = self._sinks_moved = None

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
        for name in (
            "keys",
            "values",
            "kept",
            "pad_tokens",
            "filler_tokens",
            "slot_scores",
            "sink_keys",
            "_sinks_moved",
            "_query_tail",
        ):
            rows = getattr(self, name)
            if rows is not None:
                setattr(self, name, change(rows))

    # What the attention seam asks of a layer.

    @property
    def _is_filled(self) -> bool:
        """Whether any token was ever appended since the last reset."""
        return self.is_initialized and self.keys.ndim == 4

    @property
    def stored_tokens(self) -> int:
        """S: slots of `keys`, the same for every head and row."""
        return self.keys.shape[-2] if self._is_filled else 0

    def remember_queries(self, queries: Tensor) -> None:
        """Hold on to the last queries of a chunk: the window may begin in it."""
        self._query_tail = self.with_remembered(queries).clone()

    def with_remembered(self, queries: Tensor) -> Tensor:
        """(B, Hq, up to `policy.query_tokens`, D): the last queries of the prompt so far."""
        if self._query_tail is not None:
            queries = torch.cat([self._query_tail, queries], dim=-2)
        return last_tokens(queries, self.policy.query_tokens)

    def look_back(self, queries: Tensor) -> Tensor:
        """(B, Hq, N, D): a step's queries, or as many of the last ones as the policy wants to see.

        Holds on to those for the steps to come.
        """
        if not self._history_tokens:
            return queries
        if self._query_tail is not None:
            before = last_tokens(self._query_tail, self._history_tokens - queries.shape[-2])
            queries = torch.cat([before, queries.detach()], dim=-2)
        self._query_tail = last_tokens(queries, self._history_tokens)
        return self._query_tail

    def end_prompt(self, selection: Selection | None, prompt: PromptLayer) -> None:
        """Note that the prompt has been read, and what of it to keep.

        Tokens behind the prompt (drafts of the same forward pass) stay behind what is kept.
        """
        self._query_tail = None
        if self._history_tokens:
            self._query_tail = last_tokens(prompt.queries, self._history_tokens).clone()
        self.pad_tokens = prompt.pad_tokens
        if selection is None:
            return
        if selection.head_tokens is not None:
            self._keep_ragged(selection)
            return
        self.keys = keep_tokens(self.keys, selection)
        self.values = keep_tokens(self.values, selection)
        kept = selection.keep_indices.expand(-1, self.keys.shape[1], -1)
        self.kept = kept.to(torch.int32)
        if selection.scores is not None:
            self.slot_scores = selection.scores.gather(2, kept.clamp(min=0))
        self.filler_tokens = selection.filler_tokens
        self.hides_more_than_padding = self._fillers_outnumber_padding(selection.prompt_tokens)
        self._move_on(selection.sink_tokens)

    def _keep_ragged(self, selection: Selection) -> None:
        self.ragged = RaggedStates.gather(self.keys, self.values, selection)
        repeats = selection.keep_indices.shape[1] // self.keys.shape[1]
        for name in ("keys", "values"):
            behind = getattr(self, name)[..., selection.prompt_tokens :, :]
            setattr(self, name, behind.repeat_interleave(repeats, dim=1))  # a copy, no view
        self.kept = selection.keep_indices.to(torch.int32)

    def note(self, eviction: Eviction) -> None:
        """Drop what a step of decoding evicts, and keep what the policy notes of the rest."""
        self.slot_scores = eviction.scores
        if eviction.keep_indices is None:
            return
        slots, fillers = self.stored_tokens, self.filler_tokens
        kept = eviction.keep_indices.expand(-1, self.keys.shape[1], -1)
        columns = self.columns().gather(2, kept.clamp(min=0)).masked_fill(kept < 0, -1)
        self.kept = columns.to(torch.int32)
        self.keys = ops.gather_tokens(self.keys, kept)
        self.values = ops.gather_tokens(self.values, kept)
        self.filler_tokens = eviction.filler_tokens
        if eviction.filler_tokens is None:
            self.filler_tokens = fillers_left(slots, kept.shape[-1], fillers)
        self.hides_more_than_padding = self._fillers_outnumber_padding(self.cumulative_length)
        if self.slot_scores is not None:
            self.slot_scores = self.slot_scores.gather(2, kept.clamp(min=0))
        self._move_on(eviction.sink_tokens)

    def _move_on(self, sink_tokens: int) -> None:
        """Turn the first keys as if their tokens stood right before those that follow them.

        They always turn from their original keys, so that rounding does not add up. All other keys
        stay as they are, bit for bit.
        """
        if not sink_tokens or self.cumulative_length == self.stored_tokens:
            return
        assert self.rotation is not None
        gap = self._dropped_tokens()
        moved = (gap > 0)[:, None, None, None]
        sinks = self.keys[..., :sink_tokens, :].clone()
        if self.sink_keys is not None and self._sinks_moved is not None:
            sinks = torch.where(self._sinks_moved, self.sink_keys, sinks)
        turned = self.rotation(sinks, gap[:, None].expand(-1, sink_tokens)).to(sinks.dtype)
        self.keys[..., :sink_tokens, :] = torch.where(moved, turned, sinks)
        self.sink_keys, self._sinks_moved = sinks, moved

    def _dropped_tokens(self) -> Tensor:
        """(B,) int64: tokens of each row that have been seen and are not stored; pads are none."""
        gap = self.cumulative_length - self.stored_tokens
        dropped = torch.full((self.keys.shape[0],), gap, device=self.keys.device)
        if self.pad_tokens is None:
            return dropped
        dropped = dropped - self.pad_tokens
        return dropped if self.filler_tokens is None else dropped + self.filler_tokens

    def scores_with(self, new_tokens: int) -> Tensor | None:
        """(B, H, S) float32: what was noted of every slot, zero for the last `new_tokens`."""
        if self.slot_scores is None:
            return None
        return torch.nn.functional.pad(self.slot_scores, (0, new_tokens))

    def _fillers_outnumber_padding(self, seen_tokens: int) -> bool:
        """Whether the padding mask, shifted to the stored slots, hides too few of them.

        The stored slots stand for the last columns seen. Where every row keeps the same budget,
        exactly its fillers then fall on columns of pads. Rows with budgets of their own (a ratio
        of their own length), or that evict at times of their own, can hold more fillers than that.
        """
        if self.filler_tokens is None or self.pad_tokens is None or self.kept is None:
            return False
        hidden = self.pad_tokens - (seen_tokens - self.kept.shape[-1])
        return bool((self.filler_tokens != hidden.clamp(min=0)).any())

    @property
    def holds_fillers(self) -> bool:
        """Whether any stored slot must be hidden."""
        hidden = self.pad_tokens if self.kept is None else self.filler_tokens
        return hidden is not None and bool(hidden.any())

    def visible_slots(self, slots: int) -> Tensor:
        """(B, slots) bool: which of the first slots hold a token and not a filler."""
        order = torch.arange(slots, device=self.keys.device)
        hidden = self.pad_tokens if self.kept is None else self.filler_tokens
        if hidden is None:
            return torch.ones(self.keys.shape[0], slots, dtype=torch.bool, device=order.device)
        return order >= hidden[:, None]

    @property
    def full_bytes(self) -> int:
        """Bytes of every seen token's key and value, stored once per KV head."""
        if not self._is_filled:
            return 0
        B = self.keys.shape[0]
        per_token = self.keys.element_size() * (self.keys.shape[-1] + self.values.shape[-1])
        return int(B * self._num_kv_heads * self.cumulative_length * per_token)

    @property
    def held_bytes(self) -> int:
        """Bytes of the stored keys and values, second copies included, measured on the tensors."""
        if not self._is_filled:
            return 0
        ragged = 0 if self.ragged is None else self.ragged.held_bytes
        sinks = 0 if self.sink_keys is None else self.sink_keys.nbytes
        return ragged + sinks + int(self.keys.nbytes + self.values.nbytes)

    @property
    def noted_bytes(self) -> int:
        """Bytes of what is held beside the keys and values, measured on the tensors."""
        noted = (self.kept, self.slot_scores, self._query_tail)
        return sum(tensor.nbytes for tensor in noted if tensor is not None)

    @property
    def kept_tokens(self) -> float:
        """Tokens stored per row and head, on average where they differ."""
        mean = self.stored_tokens + (0 if self.ragged is None else self.ragged.mean_tokens)
        return int(mean) if mean == int(mean) else mean

    # What users ask of a layer.

    def stored_positions(self) -> Tensor:
        """(B, H, S) int64: true position of every stored token, ascending; -1 for a pad."""
        if not self._is_filled:
            return torch.empty(0, 0, 0, dtype=torch.int64)
        columns = self.columns()
        if self.pad_tokens is None:
            return columns
        return (columns - self.pad_tokens[:, None, None]).clamp(min=-1)

    def columns(self) -> Tensor:
        """(B, H, S) int64: column of every stored slot in the whole sequence, pads counted."""
        B, H, S, _ = self.keys.shape
        device, end = self.keys.device, self.cumulative_length
        if self.kept is None:
            return torch.arange(end - S, end, device=device).expand(B, H, S).clone()
        appended = S if self.ragged is not None else S - self.kept.shape[-1]
        behind = torch.arange(end - appended, end, device=device).expand(B, H, -1)
        return torch.cat([self.kept.long(), behind], dim=-1)
