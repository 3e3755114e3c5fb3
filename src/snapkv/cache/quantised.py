"""A compressed layer that holds what it keeps of a prompt in few bits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from snapkv.cache.codes import Bits, Codes, quantise
from snapkv.cache.layer import CompressedLayer
from snapkv.errors import InvalidArgumentError
from snapkv.policies import EvictingPolicy, Policy, PromptLayer, Selection
from snapkv.validation import require_choice


def require_quantisable(bits: object, policy: Policy, storage: str) -> None:
    """Refuse what does not go with quantised layers; `bits` None goes with all.

    Raises:
        InvalidArgumentError: unknown bits, or a policy or storage that changes slots at every step.
    """
    if bits is None:
        return
    require_choice("quantize", bits, ("int8", "int4", "fp8"))
    if isinstance(policy, EvictingPolicy) or storage != "dynamic":
        raise InvalidArgumentError(
            f"quantize: expected a policy that only compresses prompts, and storage='dynamic', got "
            f"{policy.name} with storage={storage!r}; leave quantize out"
        )


class QuantisedLayer(CompressedLayer):
    """Holds codes of the prompt's tokens; those behind it stay as they are, until the next prompt.

    While a step is computed the layer is spread out, so one layer at a time is whole. The codes are
    never made of codes: they stay until a prompt chooses again.

    Args:
        bits: "int8", "int4" or "fp8".

    Attributes:
        packed: the codes of keys and of values, or None before the prompt has ended.
    """

    _chooses_again = False  # or rows that keep what they have would be codes of codes

    def __init__(self, *args: Any, bits: Bits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bits: Bits = bits
        self.packed: tuple[Codes, Codes] | None = None
        self._is_spread = False
        self._grows_in_place = False  # every step begins with other tensors

    @property
    def packed_tokens(self) -> int:
        """Tokens that are held as codes."""
        return 0 if self.packed is None else self.packed[0].shape[2]

    @property
    def stored_tokens(self) -> int:
        """S: codes and tokens behind them."""
        return super().stored_tokens + (0 if self._is_spread else self.packed_tokens)

    @property
    def held_bytes(self) -> int:
        """Bytes of the codes, their scales, and the tokens behind them."""
        packed = 0 if self.packed is None else sum(codes.held_bytes for codes in self.packed)
        return packed + super().held_bytes

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new tokens; returns all stored keys and values, until `settle`."""
        self._spread()
        return super().update(key_states, value_states, *args, **kwargs)

    def end_prompt(self, selection: Selection | None, prompt: PromptLayer) -> None:
        """Note what to keep of the prompt, in few bits."""
        self.packed, self._is_spread = None, False
        super().end_prompt(selection, prompt)
        if self.ragged is not None:
            raise InvalidArgumentError(
                f"quantize: expected a policy that keeps as many tokens in every head, got "
                f"{self.policy.name}; leave quantize out"
            )
        tokens = self.keys.shape[2] if self.kept is None else self.kept.shape[-1]
        if tokens:
            self.packed = (
                quantise(self.keys[:, :, :tokens], self.bits, along=-2),
                quantise(self.values[:, :, :tokens], self.bits, along=-1),
            )
            self._is_spread = True
            self.settle()

    def settle(self) -> None:
        """Hold the prompt's tokens as codes again, after a step."""
        if self._is_spread:
            tokens = self.packed_tokens
            self.keys = self.keys[:, :, tokens:].clone()
            self.values = self.values[:, :, tokens:].clone()
            self._is_spread = False

    def _spread(self) -> None:
        if self.packed is not None and not self._is_spread:
            keys, values = (codes.states() for codes in self.packed)
            self.keys = torch.cat([keys, self.keys], dim=-2)
            self.values = torch.cat([values, self.values], dim=-2)
            self._is_spread = True

    def _give_up(self) -> None:
        """Go on with what the codes stand for."""
        self._spread()
        self.packed, self._is_spread = None, False

    def recall(self) -> None:
        """Hold every token that was seen again, as it was seen."""
        self._spread()
        super().recall()
        if self.kept is None:
            self.packed, self._is_spread = None, False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; where that reaches into the codes, they are given up."""
        if self.packed is not None and -tokens_to_remove > self.keys.shape[-2]:
            self._give_up()
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Empty the layer."""
        self.packed, self._is_spread = None, False
        super().reset()

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.packed is not None:
            order = change(torch.arange(self.packed[0].shape[0]))
            self.packed = (self.packed[0].rows(order), self.packed[1].rows(order))
        super()._map_rows(change)
