"""Settings of generation; importable without torch, for the command line."""

import math
from dataclasses import dataclass

from snapkv.errors import wrong
from snapkv.validation import require_int

MIN_TEMPERATURE = 1e-3
"""Below it, logits divided by the temperature overflow in half precision."""


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """The settings with which an answer is generated.

    Raises:
        InvalidArgumentError: a number is out of range, `min_new_tokens` is larger than
            `max_new_tokens`, or a stop string is empty.
        InvalidTypeError: `max_new_tokens`, `seed` or `min_new_tokens` is not an integer.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0  # 0: greedy; from 0.001 on: sampling
    seed: int = 0
    min_new_tokens: int = 0  # without the token that ends the answer
    stop_token_ids: tuple[int, ...] = ()  # further tokens that end an answer
    stop_strings: tuple[str, ...] = ()  # the answer ends before the first of them

    def __post_init__(self) -> None:
        require_int("max_new_tokens", self.max_new_tokens, minimum=1)
        require_int("seed", self.seed, minimum=0)
        require_int("min_new_tokens", self.min_new_tokens, minimum=0)
        if self.min_new_tokens > self.max_new_tokens:
            raise wrong(
                "min_new_tokens",
                f"the value must be at most max_new_tokens={self.max_new_tokens}, but got "
                f"{self.min_new_tokens}",
                "Use a smaller value",
            )
        if "" in self.stop_strings:
            raise wrong(
                "stop_strings",
                "an empty text would end every answer immediately",
                "Remove this option",
            )
        drawn = math.isfinite(self.temperature) and self.temperature >= MIN_TEMPERATURE
        if self.temperature != 0 and not drawn:
            raise wrong(
                "temperature",
                f"the value must be 0 or a finite number of at least {MIN_TEMPERATURE}, but got "
                f"{self.temperature}",
                "Use 0 for greedy decoding, or use 1 for sampling",
            )
