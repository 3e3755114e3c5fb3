"""What a request would take with a full and with a compressed cache, and what would fit."""

import bisect
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from snapkv.errors import InvalidArgumentError
from snapkv.plan.footprint import Footprint
from snapkv.storage.append_buffer import slots_behind
from snapkv.validation import require_int, require_ratio

PIECE_TOKENS = 4096
"""Tokens of a prompt that are read at a time, where it is read in pieces."""

FLOPS_PER_BYTE = 150
"""Operations that a GPU does in the time in which it reads one byte: about half of what data sheets
give for 16-bit matrices (A100 156, H100 295, H200 206), since neither peak is reached."""

_MOST_TOKENS = 2**27


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be planned.

    Args:
        context_tokens: length of every prompt.
        batch: prompts together.
        budget: tokens kept per head and layer, window included; 1024 if neither is given.
        keep_ratio: instead of `budget`, the fraction of what stands before the window.
        window_size: last tokens of the prompt, always kept.
        new_tokens: generated behind every prompt.
        memory_bytes: of the device; None to leave out what would fit.
        reserve_bytes: of them, what weights, caches and activations cannot have.
        bandwidth_bytes: that the device's memory delivers in a second; None to leave out times.

    Raises:
        InvalidArgumentError: a value out of range, or both `budget` and `keep_ratio`.
        InvalidTypeError: a value of the wrong type.
    """

    context_tokens: int
    batch: int = 1
    budget: int | None = None
    keep_ratio: float | None = None
    window_size: int = 32
    new_tokens: int = 128
    memory_bytes: int | None = None
    reserve_bytes: int = 10**9
    bandwidth_bytes: float | None = None

    def __post_init__(self) -> None:
        """Check every value once, here."""
        for name in ("context_tokens", "batch", "window_size", "new_tokens"):
            require_int(name, getattr(self, name), minimum=1)
        if self.keep_ratio is not None:
            require_ratio("keep_ratio", self.keep_ratio)
            if self.budget is not None:
                raise InvalidArgumentError(
                    f"budget and keep_ratio: expected one of them, got budget={self.budget} and "
                    f"keep_ratio={self.keep_ratio}; leave one out"
                )
        elif self.budget is None:
            object.__setattr__(self, "budget", 1024)
        if self.budget is not None:
            require_int("budget", self.budget, minimum=self.window_size + 1)
        if self.memory_bytes is not None and self.memory_bytes <= self.reserve_bytes:
            raise InvalidArgumentError(
                f"gpu_memory: expected more than the reserve of {self.reserve_bytes:,} bytes, got "
                f"{self.memory_bytes:,}; pass more, or a smaller reserve"
            )

    def kept_tokens(self, prompt_tokens: int) -> int:
        """Tokens of a prompt that stay in every head and layer."""
        if self.budget is not None:
            return min(self.budget, prompt_tokens)
        assert self.keep_ratio is not None
        window = min(self.window_size, prompt_tokens)
        return window + math.floor(self.keep_ratio * (prompt_tokens - window))


@dataclass(frozen=True, kw_only=True)
class CacheNeeds:
    """What a kind of cache comes to.

    Attributes:
        cache_bytes: of the batch, when the prompts have been read.
        prefill_peak_bytes: beside the weights while the prompts are read in one pass; an estimate.
        total_bytes: weights and the most that stands beside them.
        step_bytes: read by the step that generates the last token of every answer.
        step_ms: the least time of that step; None without a bandwidth.
        fits_in_one_pass: whether memory is enough for the request, its prompts read in one pass;
            None without a memory. Whether the model has positions for it is another question.
        fits: the same, the prompts read in one pass or in pieces.
        longest_prompt_tokens: that fits, read in one pass; None without a memory.
        longest_prompt_in_pieces_tokens: that fits, read in pieces (`snapkv.prefill` for the
            compressed cache, ``prefill_chunk_size`` for the full one).
        largest_batch: of such prompts that fits while they are read together, in pieces, and while
            their answers are generated.
        largest_decoding_batch: that fits while answers are generated, behind prompts that were read
            one after the other.
        throughput: tokens per second at the largest batch, against one full cache of the smallest
            batch; None where nothing fits.
    """

    cache_bytes: int
    prefill_peak_bytes: int
    total_bytes: int
    step_bytes: int
    step_ms: float | None
    fits_in_one_pass: bool | None = None
    fits: bool | None = None
    longest_prompt_tokens: int | None = None
    longest_prompt_in_pieces_tokens: int | None = None
    largest_batch: int | None = None
    largest_decoding_batch: int | None = None
    throughput: float | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A request on a model.

    Attributes:
        model: its name.
        footprint: what the model takes.
        request: what is planned.
    """

    model: str
    footprint: Footprint
    request: Request

    @cached_property
    def full(self) -> CacheNeeds:
        """With transformers' own cache."""
        return self._needs(compressed=False)

    @cached_property
    def compressed(self) -> CacheNeeds:
        """With a compressed cache."""
        return self._needs(compressed=True)

    @property
    def kept_tokens(self) -> int:
        """Tokens of each prompt that are kept."""
        return self.request.kept_tokens(self.request.context_tokens)

    @property
    def decode_speedup(self) -> float:
        """How much faster tokens come at most, if only bytes read from memory count."""
        return self.full.step_bytes / self.compressed.step_bytes

    @property
    def prefill_share(self) -> float:
        """Which part of a request with the full cache is reading the prompt, about."""
        return self._prefill_as_bytes() / self._request_as_bytes(self.full)

    @property
    def request_speedup(self) -> float:
        """How much faster a whole request is at most, reading the prompt included, about."""
        return self._request_as_bytes(self.full) / self._request_as_bytes(self.compressed)

    def describe(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "model": self.model,
            "request": asdict(self.request),
            "footprint": asdict(self.footprint),
            "kept_tokens": self.kept_tokens,
            "full": asdict(self.full),
            "compressed": asdict(self.compressed),
            "decode_speedup": self.decode_speedup,
            "prefill_share": self.prefill_share,
            "request_speedup": self.request_speedup,
        }

    def _needs(self, *, compressed: bool) -> CacheNeeds:
        asked = self.request
        tokens, batch = asked.context_tokens, asked.batch
        step = self._step_bytes(tokens, batch, compressed)
        return CacheNeeds(
            cache_bytes=batch * self._cache(tokens, 0, compressed),
            prefill_peak_bytes=batch * self._prefill_peak(tokens, compressed, in_pieces=False),
            total_bytes=self._total(tokens, batch, compressed, in_pieces=False),
            step_bytes=step,
            step_ms=None if asked.bandwidth_bytes is None else 1000 * step / asked.bandwidth_bytes,
            **self._fitting(compressed),
        )

    def _fitting(self, compressed: bool) -> dict[str, Any]:
        """What fits the memory; nothing where none is given."""
        asked = self.request
        if asked.memory_bytes is None:
            return {}
        room, tokens = asked.memory_bytes - asked.reserve_bytes, asked.context_tokens
        beside_weights = max(0, room - self.footprint.weights_bytes)
        one = self._total(tokens, 1, compressed, in_pieces=True) - self.footprint.weights_bytes
        most = beside_weights // one
        at_once = self._total(tokens, asked.batch, compressed, in_pieces=False) <= room
        in_pieces = self._total(tokens, asked.batch, compressed, in_pieces=True) <= room
        return {
            "fits_in_one_pass": at_once,
            "fits": at_once or in_pieces,
            "longest_prompt_tokens": self._longest(room, compressed, in_pieces=False),
            "longest_prompt_in_pieces_tokens": self._longest(room, compressed, in_pieces=True),
            "largest_batch": most,
            "largest_decoding_batch": beside_weights // self._answering(tokens, compressed),
            "throughput": self._throughput(most, compressed) if most else None,
        }

    def _cache(self, tokens: int, new_tokens: int, compressed: bool) -> int:
        """Bytes of one request's cache behind its prompt and some tokens of the answer."""
        kept = self.request.kept_tokens(tokens) if compressed else tokens
        return self.footprint.cache_bytes(kept + new_tokens, tokens + new_tokens)

    def _answering(self, tokens: int, compressed: bool) -> int:
        """Bytes that one request's cache takes of memory when its answer is complete.

        A compressed layer has room for tokens to come behind those it stores, see
        `snapkv.storage.append_buffer`; one that slides still holds the token that has just left its
        window.
        """
        model, new = self.footprint, self.request.new_tokens
        kept = self.request.kept_tokens(tokens) if compressed else tokens
        slots = slots_behind(kept, new) if compressed else kept + new
        sliding = model.sliding_bytes(tokens + new, behind=1)
        return model.token_bytes * slots + sliding + model.state_bytes

    def _prefill_peak(self, tokens: int, compressed: bool, *, in_pieces: bool) -> int:
        """Bytes of one request beside the weights at the worst moment of reading its prompt.

        A compressed cache holds one layer whole at a time. In transformers' own, layers that slide
        hold all that came in one pass until the next one. In pieces, it copies a layer to append to
        it, and a compressed cache holds the hidden states of all tokens; layers that slide it reads
        at once.
        """
        model = self.footprint
        piece = min(tokens, PIECE_TOKENS) if in_pieces else tokens
        cache = self._cache(tokens, 0, compressed)
        if not compressed:
            cache += model.sliding_bytes(tokens, behind=piece) - model.sliding_bytes(tokens)
        layer = model.layer_token_bytes * tokens
        if not in_pieces:
            around_attention = model.attention_token_bytes * tokens + layer * compressed
            return cache + max(model.mlp_token_bytes * tokens, around_attention)
        at_once = tokens if compressed and model.sliding_layers else piece
        activations = at_once * (model.mlp_token_bytes + model.attention_token_bytes)
        hidden = (layer + model.hidden_token_bytes * tokens) * compressed
        return cache + layer + hidden + activations

    def _total(self, tokens: int, batch: int, compressed: bool, *, in_pieces: bool) -> int:
        """Bytes of everything at the worst moment of a request."""
        reading = self._prefill_peak(tokens, compressed, in_pieces=in_pieces)
        answering = self._answering(tokens, compressed)
        return self.footprint.weights_bytes + batch * max(reading, answering)

    def _step_bytes(self, tokens: int, batch: int, compressed: bool) -> int:
        held = self._cache(tokens, self.request.new_tokens, compressed)
        return self.footprint.read_bytes(batch) + batch * held

    def _longest(self, room: int, compressed: bool, *, in_pieces: bool) -> int:
        """Tokens of the longest prompt that fits and for which the model has positions."""
        positions, batch = self.footprint.max_positions, self.request.batch
        most = _MOST_TOKENS if positions is None else positions - self.request.new_tokens
        return bisect.bisect_right(
            range(1, most + 1),
            room,
            key=lambda tokens: self._total(tokens, batch, compressed, in_pieces=in_pieces),
        )

    def _throughput(self, batch: int, compressed: bool) -> float:
        """Tokens per byte read at that batch, against a batch of 1 of the full cache."""
        tokens = self.request.context_tokens
        alone = self._step_bytes(tokens, 1, compressed=False)
        return batch * alone / self._step_bytes(tokens, batch, compressed)

    def _prefill_as_bytes(self) -> float:
        """Reading the prompts, as the bytes that could be read in the same time."""
        asked = self.request
        return asked.batch * self.footprint.prompt_flops(asked.context_tokens) / FLOPS_PER_BYTE

    def _request_as_bytes(self, needs: CacheNeeds) -> float:
        return self._prefill_as_bytes() + self.request.new_tokens * needs.step_bytes
