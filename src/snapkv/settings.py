"""How to generate; importable without torch, so that the command line can show the defaults."""

import math
from dataclasses import dataclass

from snapkv.errors import InvalidArgumentError

MIN_TEMPERATURE = 1e-3
"""Below it, logits divided by the temperature overflow in half precision."""


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """How an answer is generated.

    Args:
        max_new_tokens: length at which an answer is cut off.
        temperature: 0 takes the likeliest token each time; from 0.001, tokens are drawn.
        seed: of the draw; without meaning at temperature 0.
        min_new_tokens: an answer does not end before it has that many, its end token not counted.
        stop_token_ids: tokens that end an answer, beside the model's own.
        stop_strings: texts that end an answer; neither they nor what follows is part of it.

    Raises:
        InvalidArgumentError: a value out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check every setting once, here."""
        minima = {"max_new_tokens": 1, "seed": 0, "min_new_tokens": 0}
        for name, minimum in minima.items():
            value = getattr(self, name)
            if not value >= minimum:
                raise InvalidArgumentError(
                    f"{name}: expected at least {minimum}, got {value}; pass a larger number"
                )
        if self.min_new_tokens > self.max_new_tokens:
            raise InvalidArgumentError(
                f"min_new_tokens: expected at most max_new_tokens={self.max_new_tokens}, got "
                f"{self.min_new_tokens}; pass a smaller number"
            )
        if "" in self.stop_strings:
            raise InvalidArgumentError(
                "stop_strings: expected texts, got an empty one, which ends every answer at once; "
                "leave it out"
            )
        drawn = math.isfinite(self.temperature) and self.temperature >= MIN_TEMPERATURE
        if self.temperature != 0 and not drawn:
            raise InvalidArgumentError(
                f"temperature: expected 0, or a finite number of at least {MIN_TEMPERATURE}, got "
                f"{self.temperature}; pass 0 for the likeliest token each time, or 1"
            )
