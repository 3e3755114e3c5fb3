"""How much of a prompt the compressed layers keep, exactly, in tokens and bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from transformers import PreTrainedModel

from snapkv.errors import BudgetTooSmallError, UnsupportedModelError
from snapkv.ops import TokenCost
from snapkv.plan.footprint import Footprint, FullLayer, footprint_of_loaded
from snapkv.policies import Policy
from snapkv.policies.budget import ByteBudget, share_of
from snapkv.storage.bits import KVCodes, Quantize
from snapkv.storage.coded import block_bytes
from snapkv.storage.tail import ROOM_TOKENS, slots_behind


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """How much of a prompt the layers of a model keep, and in how many bits.

    Attributes:
        footprint: of the model.
        budget: tokens of every layer, or bytes; None with a ratio.
        keep_ratio: share of the tokens before the window.
        window_size: the last tokens of the prompt, which are always kept.
        bits: of keys and values; None for unquantized.
    """

    footprint: Footprint
    budget: int | ByteBudget | None
    keep_ratio: float | None
    window_size: int
    bits: KVCodes | None

    def tokens(self, prompt_tokens: int, *, at_least: bool = True) -> list[int]:
        """Tokens kept in each compressed layer.

        Raises:
            BudgetTooSmallError: too few bytes for the required tokens, unless `at_least`.
        """
        layers = self.footprint.full_layers
        if not isinstance(self.budget, ByteBudget):
            return [self._alike(prompt_tokens)] * len(layers)
        return [
            self._fit(self._cost_of(layer), prompt_tokens, depth, at_least=at_least)
            for depth, layer in enumerate(layers)
        ]

    def _fit(self, cost: TokenCost, prompt_tokens: int, depth: int, *, at_least: bool) -> int:
        """Tokens of one layer that fit in its bytes."""
        assert isinstance(self.budget, ByteBudget)
        least = min(self.window_size, prompt_tokens)
        layers = len(self.footprint.full_layers)
        try:
            fit = self.budget.tokens(cost, prompt_tokens, least, depth, layers)
        except BudgetTooSmallError:
            if not at_least:
                raise
            fit = least
        return min(fit, prompt_tokens)

    def held_bytes(self, kept: Sequence[int], new_tokens: int) -> int:
        """Bytes of the compressed layers after that many generated tokens."""
        return sum(
            codes + exact * layer.token_bytes
            for layer, codes, exact in self._parts(kept, new_tokens)
        )

    def memory_bytes(self, kept: Sequence[int], new_tokens: int) -> int:
        """The same including the append buffers; with codes, an upper limit."""
        total = 0
        for layer, codes, exact in self._parts(kept, new_tokens):
            if codes:
                exact += (ROOM_TOKENS + 1) * (new_tokens > 0)
            else:
                exact = slots_behind(exact - new_tokens, new_tokens)
            total += codes + exact * layer.token_bytes
        return total

    def _parts(self, kept: Sequence[int], new_tokens: int) -> Iterator[tuple[FullLayer, int, int]]:
        """For each layer: bytes of its codes, and tokens beside them, unquantized.

        Generated tokens are quantized in whole blocks.
        """
        for layer, tokens in zip(self.footprint.full_layers, kept, strict=True):
            if self.bits is None:
                yield layer, 0, tokens + new_tokens
                continue
            grown, left = divmod(new_tokens, self.bits.group_size)
            cost = self._cost_of(layer)
            yield layer, cost.held_bytes(tokens) + grown * cost.block_bytes, left

    def _alike(self, prompt_tokens: int) -> int:
        if self.budget is not None:
            assert isinstance(self.budget, int)
            return min(self.budget, prompt_tokens)
        assert self.keep_ratio is not None
        window = min(self.window_size, prompt_tokens)
        return window + share_of(prompt_tokens - window, self.keep_ratio)

    def _cost_of(self, layer: FullLayer) -> TokenCost:
        return _cost(layer, self.footprint.dtype, self.bits)


def token_costs(
    model: PreTrainedModel, policy: Policy, quantize: Quantize | None
) -> list[TokenCost]:
    """What a token costs in each layer that is compressed; empty where that is not known."""
    try:
        footprint = footprint_of_loaded(model)
    except UnsupportedModelError:
        return []
    bits = None if quantize is None else KVCodes.of(quantize)
    queries = model.config.get_text_config(decoder=True).num_attention_heads
    found = []
    for layer in footprint.full_layers:
        cost = _cost(layer, footprint.dtype, bits)
        times = queries // layer.heads if policy.per_query_head else 1
        found.append(replace(cost, block_bytes=times * cost.block_bytes))
    return found


@cache
def _cost(layer: FullLayer, dtype: str, bits: KVCodes | None) -> TokenCost:
    """Bytes of tokens; codes assume states within the range of 16-bit scales."""
    size = layer.token_bytes
    if bits is None:
        return TokenCost(full_bytes=size, block_bytes=size)
    widths = layer.key_width, layer.value_width
    keys, values = (torch.ones(1, width, dtype=getattr(torch, dtype)) for width in widths)
    blocks = layer.heads * block_bytes((keys, values), bits)
    return TokenCost(full_bytes=size, block_bytes=blocks, block_tokens=bits.group_size)
