"""Estimate what a request needs with a full and a compressed cache, and what fits."""

import bisect
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from snapkv.errors import InvalidArgumentError
from snapkv.parameters import WithParameters
from snapkv.plan.footprint import Footprint, is_counted
from snapkv.plan.kept import Keeping
from snapkv.policies.budget import ByteBudget
from snapkv.storage.bits import KVCodes
from snapkv.validation import (
    AUTO,
    DEFAULT_BUDGET,
    format_bytes,
    require_budget,
    require_int,
    require_one_limit,
    require_ratio,
)

PIECE_TOKENS = 4096
"""Tokens per piece when a prompt is read in pieces."""

FLOPS_PER_BYTE = 150
"""Operations of a GPU in the time that it reads one byte: about half of the data sheets' ratios for
16-bit matrices (A100 156, H100 295, H200 206), since neither peak is reached."""

LAYER_MS = 0.17
"""What the launches of a layer add to a step that is one CUDA graph: 10.0 to 11.0 ms a token of an
8B model in bfloat16 on an H100 80GB HBM3 (docs/results/gpu.jsonl), 5.1 of them bytes."""

GPU_BANDWIDTH_BYTES = 3e12
"""A second, of the same card, for which gains on a GPU are told where no bandwidth is given."""

_MOST_TOKENS = 2**27

_FELT = 1.5
"""Times as fast, from which on a reader of an answer notices."""

_WORTH_SAYING = 1.1
"""A smaller speed-up does not count as help."""


@dataclass(frozen=True, kw_only=True)
class Request(metaclass=WithParameters):
    """The request to plan: a batch of prompts of one length, and their answers.

    Attributes:
        budget: tokens kept per layer and head, or bytes, as in policies; 1024 without a
            `keep_ratio`, which is a share of the tokens before the window.
        bits: of keys and values, a `KVCodes` or its name; None for unquantized.
    """

    context_tokens: int
    batch: int = 1
    budget: int | str | ByteBudget | None = None
    keep_ratio: float | None = None
    window_size: int = 32
    bits: KVCodes | str | None = None
    new_tokens: int = 128
    memory_bytes: int | None = None  # of the device; None leaves out what fits
    reserve_bytes: int = 10**9  # not available to weights, caches and activations
    bandwidth_bytes: float | None = None  # memory bandwidth per second; None leaves out times

    def __post_init__(self) -> None:
        for name in ("context_tokens", "batch", "window_size", "new_tokens"):
            require_int(name, getattr(self, name), minimum=1)
        require_one_limit(self.budget, self.keep_ratio)
        if self.keep_ratio is not None:
            require_ratio("keep_ratio", self.keep_ratio)
        elif self.budget is None:
            object.__setattr__(self, "budget", DEFAULT_BUDGET)
        object.__setattr__(self, "budget", ByteBudget.read(self.budget))
        if self.budget == AUTO:
            raise InvalidArgumentError(
                "budget: expected tokens or bytes, since a plan knows no votes of a prompt, "
                "got 'auto'; pass for instance 1024 or 12%"
            )
        if self.budget is not None and not isinstance(self.budget, ByteBudget):
            require_budget(self.budget, None, self.window_size)
        if self.bits is not None:
            codes = KVCodes.of(self.bits)  # type: ignore[arg-type] # which refuses other words
            object.__setattr__(self, "bits", codes)
        if self.memory_bytes is not None and self.memory_bytes <= self.reserve_bytes:
            raise InvalidArgumentError(
                f"gpu_memory: expected more than the reserve of {self.reserve_bytes:,} bytes, got "
                f"{self.memory_bytes:,}; pass more, or a smaller reserve"
            )
        if self.bandwidth_bytes is not None and not self.bandwidth_bytes > 0:
            raise InvalidArgumentError(
                f"bandwidth: expected more than 0 bytes a second, got {self.bandwidth_bytes}; pass "
                "for instance 2TB, or leave it out"
            )

    @property
    def codes(self) -> KVCodes | None:
        """The parsed bits."""
        assert not isinstance(self.bits, str)
        return self.bits


