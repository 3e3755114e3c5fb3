"""The drop-in cache: a transformers `Cache` that keeps only what its policy chooses."""

import contextlib
import copy
import weakref
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from snapkv.cache import handoff
from snapkv.cache.layer import CompressedLayer
from snapkv.cache.layers import layers_for
from snapkv.cache.report import CacheReport, tensor_bytes
from snapkv.cache.static import StaticCompressedLayer, slots_for
from snapkv.errors import CacheMismatchError, InvalidArgumentError, InvalidTypeError
from snapkv.policies import EvictingPolicy, Policy, SnapKV
from snapkv.policies.base import require_int


class CompressedCache(Cache):
    """A key-value cache that shrinks to its budget at the end of the prompt.

    Pass it to ``model.generate(..., past_key_values=cache)`` or to plain ``model(...)`` calls. The
    prompt is read with full attention, so the first generated token is that of the full cache;
    what is stored shrinks layer by layer inside the same forward pass. Positions stay true.

    The prompt ends where `generate` says it does; in plain calls, with the first forward pass on
    the empty cache. Announce a longer prompt with `expect_prompt` to feed it in pieces. What comes
    after the prompt is stored whole. `reset()` makes the cache ready for another prompt. A policy
    that looks at tokens (`FastGen`) is told their ids by `generate`; before plain calls, do that
    with `expect_tokens`.

    Creating the cache sets the model's attention implementation to a wrapper of the one it has
    (``"sdpa"`` becomes ``"snapkv|sdpa"``), which leaves other caches untouched.

    Args:
        model: a decoder-only transformers model.
        policy: what to keep; `SnapKV()` by default.
        storage: "dynamic" grows with every token. "static" moves what is kept into buffers of the
            budget and `room_tokens`, so that `generate` compiles the decoding step (with CUDA
            graphs on a GPU) once for all prompts of a batch size: call `reset()` and use the cache
            again. It needs a policy with a budget, the same for all heads and layers.
        room_tokens: for "static", how many tokens behind the prompt there is room for.

    Raises:
        InvalidArgumentError: an unknown storage, or one that does not go with the policy.
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
    ) -> None:
        from snapkv.attention import wrap_attention  # the seam imports this module
        from snapkv.generation import announce_prompts

        policy = SnapKV() if policy is None else policy
        if not isinstance(policy, Policy):
            raise InvalidTypeError(
                f"policy: expected a policy such as SnapKV(budget=1024), got {policy!r} of type "
                f"{type(policy).__name__}; see snapkv.policies.POLICIES"
            )
        slots = slots_for(policy, storage, room_tokens)
        super().__init__(layers=layers_for(model, policy, slots))
        wrap_attention(model)
        announce_prompts(model)
        self.policy = policy
        self._modules = weakref.WeakSet(model.modules())
        self._first = self.compressed_layers[0]
        self._prompt_end: int | None = None
        self._records_past = False
        self._piecewise = False
        self._looks_at_tokens = "token_ids" in policy.needs
        self._coming: tuple[int, Tensor] | None = None

    # What transformers asks of a cache.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the new tokens of one layer; returns all its stored keys and values."""
        layer = self.layers[layer_idx]
        if self._looks_at_tokens and layer_idx <= self._first:
            self._require_ids(key_states.shape[0], key_states.shape[-2])
        if not isinstance(layer, CompressedLayer):
            keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            return keys, values
        if isinstance(layer, StaticCompressedLayer) and layer.fixed:
            if layer_idx == self._first and not torch.compiler.is_compiling():
                layer.require_room(layer.stored_tokens + key_states.shape[-2])
            return layer.update(key_states, value_states)
        new_tokens = key_states.shape[-2]
        self._require_finished_forward(layer, new_tokens)
        prompt_end = self._open_prompt(layer.cumulative_length + new_tokens)
        keys, values = layer.update(key_states, value_states, *args, **kwargs)
        if self._coming is not None:
            layer.remember_ids(self._coming[1].to(key_states.device))
        handoff.offer(
            handoff.Handoff(cache=self, layer=layer, new_tokens=new_tokens, prompt_end=prompt_end)
        )
        return keys, values

    def _open_prompt(self, seen_tokens: int) -> int:
        """Where the prompt ends; without an announcement, with this very forward pass."""
        if self._prompt_end is None:
            if self._records_past:
                raise CacheMismatchError(
                    "past_key_values: expected to know where the prompt ends before drafts are "
                    "verified, got a first forward pass that may hold drafts; call "
                    "cache.expect_prompt(prompt_tokens) first"
                )
            self._prompt_end = seen_tokens
        return self._prompt_end

    def _require_ids(self, batch: int, new_tokens: int) -> None:
        """Refuse tokens whose ids were not announced, where the policy looks at them."""
        seen = self.get_seq_length()
        begin, ids = (None, None) if self._coming is None else self._coming
        if ids is None or begin != seen or ids.shape != (batch, new_tokens):
            told = "none" if ids is None or begin != seen else f"those of {tuple(ids.shape)}"
            raise CacheMismatchError(
                f"token_ids: expected the ids of the next {batch} x {new_tokens} tokens, since "
                f"{self.policy.name} looks at tokens, got {told}; call "
                "cache.expect_tokens(input_ids) before model(input_ids, ...), or use model.generate"
            )

    def _require_finished_forward(self, layer: CompressedLayer, new_tokens: int) -> None:
        """Refuse to go on after a forward pass that did not reach every layer's attention."""
        pending = handoff.peek()
        first = self.layers[self._first]
        uneven = not (self._piecewise or layer is first) and (
            layer.cumulative_length + new_tokens != first.cumulative_length
        )
        unfinished = pending is not None and pending.cache is self
        if unfinished or uneven:
            if unfinished:
                handoff.take()
            raise CacheMismatchError(
                "past_key_values: expected every layer's attention to run through snapkv, got a "
                "forward pass that was interrupted or used another attention implementation; "
                "call cache.reset(), or make a new CompressedCache after changing the model"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens, such as rejected drafts.

        Raises:
            InvalidArgumentError: a positive number, or more than can be taken back.
        """
        super().crop(tokens_to_remove)
        if self._prompt_end is not None and self.get_seq_length() < self._prompt_end:
            self._prompt_end = None

    def reset(self) -> None:
        """Empty the cache for another prompt, of any length and batch size."""
        super().reset()
        pending = handoff.peek()
        if pending is not None and pending.cache is self:
            handoff.take()
        self._prompt_end = self._coming = None
        self._records_past = False

    def activate_past_recording(self) -> None:
        """Called before drafts are verified: from now on a forward pass may hold drafts.

        Raises:
            InvalidArgumentError: the policy evicts while generating. Drafts verified together
                would see tokens that plain decoding has dropped by then.
        """
        if isinstance(self.policy, EvictingPolicy):
            raise InvalidArgumentError(
                f"policy: expected one that only compresses the prompt where drafts are verified "
                f"(assistant model, prompt lookup), got {self.policy.name}, which evicts after "
                "every token; use SnapKV, or generate without drafts"
            )
        super().activate_past_recording()
        self._records_past = True

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

    # What users ask of a cache.

    def expect_prompt(self, prompt_tokens: int) -> None:
        """Announce that the prompt ends after `prompt_tokens` tokens, those already seen included.

        `model.generate` does this by itself. Call it before feeding a prompt in pieces through
        ``model(...)``: nothing is dropped before the announced end has been read.

        Raises:
            CacheMismatchError: the cache has already seen that many tokens.
        """
        require_int("prompt_tokens", prompt_tokens, minimum=1)
        seen = self.get_seq_length()
        if prompt_tokens <= seen:
            raise CacheMismatchError(
                f"past_key_values: expected a prompt longer than the {seen} tokens the cache has "
                f"already seen, got {prompt_tokens} tokens; call cache.reset() before a new prompt"
            )
        self._prompt_end = prompt_tokens

    def expect_tokens(self, token_ids: Tensor) -> None:
        """Announce the ids of the tokens of the next forward pass, pads included: (B, N) integers.

        `model.generate` does this by itself. Needed before every ``model(token_ids, ...)`` where
        the policy looks at tokens (`FastGen`); without effect where it does not.

        Raises:
            InvalidTypeError: not a tensor of that kind.
        """
        if not _are_ids(token_ids):
            raise InvalidTypeError(
                f"token_ids: expected a (batch, tokens) tensor of integers, got "
                f"{_described(token_ids)}; pass the input_ids of the next forward pass"
            )
        if self._looks_at_tokens:
            self._coming = (self.get_seq_length(), token_ids)

    @contextlib.contextmanager
    def announced(self, prompt_tokens: int) -> Iterator[None]:
        """Announce a prompt, and take the announcement back if nothing of it could be read."""
        before, seen = self._prompt_end, self.get_seq_length()
        self.expect_prompt(prompt_tokens)
        try:
            yield
        except BaseException:
            if self.get_seq_length() == seen:
                self._prompt_end = before
            raise

    @contextlib.contextmanager
    def reading_in_pieces(self, layer_idx: int, tokens: int) -> Iterator[None]:
        """Within this block one layer reads that many tokens in pieces, and no other does.

        Raises:
            InvalidArgumentError: the policy looks at tokens, which are announced all at once.
        """
        if self._looks_at_tokens:
            raise InvalidArgumentError(
                f"policy: expected one that does not look at tokens where a prompt is read layer "
                f"by layer, got {self.policy.name}; read it with prefill_chunk_size"
            )
        self._open_prompt(self.layers[layer_idx].get_seq_length() + tokens)
        self._piecewise = True
        try:
            yield
        finally:
            self._piecewise = False

    def take_back(self, layer: CompressedLayer, tokens: int) -> None:
        """Undo the update of one layer whose attention was refused."""
        layer.crop(-tokens)
        if self._prompt_end is not None and layer.cumulative_length < self._prompt_end:
            self._prompt_end = None

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
        rows = [_layer_report(i, layer) for i, layer in enumerate(self.layers)]
        kept = [row["kept_tokens"] for row in rows if row["kind"] == "compressed"]
        mean = sum(kept) / len(kept)
        compressed = [layer for layer in self.layers if isinstance(layer, CompressedLayer)]
        return CacheReport(
            policy=self.policy.name,
            seen_tokens=self.get_seq_length(),
            kept_tokens=int(mean) if mean == int(mean) else mean,
            held_bytes=sum(row["held_bytes"] for row in rows),
            index_bytes=sum(layer.noted_bytes for layer in compressed),
            full_bytes=sum(row["full_bytes"] for row in rows),
            layers=rows,
        )

    def owns(self, module: Any) -> bool:
        """Whether `module` is part of the model this cache was made for."""
        return module in self._modules


def _are_ids(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and not value.is_floating_point()


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return f"{value!r} of type {type(value).__name__}"


def _layer_report(layer_idx: int, layer: Any) -> dict[str, Any]:
    """One row of `CacheReport.layers`."""
    if isinstance(layer, CompressedLayer):
        return {
            "layer": layer_idx,
            "kind": "compressed",
            "seen_tokens": layer.cumulative_length,
            "kept_tokens": layer.kept_tokens,
            "held_bytes": layer.held_bytes,
            "full_bytes": layer.full_bytes,
        }
    held = tensor_bytes(layer)
    stored = getattr(layer, "keys", None)
    return {
        "layer": layer_idx,
        "kind": type(layer).__name__,
        "seen_tokens": layer.get_seq_length() if hasattr(layer, "get_seq_length") else 0,
        "kept_tokens": 0 if stored is None or stored.ndim < 4 else stored.shape[-2],
        "held_bytes": held,
        "full_bytes": held,
    }
