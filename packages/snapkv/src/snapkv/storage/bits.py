"""The number of bits in which the kept keys and values of a prompt are stored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from snapkv.errors import wrong
from snapkv.parameters import WithParameters
from snapkv.validation import code_bits

Bits = Literal["int8", "int4", "K8V4"]

Number = Literal[4, 8]

_NUMBERS = (4, 8)
_GROUP_SIZES = (32, 64)


@dataclass(frozen=True)
class KVCodes(metaclass=WithParameters):
    """The number of bits to which the keys and values of a prompt are quantized.

    Args:
        keys: bits of a key's integer, 8 or 4.
        values: bits of a value's integer, 8 or 4.
        group_size: how many numbers share a scale and a least number of 16 bits each, 32 or 64.

    Raises:
        InvalidTypeError: an argument is unknown.
        InvalidArgumentError: a number is not one of those that are allowed.
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
                problem = f"expected one of {', '.join(map(str, allowed))}, but got {given!r}"
                raise wrong(name, problem, "For example, use KVCodes(keys=4, values=4)")

    @property
    def label(self) -> str:
        """The number of bits as text, such as "4".

        It is "8/4" if keys and values have different numbers of bits.
        """
        return str(self.keys) if self.keys == self.values else f"{self.keys}/{self.values}"

    @classmethod
    def of(
        cls, given: "KVCodes | Bits | Mapping[str, Any]", argument: str = "quantize"
    ) -> "KVCodes":
        """Return the `KVCodes` that the user has asked for.

        Args:
            given: a word such as "int4" or "K8V4", parameters by name as files have them, or a
                `KVCodes`, which is returned.
            argument: the name of the argument, for errors.

        Raises:
            InvalidTypeError: the mapping has an unknown parameter.
            InvalidArgumentError: `given` is another word or object, or a number is out of range.
        """
        if isinstance(given, KVCodes):
            return given
        if isinstance(given, Mapping):
            return cls(**given)
        bits = code_bits(given) if isinstance(given, str) else None
        if bits is None:
            problem = f"the value must be int8, int4, K8V4 or a KVCodes object, but got {given!r}"
            raise wrong(argument, problem, "Use one of these values")
        return cls(*bits)  # type: ignore[arg-type] # `code_bits` returns 4 or 8

    def __str__(self) -> str:
        """Return the name of this setting, such as "int4".

        It is a word that `of` accepts: "K8V4" if keys and values differ.
        """
        alike = self.keys == self.values
        return f"int{self.keys}" if alike else f"K{self.keys}V{self.values}"


Quantize = KVCodes | Bits