@dataclass(frozen=True, kw_only=True)
class CacheNeeds:
    """The needs of a kind of cache; fields about what fits are None without a memory size.

    "In pieces" means `snapkv.prefill` for the compressed cache, ``prefill_chunk_size`` for the full
    one. The model's positions are not considered.
    """

    cache_bytes: int  # of the batch, after the prompts
    prefill_peak_bytes: int  # weights excluded, prompts read in one pass; an estimate
    total_bytes: int  # weights and the peak of everything else
    step_bytes: int  # read by the decoding step of the last token of every answer
    step_ms: float | None  # time of that step as one graph; None without a bandwidth
    fits_in_one_pass: bool | None = None
    fits: bool | None = None  # in one pass or in pieces
    longest_prompt_tokens: int | None = None
    longest_prompt_in_pieces_tokens: int | None = None
    largest_batch: int | None = None  # prefilled together, in pieces, and answered
    largest_decoding_batch: int | None = None  # answered together, prefilled one after the other
    throughput: float | None = None  # at `largest_batch`, against the full cache at batch 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A request to a named model."""

    model: str
    footprint: Footprint
    request: Request

    def __post_init__(self) -> None:
        """Raise if a budget of bytes is too small for this prompt."""
        self._keeping.tokens(self.request.context_tokens, at_least=False)

    @cached_property
    def _keeping(self) -> Keeping:
        asked = self.request
        assert not isinstance(asked.budget, str), "read when it was made"
        return Keeping(
            footprint=self.footprint,
            budget=asked.budget,
            keep_ratio=asked.keep_ratio,
            window_size=asked.window_size,
            bits=asked.codes,
        )

    @cached_property
    def full(self) -> CacheNeeds:
        return self._needs(compressed=False)

    @cached_property
    def compressed(self) -> CacheNeeds:
        return self._needs(compressed=True)

    @property
    def kept_tokens(self) -> float:
        """Tokens of a prompt, mean over the compressed layers; 0 without such layers."""
        kept = self._keeping.tokens(self.request.context_tokens)
        mean = sum(kept) / max(1, len(kept))
        return int(mean) if mean == int(mean) else mean

    @property
    def decode_speedup(self) -> float:
        """Upper limit of the decoding speed-up, from the bytes that a step reads."""
        return self.full.step_bytes / self.compressed.step_bytes

    def gpu_step_ms(self, batch: int, *, compressed: bool) -> float:
        """Estimated time of the last decoding step of so many rows on a GPU, as one graph."""
        read = self._step_bytes(self.request.context_tokens, batch, compressed)
        bandwidth = self.request.bandwidth_bytes or GPU_BANDWIDTH_BYTES
        return LAYER_MS * self.footprint.layers + 1000 * read / bandwidth

    def batch_of_speedup(self, speedup: float) -> int | None:
        """The first number of rows that a GPU decodes so many times as fast; None beyond 1,024."""
        for batch in range(1, 1025):
            compressed = self.gpu_step_ms(batch, compressed=True)
            if self.gpu_step_ms(batch, compressed=False) >= speedup * compressed:
                return batch
        return None

    @property
    def prefill_share(self) -> float:
        """Estimated share of the prefill in the time of a request with the full cache."""
        return self._prefill_as_bytes() / self._request_as_bytes(self.full)

    @property
    def request_speedup(self) -> float:
        """Estimated upper limit of the speed-up of a whole request, prefill included."""
        return self._request_as_bytes(self.full) / self._request_as_bytes(self.compressed)

    def describe(self) -> dict[str, Any]:
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
        step_ms = self.gpu_step_ms(batch, compressed=compressed)
        return CacheNeeds(
            cache_bytes=batch * self._cache(tokens, 0, compressed),
            prefill_peak_bytes=batch * self._prefill_peak(tokens, compressed, in_pieces=False),
            total_bytes=self._total(tokens, batch, compressed, in_pieces=False),
            step_bytes=self._step_bytes(tokens, batch, compressed),
            step_ms=None if asked.bandwidth_bytes is None else step_ms,
            **self._fitting(compressed),
        )

    def _fitting(self, compressed: bool) -> dict[str, Any]:
        """What fits in the memory; empty without a memory size."""
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
        """Bytes of one request's cache after its prompt and some tokens of the answer."""
        model, seen = self.footprint, tokens + new_tokens
        if not compressed:
            return model.cache_bytes(seen, seen)
        kept = self._keeping.tokens(tokens)
        return self._keeping.held_bytes(kept, new_tokens) + model.other_bytes(seen)

    def _answering(self, tokens: int, compressed: bool) -> int:
        """Memory of one request's cache when its answer is complete.

        It includes append buffers, see `snapkv.storage.tail`, and in sliding layers the
        token that has just left the window.
        """
        model, new = self.footprint, self.request.new_tokens
        others = model.other_bytes(tokens + new, behind=1)
        if not compressed:
            return model.token_bytes * (tokens + new) + others
        return self._keeping.memory_bytes(self._keeping.tokens(tokens), new) + others

    def _prefill_peak(self, tokens: int, compressed: bool, *, in_pieces: bool) -> int:
        """Peak bytes of one request's prefill, weights excluded.

        A compressed cache holds all keys and values of one layer at a time. In transformers' cache,
        sliding layers hold a whole pass until the next one. In pieces, that cache copies a layer to
        append to it; a compressed one holds all hidden states and reads sliding layers at once.
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
        """Peak bytes of a request, weights included."""
        reading = self._prefill_peak(tokens, compressed, in_pieces=in_pieces)
        answering = self._answering(tokens, compressed)
        return self.footprint.weights_bytes + batch * max(reading, answering)

    def _step_bytes(self, tokens: int, batch: int, compressed: bool) -> int:
        model, new = self.footprint, self.request.new_tokens
        return model.read_bytes(batch) + batch * self._cache(tokens, new, compressed)

    def _longest(self, room: int, compressed: bool, *, in_pieces: bool) -> int:
        """Tokens of the longest prompt that fits in the memory and the model's positions."""
        positions, batch = self.footprint.max_positions, self.request.batch
        most = _MOST_TOKENS if positions is None else positions - self.request.new_tokens
        return bisect.bisect_right(
            range(1, most + 1),
            room,
            key=lambda tokens: self._total(tokens, batch, compressed, in_pieces=in_pieces),
        )

    def _throughput(self, batch: int, compressed: bool) -> float:
        """Tokens per byte read at that batch, against the full cache at batch 1."""
        tokens = self.request.context_tokens
        alone = self._step_bytes(tokens, 1, compressed=False)
        return batch * alone / self._step_bytes(tokens, batch, compressed)

    def _prefill_as_bytes(self) -> float:
        """The prefill, as the bytes that could be read in the same time."""
        asked = self.request
        return asked.batch * self.footprint.prompt_flops(asked.context_tokens) / FLOPS_PER_BYTE

    def _request_as_bytes(self, needs: CacheNeeds) -> float:
        return self._prefill_as_bytes() + self.request.new_tokens * needs.step_bytes


