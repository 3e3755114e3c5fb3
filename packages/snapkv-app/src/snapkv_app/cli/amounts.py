"""Parse amounts: 4096, 4k or 1.5k tokens; 80GB, 24GiB or 128kb of memory.

Anything else raises InvalidArgumentError.
"""

import contextlib
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from snapkv.errors import InvalidArgumentError
from snapkv.validation import (
    AUTO,
    byte_budget,
    code_bits,
    require_at_least,
    require_auto_budget,
    require_int,
)

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def count(name: str, text: str, before: str | None = None) -> int:
    """A whole number; 4k stands for 4096, 1.5k for 1536, 1m for 1048576.

    Args:
        name: the argument's name.
        text: the number.
        before: the text before it on the command line; None for the option `name`.
    """
    if found := re.fullmatch(r"\s*(-?)(\d+(?:\.\d+)?)\s*([km]?)\s*", text, re.IGNORECASE):
        sign, number, prefix = found.groups()
        whole = Decimal(number) * 1024 ** _POWERS[prefix.lower()]
        if whole == int(whole) and (prefix or "." not in number):
            return int(whole) * (-1 if sign else 1)
    raise InvalidArgumentError(
        f"{name}: expected a whole number such as 4096, 4k or 1.5k, got {text!r}; write for "
        f"instance {before or f'{_option(name)} '}4k"
    )


def counts(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them, see `count`; may be empty."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return tuple(count(name, part) for part in parts)


def integers(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them, see `count`; at least one, none empty."""
    if all(part.strip() for part in text.split(",")):
        return counts(name, text)
    raise InvalidArgumentError(
        f"{name}: expected whole numbers with commas between them, got {text!r}; write for "
        f"instance {_option(name)} 1024,4k"
    )


def kernel(text: str) -> int | tuple[int, int]:
    """A pooling kernel: a width such as 7, or positions before and after, as in 0+12."""
    found = re.fullmatch(r"\s*(-?\d+)\s*(?:\+\s*(\d+))?\s*", text)
    if found is None:
        raise InvalidArgumentError(
            f"kernel_size: expected a width such as 7, or positions before and after, 0+12, got "
            f"{text!r}; write for instance --kernel-size 0+12"
        )
    return int(found[1]) if found[2] is None else (int(found[1]), int(found[2]))


def token_budget(text: str, least: int | None = 1) -> int | str | dict[str, Any]:
    """Read a budget: a whole number, auto or auto:most=4k, or bytes: 12% or 64MiB.

    Args:
        text: the budget.
        least: the smallest number; None if the caller checks it.
    """
    word, _, rest = text.strip().partition(":")
    if word.lower() == AUTO:
        given = dict(_auto_parameter(part) for part in rest.split(",") if part.strip())
        require_auto_budget(**given)
        return {AUTO: given} if given else AUTO
    if byte_budget(text) is not None:
        return text.strip()
    try:
        number = count("budget", text)
    except InvalidArgumentError:
        raise InvalidArgumentError(
            f"budget: expected tokens as 4096 or 4k, a share as 12%, bytes as 64MiB, or {AUTO}, "
            f"got {text!r}; write for instance --budget 4k, or --policy full to keep everything"
        ) from None
    if least is not None:
        require_int("budget", number, least)
    return number


def _auto_parameter(text: str) -> tuple[str, int | float]:
    name, _, value = (part.strip() for part in text.partition("="))
    if name in ("least", "most"):
        with contextlib.suppress(InvalidArgumentError):
            return name, count(name, value)
    if name == "lost_vote" and re.fullmatch(r"\d*\.?\d+", value):
        return name, float(value)
    raise InvalidArgumentError(
        f"budget: expected auto with lost_vote, least or most, got {text.strip()!r}; write for "
        "instance --budget auto:lost_vote=0.001,most=4k"
    )


def token_budgets(text: str) -> tuple[int | str | dict[str, Any], ...]:
    """Budgets with commas between them, see `token_budget`."""
    if parts := [part for part in re.split(r",(?!\s*\w+=)", text) if part.strip()]:
        return tuple(token_budget(part) for part in parts)
    raise InvalidArgumentError(
        f"budget: expected budgets with commas between them, got {text!r}; write for instance "
        "--budget 1024,4k, --budget auto or --budget 12%,64MiB"
    )


EXACT = "exact"
"""The word for unquantized storage."""


def storage_bits(text: str) -> tuple[str, ...]:
    """Names of storage with commas between them: exact, or bits as in `code_bits`."""
    words = [part.strip() for part in text.split(",") if part.strip()]
    if not words or len(set(words)) < len(words) or not all(map(_is_storage, words)):
        raise InvalidArgumentError(
            f"bits: expected some of {EXACT}, int8, int4 and bits of keys and of values as "
            f"in k8v4, each once, got {text!r}; write for instance --bits {EXACT},int4"
        )
    return tuple(words)


def one_storage(text: str) -> str | None:
    """One such name; None for exact."""
    word, *more = storage_bits(text)
    if more:
        raise InvalidArgumentError(
            f"bits: expected one word, such as {EXACT} or int4, got {text!r}; try one after the "
            "other"
        )
    return None if word == EXACT else word


def _is_storage(word: str) -> bool:
    return word == EXACT or code_bits(word) is not None


def byte_count(name: str, text: str, before: str | None = None) -> int:
    """Bytes with a unit: GB and G are 10^9, GiB is 2^30; `before` as in `count`."""
    form = r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(ib|b?)|b)\s*"
    if found := re.fullmatch(form, text, re.IGNORECASE):
        base = 1024 if (found[3] or "").lower() == "ib" else 1000
        return int(Decimal(found[1]) * base ** _POWERS[(found[2] or "").lower()])
    raise InvalidArgumentError(
        f"{name}: expected bytes with a unit, such as 80GB or 24GiB, got {text!r}; write for "
        f"instance {before or f'{_option(name)} '}80GB"
    )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class WholeNumber:
    """Marks an option that takes a whole number, which may be written as 4k.

    Its declaration sets the limits that are checked before the command begins.

    Attributes:
        least: the smallest allowed number; None: the command checks it.
        is_counted: whether it counts things that take memory or time, and so has an upper limit.
    """

    least: int | None = None
    is_counted: bool = True

    def read(self, name: str, text: str) -> Any:
        """The number in the text."""
        number = count(name, text)
        if self.least is not None:
            check = require_at_least if self.is_counted else require_int
            check(name, number, self.least)
        return number


POSITIVE = WholeNumber(1, is_counted=False)


@dataclass(frozen=True)
class TokenBudgetParameter(WholeNumber):
    """Marks an option that takes a number of tokens, or auto."""

    least: int | None = 1

    def read(self, name: str, text: str) -> Any:
        """The budget in the form that policies take."""
        del name
        return token_budget(text, self.least)
