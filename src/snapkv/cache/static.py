"""A compressed layer whose tensors never change place or size, so that decoding can be compiled."""

from typing import Any

import torch
from torch import Tensor

from snapkv.cache.layer import CompressedLayer
from snapkv.errors import InvalidArgumentError, UnsupportedModelError
from snapkv.policies import EvictingPolicy, Policy, PromptLayer, Selection
from snapkv.validation import require_choice, require_int


def slots_for(policy: Policy, storage: str, room_tokens: int) -> int | None:
    """How many slots a layer's buffer has; None for layers that grow.

    Raises:
        InvalidArgumentError: an unknown storage, or a policy that static storage cannot hold.
        InvalidTypeError: `room_tokens` is not an integer.
    """
    require_choice("storage", storage, ("dynamic", "static"))
    require_int("room_tokens", room_tokens, minimum=1)
    if storage == "dynamic":
        return None
    if policy.most_tokens is None or isinstance(policy, EvictingPolicy):
        raise InvalidArgumentError(
            f"storage: expected a policy that keeps a budget of tokens of the prompt and all "
            f"behind it for storage='static', got {policy.name}; use SnapKV(budget=...), or "
            "storage='dynamic'"
        )
    return policy.most_tokens + room_tokens


class StaticCompressedLayer(CompressedLayer):
    """Keeps the prompt's best tokens in a buffer with room for what is generated.

    Until the prompt ends it grows as any other layer does. Then the kept tokens move into a buffer
    that is allocated for the first prompt and used again for every prompt of the same batch size
    after `reset`, whatever its length: a compiled decoding step, or a CUDA graph of one, replays
    without being made anew. How many slots are filled is a tensor, which the step itself counts up;
    the mask hides the others.

    Args:
        slots: size of the buffer, in tokens.

    Attributes:
        fixed: whether the prompt has ended and the buffer is in use.
    """

    is_compileable = True  # tells transformers to compile the decoding step
    masks_of_the_model = True
    fixed = False
    _filled: Tensor | None = None
    _dropped_at_end = 0

    def __init__(self, *args: Any, slots: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slots = slots
        self.room_tokens = slots - (self.policy.most_tokens or 0)
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new tokens; returns the whole buffer once the prompt has ended."""
        if self.recall_due:
            self.recall()
        if not self.fixed:
            return super().update(key_states, value_states, *args, **kwargs)
        assert self._filled is not None
        new_tokens = key_states.shape[-2]
        places = torch.arange(new_tokens, device=key_states.device) + self._filled
        self._filled.add_(new_tokens)
        self.keys.index_copy_(2, places, key_states)
        self.values.index_copy_(2, places, value_states)
        return self.keys, self.values

    def end_prompt(self, selection: Selection | None, prompt: PromptLayer) -> None:
        """Move what is kept into the buffer."""
        super().end_prompt(selection, prompt)
        if self.ragged is not None or self.keys.shape[1] != prompt.num_kv_heads:
            raise UnsupportedModelError(
                f"storage: expected one set of tokens per KV head and as many in each for "
                f"storage='static', got policy {self.policy.name}; use storage='dynamic'"
            )
        self.fix()

    def fix(self) -> None:
        """Store in the buffer from now on, beginning with what is stored now."""
        stored = self.keys.shape[-2]
        self.require_room(stored)
        self._dropped_at_end = self._seen_tokens - stored
        self._move_in(self.keys, self.values, stored)
        self.fixed = True

    def require_room(self, stored_tokens: int) -> None:
        """Refuse more tokens than the buffer has slots.

        Raises:
            InvalidArgumentError: there are too many.
        """
        if stored_tokens > self.slots:
            raise InvalidArgumentError(
                f"room_tokens: expected room for {stored_tokens:,} tokens, got a buffer of "
                f"{self.slots:,} slots; make the CompressedCache with a larger room_tokens"
            )

    def note_gaps(self, gaps: Tensor | None) -> None:
        """Take the pads of all tokens seen by now, which the model's own masks hide."""
        self.gaps = self._gaps_so_far() if gaps is None else gaps

    def _buffers_for(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers, made anew where batch, dtype or device are others than before."""
        if self._buffers is None or not all(map(_alike, self._buffers, (keys, values))):
            with torch.inference_mode(False):  # or they could be changed in that mode only
                self._buffers = _buffer(keys, self.slots), _buffer(values, self.slots)
                self._filled = torch.zeros((), dtype=torch.int64, device=keys.device)
            for tensor in (*self._buffers, self._filled):
                torch._dynamo.mark_static_address(tensor)  # or CUDA graphs would copy it every step
        return self._buffers

    @property
    def cumulative_length(self) -> int:
        """Tokens seen since the last reset; reads the device where the prompt has ended."""
        return self._dropped_at_end + self.stored_tokens if self.fixed else self._seen_tokens

    @cumulative_length.setter
    def cumulative_length(self, tokens: int) -> None:
        if self.fixed:
            assert self._filled is not None
            self._filled.fill_(tokens - self._dropped_at_end)
        self._seen_tokens = tokens

    @property
    def seen_on_device(self) -> Tensor:
        """Tokens seen, as a tensor: for masks, which must not wait for the device."""
        assert self._filled is not None
        return self._filled + self._dropped_at_end

    @property
    def stored_tokens(self) -> int:
        """Slots that are filled; reads the device where the prompt has ended."""
        return (
            int(self._filled) if self.fixed and self._filled is not None else super().stored_tokens
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns, offset): all slots, which stand for the columns behind those dropped."""
        if not self.fixed or self.recall_due:
            return super().get_mask_sizes(query_length)
        return self.slots, self._dropped_at_end

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: their slots count as empty."""
        if not self.fixed:
            super().crop(tokens_to_remove)
        elif tokens_to_remove:
            self._require_croppable(-tokens_to_remove)
            self.cumulative_length += tokens_to_remove
            self.gaps = self._gaps_so_far()
            if self.kept is not None:
                self.kept = self.kept[..., : self.stored_tokens]

    def recall(self) -> None:
        """Hold every token that was seen again, outside of the buffer."""
        seen, filled = self.cumulative_length, self.stored_tokens
        if self.fixed:
            self.fixed, self.cumulative_length = False, seen
            self.keys, self.values = self.keys[:, :, :filled], self.values[:, :, :filled]
            self._query_tail = None  # what was generated since did not pass by
        super().recall()

    def reset(self) -> None:
        """Empty the layer; its buffers stay for the next prompt."""
        self.fixed = False
        super().reset()

    def _map_rows(self, change: Any) -> None:
        """Put rows into another order in place; another number of rows gets new buffers."""
        filled = self.stored_tokens
        super()._map_rows(change)
        if self.fixed:
            self._move_in(self.keys, self.values, filled)

    def _move_in(self, keys: Tensor, values: Tensor, tokens: int) -> None:
        """Fill the first slots of the buffers, and store in them from now on."""
        self.keys, self.values = self._buffers_for(keys, values)
        self.keys[:, :, :tokens] = keys[:, :, :tokens]
        self.values[:, :, :tokens] = values[:, :, :tokens]
        assert self._filled is not None
        self._filled.fill_(tokens)


def _buffer(states: Tensor, slots: int) -> Tensor:
    shape = (*states.shape[:2], slots, states.shape[-1])
    return torch.zeros(shape, dtype=states.dtype, device=states.device)


def _alike(buffer: Tensor, states: Tensor) -> bool:
    same_place = buffer.device == states.device and buffer.dtype == states.dtype
    return same_place and buffer.shape[:2] == states.shape[:2]
