"""How to generate; importable without torch, so that the command line can show the defaults."""

from dataclasses import dataclass

from snapkv.errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """How an answer is generated.

    Args:
        max_new_tokens: length at which an answer is cut off.
        temperature: 0 takes the likeliest token each time; above 0, tokens are drawn.
        seed: of the draw; without meaning at temperature 0.

    Raises:
        InvalidArgumentError: a value out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every setting once, here."""
        minima = {"max_new_tokens": 1, "temperature": 0, "seed": 0}
        for name, minimum in minima.items():
            value = getattr(self, name)
            if not value >= minimum:
                raise InvalidArgumentError(
                    f"{name}: expected at least {minimum}, got {value}; pass a larger number"
                )