def verdict(plan: Plan) -> list[str]:
    """Sentences about a plan; the first one answers "will it help?"."""
    return [*_headline(plan), *_limits(plan), *_notes(plan)]


def _headline(plan: Plan) -> Iterator[str]:
    tokens, kept = plan.request.context_tokens, plan.kept_tokens
    if kept >= tokens and plan.request.bits is None:
        yield (
            f"Compression will not help: a prompt of {tokens:,} tokens is within the budget, and "
            "nothing is dropped."
        )
        return
    saved = plan.full.cache_bytes - plan.compressed.cache_bytes
    share = 1 - plan.footprint.read_bytes(plan.request.batch) / plan.full.step_bytes
    if plan.compressed.fits is False:
        yield "This does not fit in the memory with either cache, in one pass or in pieces."
    elif plan.full.fits is False:
        yield "Compression is what makes this fit: the full cache does not fit."
    elif plan.decode_speedup < _WORTH_SAYING and saved < 0.1 * plan.full.total_bytes:
        yield (
            f"Compression will hardly help: the full cache is {share:.0%} of what a step reads, so "
            f"tokens come at most {plan.decode_speedup:.2f} times as fast, and "
            f"{format_bytes(saved)} are saved. A longer prompt or a larger batch would change that."
        )
    else:
        yield (
            f"Compression helps: {format_bytes(saved)} of cache are saved, and tokens come up to "
            f"{plan.decode_speedup:.1f} times as fast."
        )
        if (rows := plan.batch_of_speedup(_FELT) or 0) > (batch := plan.request.batch):
            full, kept = (plan.gpu_step_ms(batch, compressed=each) for each in (False, True))
            floor = LAYER_MS * plan.footprint.layers
            yield (
                f"On a GPU you will hardly feel it{' in one row' if batch == 1 else ''}: a token "
                f"takes about {full:.1f} ms, compressed {kept:.1f}, of which {floor:.1f} are "
                "launches of one CUDA graph, as on an H100, and most of the rest reads weights. "
                f"A batch of {rows:,} comes {_FELT} times as fast."
            )


def _limits(plan: Plan) -> Iterator[str]:
    tokens, positions = plan.request.context_tokens, plan.footprint.max_positions
    answer = plan.request.new_tokens
    if positions is not None and tokens + answer > positions:
        yield (
            f"The model has {positions:,} positions, fewer than {tokens:,} tokens of prompt and "
            f"{answer:,} of answer need: it will be refused. {_remedy(positions, answer)}"
        )
    if plan.compressed.fits and not plan.compressed.fits_in_one_pass:
        yield (
            "Read in one pass, the prompts do not fit; read them in pieces, with "
            "snapkv.prefill.layer_by_layer."
        )
    if plan.request_speedup < _WORTH_SAYING <= plan.decode_speedup:
        yield (
            "Do not expect the whole request to be faster: reading the prompt takes as long as "
            f"before, about {plan.prefill_share:.0%} of the time with an answer of {answer:,} "
            "tokens. Longer answers, or several from one prompt, gain more."
        )


def _remedy(positions: int, answer: int) -> str:
    if answer >= positions:
        return "Ask for a shorter answer."
    return f"Shorten the prompt to {positions - answer:,} tokens, or the answer."


def _notes(plan: Plan) -> Iterator[str]:
    model, tokens = plan.footprint, plan.request.context_tokens
    full = len(model.full_layers)
    if full < model.layers or model.state_bytes:
        share = model.token_bytes * tokens / model.cache_bytes(tokens, tokens)
        yield (
            f"{full} of {model.layers} layers grow with the prompt and are compressed, "
            f"{share:.1%} of the full cache here; sliding windows and states are not compressed."
        )
    if not is_counted(model.quantization):
        yield (
            f"The checkpoint's weights are quantized ({model.quantization}); they are counted in "
            f"{model.dtype}, which takes more."
        )
    if model.experts:
        yield (
            f"A token visits {model.experts_per_token} of {model.experts} experts per layer; the "
            "step is counted with those that the batch is expected to visit."
        )
