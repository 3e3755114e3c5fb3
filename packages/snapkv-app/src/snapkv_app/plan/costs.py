"""Compute the bytes of a request: its prompt, and its cache, full or compressed."""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from snapkv.errors import BudgetTooSmallError, wrong
from snapkv.parameters import WithParameters
from snapkv.storage.bits import KVCodes
from snapkv.token_cost import TokenCost, share_of
from snapkv.validation import (
    AUTO,
    DEFAULT_BUDGET,
    byte_budget,
    require_budget,
    require_int,
    require_one_limit,
    require_ratio,
)
from snapkv_app.plan.footprint import Footprint, FullLayer

PIECE_TOKENS = 4096
"""The number of tokens per piece when a prompt is read in pieces."""

ROOM_TOKENS = 64
"""The spare tokens of an append buffer that has just grown, see `snapkv.storage.tail`."""

_MOST_TOKENS = 2**27


@dataclass(frozen=True, kw_only=True)
class Request(metaclass=WithParameters):
    """A request to plan: a batch of prompts of equal length, and their answers.

    Attributes:
        budget: the number of tokens kept per layer and head, or bytes such as "12%" or "64MiB". It
            is 1024 if neither `budget` nor `keep_ratio` is passed.
        keep_ratio: the fraction of the tokens before the window that is kept.
        bits: the bits of keys and values, such as "int4" or "K8V4"; None for unquantized.

    Raises:
        InvalidArgumentError: a number is out of range; `budget` and `keep_ratio` are both passed;
            the budget is "auto"; `bits` is not a known name; or `memory_bytes` is not more than
            `reserve_bytes`.
        InvalidTypeError: a value has the wrong type.
    """

    context_tokens: int
    batch: int = 1
    budget: int | str | None = None
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
        if self.budget == AUTO or isinstance(self.budget, dict):
            raise wrong(
                "budget",
                f"expected a number of tokens or bytes, but got {self.budget!r}, which depends on "
                "the votes of a prompt",
                "For example, use 1024 or 12%",
            )
        if self.budget is not None and self.budget_bytes is None:
            require_budget(self.budget, None, self.window_size)
        if self.bits is not None:
            object.__setattr__(self, "bits", KVCodes.of(self.bits))  # type: ignore[arg-type] # raises for other words
        if self.memory_bytes is not None and self.memory_bytes <= self.reserve_bytes:
            raise wrong(
                "gpu_memory",
                f"the memory must be larger than the reserve of {self.reserve_bytes:,} bytes, but "
                f"got {self.memory_bytes:,}",
                "Use more memory, or use a smaller reserve",
            )
        if self.bandwidth_bytes is not None and not self.bandwidth_bytes > 0:
            raise wrong(
                "bandwidth",
                f"expected more than 0 bytes per second, but got {self.bandwidth_bytes}",
                "For example, use 2TB, or remove this option",
            )

    @property
    def codes(self) -> KVCodes | None:
        """The codes that quantize keys and values; None if they are not quantized."""
        assert not isinstance(self.bits, str)
        return self.bits

    @property
    def budget_bytes(self) -> dict[str, float | int] | None:
        """The budget in bytes; None if it is a number of tokens or there is none.

        A dict with either "share", a fraction of the full cache such as 0.12, or "bytes", an int.
        """
        return byte_budget(self.budget) if isinstance(self.budget, str) else None


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The bytes that a request takes on a model.

    Most methods have an argument `compressed`, which selects the compressed or the full cache.
    """

    footprint: Footprint
    request: Request

    @cached_property
    def layer_costs(self) -> list[TokenCost]:
        """The bytes of one token in every layer that can be compressed, for all heads together."""
        model, bits = self.footprint, self.request.codes
        return [token_cost(layer, bits) for layer in model.full_layers]

    def kept(self, prompt_tokens: int, *, at_least: bool = True) -> list[int]:
        """Return how many tokens of a prompt each layer that can be compressed keeps per head.

        Args:
            prompt_tokens: the number of tokens of the prompt.
            at_least: whether a layer keeps its window even if that exceeds a budget in bytes.

        Raises:
            BudgetTooSmallError: the budget is too small for the window, and `at_least` is False.
        """
        request, layers = self.request, len(self.footprint.full_layers)
        window, budget = min(request.window_size, prompt_tokens), request.budget_bytes
        if request.keep_ratio is not None:
            return [window + share_of(prompt_tokens - window, request.keep_ratio)] * layers
        if budget is None:
            assert isinstance(request.budget, int)
            return [min(request.budget, prompt_tokens)] * layers
        share, of_bytes = budget.get("share"), budget.get("bytes")
        found = []
        for depth, cost in enumerate(self.layer_costs):
            sizes = {"own": prompt_tokens, "least": window, "depth": depth, "layers": layers}
            try:
                fit = cost.fitting_tokens(share, of_bytes, **sizes)  # type: ignore[arg-type] # whole bytes
            except BudgetTooSmallError:
                if not at_least:
                    raise
                fit = window
            found.append(min(fit, prompt_tokens))
        return found

    def cache(self, tokens: int, new_tokens: int, compressed: bool) -> int:
        """Return the bytes of all tokens in the cache of one request.

        The append buffers are counted without room for further tokens.

        Args:
            tokens: the number of tokens of the prompt.
            new_tokens: the number of tokens after it.
            compressed: whether the cache is compressed.
        """
        model, seen = self.footprint, tokens + new_tokens
        if not compressed:
            return model.cache_bytes(seen, seen)
        parts = self._parts(self.kept(tokens), new_tokens)
        held = sum(codes + exact * layer.token_bytes for layer, codes, exact in parts)
        return held + model.other_bytes(seen)

    def answering(self, tokens: int, compressed: bool) -> int:
        """Return the bytes of a cache of one row after `request.new_tokens` generated tokens.

        They include the spare room of the append buffers of a compressed cache. In sliding layers
        they include the token that has just left the window. If keys and values are quantized, the
        result is an upper limit.
        """
        model, new = self.footprint, self.request.new_tokens
        held = model.other_bytes(tokens + new, behind=1)
        if not compressed:
            return model.token_bytes * (tokens + new) + held
        for layer, codes, exact in self._parts(self.kept(tokens), new):
            rounds = 1 if codes else -(-new // (ROOM_TOKENS + 1))
            spare = exact if codes else exact - new
            held += codes + (spare + rounds * (ROOM_TOKENS + 1)) * layer.token_bytes
        return held

    def prefill_peak(self, tokens: int, compressed: bool, *, in_pieces: bool) -> int:
        """Return the largest number of bytes that one row takes while its prompt is read.

        They are those of its cache and of the activations, without the weights. A compressed cache
        stores all keys and values of only one layer at a time. In the cache of transformers,
        sliding layers store all tokens of a pass until the next pass. If the prompt is read in
        pieces, the cache of transformers copies a layer to append to it, while the compressed cache
        stores all hidden states and reads sliding layers in one pass.
        """
        model = self.footprint
        piece = min(tokens, PIECE_TOKENS) if in_pieces else tokens
        cache = self.cache(tokens, 0, compressed)
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

    def total(self, tokens: int, batch: int, compressed: bool, *, in_pieces: bool) -> int:
        """Return the bytes of the weights and of a batch of requests at its peak.

        The peak is reached while the prompts are read, or at the end of the answers.

        Args:
            tokens: the number of tokens of each prompt.
            batch: the number of rows, which are read and answered together.
            compressed: whether the cache is compressed.
            in_pieces: whether the prompts are read in pieces.
        """
        reading = self.prefill_peak(tokens, compressed, in_pieces=in_pieces)
        answering = self.answering(tokens, compressed)
        return self.footprint.weights_bytes + batch * max(reading, answering)

    def least_total(self, tokens: int, batch: int, compressed: bool) -> int:
        """Return the `total` of reading in one pass or in pieces, whichever is smaller."""
        ways = (False, True)
        return min(self.total(tokens, batch, compressed, in_pieces=way) for way in ways)

    def step(self, tokens: int, batch: int, compressed: bool) -> int:
        """Return the bytes of weights and caches that the last decode step of a batch reads.

        Args:
            tokens: the number of tokens of each prompt; `request.new_tokens` come after them.
            batch: the number of rows.
            compressed: whether the cache is compressed.
        """
        model, new = self.footprint, self.request.new_tokens
        return model.read_bytes(batch) + batch * self.cache(tokens, new, compressed)

    def longest(self, free_bytes: int, compressed: bool, *, in_pieces: bool) -> int:
        """Return the number of tokens of the longest prompts that fit into the memory.

        The batch and the length of the answers are those of the request. If the model's number of
        positions is known, prompt and answer together do not exceed it.

        Args:
            free_bytes: the bytes for weights, caches and activations.
            compressed: whether the cache is compressed.
            in_pieces: whether the prompts are read in pieces.

        Returns:
            The number of tokens; 0 if no prompt fits.
        """
        positions, batch = self.footprint.max_positions, self.request.batch
        most = _MOST_TOKENS if positions is None else positions - self.request.new_tokens
        return bisect.bisect_right(
            range(1, most + 1),
            free_bytes,
            key=lambda tokens: self.total(tokens, batch, compressed, in_pieces=in_pieces),
        )

    def _parts(self, kept: Sequence[int], new_tokens: int) -> Iterator[tuple[FullLayer, int, int]]:
        """Yield what each full-attention layer of a compressed cache stores.

        Generated tokens are quantized when they fill a block.

        Args:
            kept: the number of kept tokens of the prompt in every layer.
            new_tokens: the number of generated tokens.

        Yields:
            The layer; the bytes of its quantized tokens, which are 0 without quantization; and the
            number of its unquantized tokens.
        """
        layers, bits = self.footprint.full_layers, self.request.codes
        for layer, cost, tokens in zip(layers, self.layer_costs, kept, strict=True):
            if bits is None:
                yield layer, 0, tokens + new_tokens
                continue
            grown, left = divmod(new_tokens, bits.group_size)
            yield layer, cost.held_bytes(tokens) + grown * cost.block_bytes, left


def token_cost(layer: FullLayer, bits: KVCodes | None) -> TokenCost:
    """Return the bytes of a token in a layer, for all heads, in unquantized and quantized form.

    Quantized tokens are counted in blocks of `bits.group_size` tokens. The scales of the codes are
    assumed to have 16 bits.

    Args:
        layer: the layer.
        bits: the codes that quantize keys and values; None if they are not quantized.
    """
    cost = TokenCost(full_bytes=layer.token_bytes, block_bytes=layer.token_bytes)
    if bits is None:
        return cost
    group = bits.group_size
    # Each channel of a block's keys has a scale and a minimum of 16 bits each. Of its values, each
    # token has them for every group of channels, and the last group is padded.
    keys = layer.key_width * (group * bits.keys // 8 + 4)
    width = min(group, layer.value_width)
    groups = group * -(-layer.value_width // width)
    values = groups * width * bits.values // 8 + 4 * groups
    return replace(cost, block_bytes=layer.heads * (keys + values), block_tokens=group)
