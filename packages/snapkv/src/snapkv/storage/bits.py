"""How many bits hold the keys and values that are kept of a prompt."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from snapkv.errors import InvalidArgumentError
from snapkv.parameters import WithParameters
from snapkv.validation import code_bits

Bits = Literal["int8", "int4", "K8V4"]

Number = Literal[4, 8]

_NUMBERS = (4, 8)
_GROUP_SIZES = (32, 64)


@dataclass(frozen=True)
class KVCodes(metaclass=WithParameters):
    """How many bits hold what is kept of a prompt.

    Args:
        keys: bits of a key's integer, 8 or 4.
        values: of a value's.
        group_size: numbers that share a scale and a least number of 16 bits each, 32 or 64.

    Raises:
        InvalidArgumentError: a number out of range.
    """

    keys: Number = 4
    values: Number = 4
    group_size: int = 32

    def __post_init__(self) -> None:
        for name, allowed in (
            ("keys", _NUMBERS), ("values", _NUMBERS), ("group_size", _GROUP_SIZES)
        ):  # fmt: skip
            given = getattr(self, name)
            if given not in allowed or isinstance(given, float):
                raise InvalidArgumentError(
                    f"{name}: expected one of {', '.join(map(str, allowed))}, got "
                    f"{given!r}; pass for instance KVCodes(keys=4, values=4)"
                )

    @property
    def label(self) -> str:
        """Bits, such as "4"; of keys and of values where they differ, such as "8/4"."""
        return str(self.keys) if self.keys == self.values else f"{self.keys}/{self.values}"

    @classmethod
    def of(
        cls, given: "KVCodes | Bits | Mapping[str, Any]", argument: str = "quantize"
    ) -> "KVCodes":
        """What a word stands for, as "int4" or "K8V4"; or parameters by name, as a file has.

        Raises:
            InvalidArgumentError: another word.
        """
        if isinstance(given, KVCodes):
            return given
        if isinstance(given, Mapping):
            return cls(**given)
        bits = code_bits(given) if isinstance(given, str) else None
        if bits is None:
            raise InvalidArgumentError(
                f"{argument}: expected int8 or int4, keys and values apart as in K8V4, or a "
                f"KVCodes, got {given!r}; pass one of them"
            )
        return cls(*bits)  # type: ignore[arg-type] # they are some of these numbers

    def __str__(self) -> str:
        """Its bits in a word that `of` takes: "int4", or apart as in "K8V4"."""
        alike = self.keys == self.values
        return f"int{self.keys}" if alike else f"K{self.keys}V{self.values}"


Quantize = KVCodes | Bits
