"""The drop-in cache: a transformers `Cache` that keeps only what its policy chooses."""

import copy
import weakref
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from snapkv.cache import handoff
from snapkv.cache.announced import AnnouncedCache
from snapkv.cache.codes import Bits
from snapkv.cache.doubt import Doubt
from snapkv.cache.layer import CompressedLayer
from snapkv.cache.layers import layers_for
from snapkv.cache.padding import Padding, find_padding
from snapkv.cache.quantised import require_quantisable
from snapkv.cache.report import CacheReport
from snapkv.cache.saving import SavedCache
from snapkv.cache.sliding import let_go_of_the_past
from snapkv.cache.static import StaticCompressedLayer, slots_for
from snapkv.cache.token_ids import require_announced
from snapkv.cache.turns import TurnOptions, Turns
from snapkv.errors import (
    CacheMismatchError,
    InvalidArgumentError,
    InvalidTypeError,
    UnsupportedModelError,
)
from snapkv.policies import EvictingPolicy, Policy, SnapKV


class CompressedCache(AnnouncedCache, SavedCache, Cache):
    """A key-value cache that shrinks to its budget at the end of the prompt.

    Pass it to ``model.generate(..., past_key_values=cache)`` or to plain ``model(...)`` calls. The
    prompt is read with full attention, so the first generated token is that of the full cache;
    what is stored shrinks layer by layer inside the same forward pass. Positions stay true.

    The prompt ends where `generate` says it does; in plain calls, with the first forward pass on
    the empty cache. Announce a longer prompt with `expect_prompt` to feed it in pieces. What comes
    after the prompt is stored whole. `reset()` makes the cache ready for another prompt. A policy
    that looks at tokens (`FastGen`) is told their ids by `generate`; before plain calls, do that
    with `expect_tokens`.

    As long as a cache of it lives, the model's attention implementation is a wrapper of the one it
    has (``"sdpa"`` becomes ``"snapkv|sdpa"``), which leaves other caches untouched. When the last
    one is gone, the model is as it was; see `snapkv.install` and `snapkv.uninstall`.

    Args:
        model: a decoder-only transformers model.
        policy: what to keep; `SnapKV()` by default.
        storage: "dynamic" grows with every token. "static" moves what is kept into buffers of the
            budget and `room_tokens`, so that `generate` compiles the decoding step (with CUDA
            graphs on a GPU) once for all prompts of a batch size: call `reset()` and use the cache
            again. It needs a policy with a budget, the same for all heads and layers.
        room_tokens: for "static", how many tokens behind the prompt there is room for.
        turns: what becomes of a later prompt. "append" stores it whole behind what was kept;
            "compress" reads it over what was kept, lets its end vote on all of that, and brings the
            cache back to its budget. "append" by default, "compress" with `recall`.
        recall: where evicted keys and values go instead of being dropped: "host" for the memory of
            the host, or a folder for files that are mapped into it. A later prompt is then read
            over all that was seen, layer by layer, and its end votes on all of it again.
        recall_bytes: how many bytes `recall` may take; no limit by default.
        refresh_every: with `recall`, let the last queries vote again after as many generated
            tokens.
        quantize: hold what is kept of a prompt in few bits, "int8", "int4" or "fp8"; the model's
            own dtype by default.

    Raises:
        InvalidArgumentError: an unknown option, or one that does not go with the policy.
        InvalidTypeError: `model` or `policy` is not one.
        InvalidArgumentError: `policy` has not been given the tokenizer it needs.
        UnsupportedModelError: the model cannot be compressed correctly; the message says why.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: Policy | None = None,
        *,
        storage: Literal["dynamic", "static"] = "dynamic",
        room_tokens: int = 512,
        turns: Turns | None = None,
        recall: str | Path | None = None,
        recall_bytes: int | None = None,
        refresh_every: int | None = None,
        quantize: Bits | None = None,
    ) -> None:
        from snapkv.installation import use  # which imports this module

        policy = SnapKV() if policy is None else policy
        if not isinstance(policy, Policy):
            raise InvalidTypeError(
                f"policy: expected a policy such as SnapKV(budget=1024), got {policy!r} of type "
                f"{type(policy).__name__}; see snapkv.policies.POLICIES"
            )
        later = TurnOptions(
            turns=turns, recall=recall, recall_bytes=recall_bytes, refresh_every=refresh_every
        )
        slots = slots_for(policy, storage, room_tokens)
        require_quantisable(quantize, policy, storage)
        super().__init__(layers=layers_for(model, policy, slots, quantize))
        later.apply(self.layers, policy)
        self._use = use(model)
        self.policy = policy
        made = {"storage": storage, "room_tokens": room_tokens, "quantize": quantize}
        self.options: dict[str, Any] = made | vars(later)
        self._model = weakref.ref(model)
        self._modules = weakref.WeakSet(model.modules())
        self._first = self.compressed_layers[0]
        self.prompt_end: int | None = None
        self.turn_start = 0
        self._masked_to: int | None = None  # tokens seen by the end of the pass of the last mask
        self._records_past = False
        self.reads_piecewise = False
        self.cap_tokens: int | None = None
        self.ahead_tokens = 0
        self._looks_at_tokens = "token_ids" in policy.needs
        self._coming: tuple[int, Tensor] | None = None
        self.doubts: list[Doubt] = []
        self._padding: Padding | None = None

    # What transformers asks of a cache.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the new tokens of one layer; returns all its stored keys and values."""
        layer = self.layers[layer_idx]
        if self._looks_at_tokens and layer_idx <= self._first:
            seen, shape = self.get_seq_length(), (key_states.shape[0], key_states.shape[-2])
            require_announced(self._coming, seen, shape, self.policy.name)
        if layer_idx == self._first and not torch.compiler.is_compiling():
            self._require_seam()
        if not isinstance(layer, CompressedLayer):
            keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            let_go_of_the_past(layer, key_states.shape[-2])
            return keys, values
        if isinstance(layer, StaticCompressedLayer) and layer.fixed and not layer.recall_due:
            if layer_idx == self._first and not torch.compiler.is_compiling():
                layer.require_room(layer.stored_tokens + key_states.shape[-2])
            return layer.update(key_states, value_states)
        new_tokens = key_states.shape[-2]
        self._require_finished_forward(layer, new_tokens)
        prompt_end = self._open_prompt(layer.cumulative_length + new_tokens)
        keys, values = layer.update(key_states, value_states, *args, **kwargs)
        layer.note_gaps(None if self._padding is None else self._padding.gaps_of(layer))
        if self._coming is not None:
            layer.remember_ids(self._coming[1].to(key_states.device))
        handoff.offer(
            handoff.Handoff(
                cache=self,
                layer=layer,
                new_tokens=new_tokens,
                prompt_end=prompt_end,
                turn_start=self.turn_start,
                has_own_mask=self._masked_to != layer.cumulative_length,
            )
        )
        return keys, values

    def _require_seam(self) -> None:
        """Refuse to read where attention does not come through the seam, or did not to the end."""
        if self.doubts or not self._use.is_in_place:
            raise _interrupted()

    def _require_finished_forward(self, layer: CompressedLayer, new_tokens: int) -> None:
        """Refuse to go on after a forward pass that did not reach every layer's attention."""
        pending = handoff.peek()
        first = self.layers[self._first]
        uneven = not (self.reads_piecewise or layer is first) and (
            layer.cumulative_length + new_tokens != first.cumulative_length
        )
        unfinished = pending is not None and pending.cache is self
        if unfinished:
            handoff.take()
        if unfinished or uneven:
            raise _interrupted()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens, such as rejected drafts.

        Raises:
            InvalidArgumentError: a positive number, or more than can be taken back.
        """
        super().crop(tokens_to_remove)
        self._padding = None
        if self.prompt_end is not None and self.get_seq_length() < self.prompt_end:
            self.prompt_end = None

    def reset(self) -> None:
        """Empty the cache for another prompt, of any length and batch size."""
        super().reset()
        self.doubts.clear()
        pending = handoff.peek()
        if pending is not None and pending.cache is self:
            handoff.take()
        self.prompt_end = self._coming = self._padding = None
        self.turn_start = 0
        self._records_past = False

    def activate_past_recording(self) -> None:
        """Called before drafts are verified: from now on a forward pass may hold drafts.

        Raises:
            InvalidArgumentError: see `require_drafts`; or a part of the prompt was read already.
        """
        self.require_drafts()
        if self.get_seq_length() and self.is_reading:
            raise InvalidArgumentError(
                f"past_key_values: expected an empty cache where drafts are verified (assistant "
                f"model, prompt lookup), since transformers reads the text from its start into it, "
                f"got one that has seen {self.get_seq_length():,} tokens; generate without drafts"
            )
        super().activate_past_recording()
        self._records_past = True

    def require_drafts(self) -> None:
        """Refuse to verify drafts where the policy evicts while generating, or chooses again.

        Drafts verified together would see tokens that plain decoding has dropped by then.

        Raises:
            InvalidArgumentError: it does.
        """
        for name in ("refresh_every", "quantize"):
            if self.options[name]:
                raise InvalidArgumentError(
                    f"{name}: expected none where drafts are verified (assistant model, prompt "
                    f"lookup), got {self.options[name]}; generate without drafts"
                )
        if isinstance(self.policy, EvictingPolicy):
            raise InvalidArgumentError(
                f"policy: expected one that only compresses the prompt where drafts are verified "
                f"(Medusa, self-speculation, assistant model, prompt lookup), got "
                f"{self.policy.name}, which evicts after every token; use SnapKV, or generate "
                "without drafts"
            )

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(columns, offset) of a mask, which this thread will make next."""
        if (
            isinstance(self.layers[layer_idx], CompressedLayer)
            and not torch.compiler.is_compiling()
        ):
            handoff.ask_for_padding(self)
        columns, offset = super().get_mask_sizes(query_length, layer_idx)
        return columns, offset

    def expect_padding(self, visible: Tensor | None, new_tokens: int) -> Padding | None:
        """Announce the padding of the next forward pass, as its masks are made of it.

        Args:
            visible: (B, tokens seen + new) bool, which of them are no pads; None for all.
            new_tokens: how many the pass will read.

        Returns:
            The pads between turns by then; None where it does not say.

        Raises:
            UnsupportedModelError: pads between turns that this cache cannot hide any more.
        """
        first = self.layers[self._first]
        if not first.masks_of_the_model:
            self._masked_to = first.cumulative_length + new_tokens
        self._padding = find_padding(
            visible, new_tokens, [self.layers[i] for i in self.compressed_layers]
        )
        recall = self.options["recall"]
        if self._padding is not None and self._padding.brings_gaps and recall is not None:
            raise UnsupportedModelError(
                f"attention_mask: expected no pads between turns with recall={str(recall)!r}, "
                "whose turns are read over all that was seen, got some; leave recall out, or ask "
                "the rows one by one"
            )
        for layer in self.layers:
            if isinstance(layer, StaticCompressedLayer) and layer.fixed:
                layer.note_gaps(None if self._padding is None else self._padding.gaps)
        return self._padding

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Tokens seen, whatever is stored of them."""
        if layer_idx is None:
            layer_idx = self._first
        return int(super().get_seq_length(layer_idx))

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Where the next query stands; a tensor where static storage counts on the device."""
        layer = self.layers[layer_idx]
        if isinstance(layer, StaticCompressedLayer) and layer.fixed:
            return layer.seen_on_device
        return super().get_query_offset(layer_idx)

    def require_room(self, new_tokens: int) -> None:
        """Refuse to generate more tokens behind a prompt than static storage has room for.

        Raises:
            InvalidArgumentError: there is room for fewer.
        """
        layer = self.layers[self._first]
        if isinstance(layer, StaticCompressedLayer) and new_tokens > layer.room_tokens:
            raise InvalidArgumentError(
                f"max_new_tokens: expected at most room_tokens={layer.room_tokens:,}, the room of "
                f"this cache behind the prompt, got {new_tokens:,}; make the CompressedCache with "
                "a larger room_tokens"
            )

    def take_back(self, layer: CompressedLayer, tokens: int) -> None:
        """Undo the update of one layer whose attention was refused."""
        layer.take_back(tokens)
        if self.prompt_end is not None and layer.cumulative_length < self.prompt_end:
            self.prompt_end = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompressedCache":
        """Copy what is stored; the model that it belongs to is shared."""
        memo[id(self._modules)] = self._modules
        memo.update({id(module): module for module in self._modules})
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for name, value in vars(self).items():
            setattr(copied, name, copy.deepcopy(value, memo))
        return copied

    @property
    def model(self) -> PreTrainedModel:
        """The model the cache was made for.

        Raises:
            CacheMismatchError: nobody holds that model any more.
        """
        model = self._model()
        if model is None:
            raise CacheMismatchError(
                "past_key_values: expected the model the cache was made for to be there, got none; "
                "keep the model as long as its cache"
            )
        return model

    # What users ask of a cache.

    @property
    def compressed_layers(self) -> list[int]:
        """Indices of the layers that are compressed; the others stay transformers' own."""
        return [i for i, layer in enumerate(self.layers) if isinstance(layer, CompressedLayer)]

    def kept_positions(self, layer_idx: int) -> Tensor:
        """True positions of all tokens that a layer stores, generated ones included.

        Returns:
            (B, Hkv, kept) int64, ascending, counted from each row's first real token; -1 where a
            row keeps fewer. Hq instead of Hkv for ``group_reduce="none"``.

        Raises:
            InvalidArgumentError: the layer is not one of `compressed_layers`.
        """
        compressed = self.compressed_layers
        if layer_idx not in compressed:
            raise InvalidArgumentError(
                f"layer_idx: expected one of the compressed layers {compressed}, got {layer_idx}; "
                "layers with a sliding window or no attention keep transformers' own storage"
            )
        positions: Tensor = self.layers[layer_idx].stored_positions()
        return positions

    def report(self) -> CacheReport:
        """Tokens seen and kept, bytes held and bytes a full cache would hold."""
        return CacheReport.of(self.policy.name, self.layers)

    def owns(self, module: Any) -> bool:
        """Whether `module` is part of the model this cache was made for."""
        return module in self._modules


def _interrupted() -> CacheMismatchError:
    return CacheMismatchError(
        "past_key_values: expected every layer's attention to run through snapkv, got a "
        "forward pass that was interrupted or used another attention implementation; "
        "call cache.reset(), or make a new CompressedCache after changing the model"
    )
