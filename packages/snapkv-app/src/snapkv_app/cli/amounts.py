"""Parse amounts from the command line: 4096, 4k or 1.5k tokens; 80GB, 24GiB or 128kb of memory."""

import contextlib
import math
import re
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, ClassVar, Self

from snapkv.errors import InvalidArgumentError, wrong
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
    """Parse a whole number, which may be written with a unit and may be negative.

    For example, 4k stands for 4096, 1.5k for 1536 and 1m for 1048576.

    Args:
        name: the name of the argument, for the error.
        text: the number as it was typed.
        before: the part of the command line before the number, for the example in the error. None
            stands for the option called `name`.

    Raises:
        InvalidArgumentError: `text` is not such a number.
    """
    if found := re.fullmatch(r"\s*(-?)(\d+(?:\.\d+)?)\s*([km]?)\s*", text, re.IGNORECASE):
        sign, number, prefix = found.groups()
        whole = Decimal(number) * 1024 ** _POWERS[prefix.lower()]
        if whole == int(whole) and (prefix or "." not in number):
            return int(whole) * (-1 if sign else 1)
    raise wrong(
        name,
        f"expected a whole number such as 4096, 4k or 1.5k, but got {text!r}",
        f"For example, use {before or f'{_option(name)} '}4k",
    )


def counts(name: str, text: str) -> tuple[int, ...]:
    """Parse whole numbers with commas between them, such as 1024,4k.

    Blanks between commas are ignored, so a blank text gives an empty tuple. `name` is the name of
    the argument, for the error.

    Raises:
        InvalidArgumentError: one of them is not a whole number.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return tuple(count(name, part) for part in parts)


def integers(name: str, text: str) -> tuple[int, ...]:
    """Parse at least one whole number; several have commas between them, such as 1024,4k.

    `name` is the name of the argument, for the error.

    Raises:
        InvalidArgumentError: there is no number, one is missing between two commas, or one is not a
            whole number.
    """
    if all(part.strip() for part in text.split(",")):
        return counts(name, text)
    raise wrong(
        name,
        f"expected whole numbers separated by commas, but got {text!r}",
        f"For example, use {_option(name)} 1024,4k",
    )


def kernel(text: str) -> int | tuple[int, int]:
    """Parse the size of a pooling kernel.

    Whether the kernel is possible is left to the policy.

    Returns:
        The width, such as 7, or the numbers of positions before and after the pooled one, which are
        written as 0+12.

    Raises:
        InvalidArgumentError: `text` is neither of them.
    """
    found = re.fullmatch(r"\s*(-?\d+)\s*(?:\+\s*(\d+))?\s*", text)
    if found is None:
        raise wrong(
            "kernel_size",
            "expected a width such as 7, or the positions before and after such as 0+12, but got "
            f"{text!r}",
            "For example, use --kernel-size 0+12",
        )
    return int(found[1]) if found[2] is None else (int(found[1]), int(found[2]))


def token_budget(text: str, least: int | None = 1) -> int | str | dict[str, Any]:
    """Parse the budget of a method as it was typed on the command line.

    It is a number of tokens such as 4096 or 4k; auto, with parameters as in auto:most=4k; or a
    number of bytes such as 64MiB, or 12% of the full cache.

    Args:
        text: the budget as it was typed.
        least: the smallest allowed number of tokens; None if the caller checks the number.

    Returns:
        The budget in the form that policies take: an int for tokens; "auto", or a dict with the key
        "auto" and a dict of its parameters; or a text for bytes, as it was typed.

    Raises:
        InvalidArgumentError: `text` is not a budget, the number is below `least`, or a parameter of
            auto is out of range.
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
        raise wrong(
            "budget",
            "expected a number of tokens such as 4096 or 4k, a share such as 12%, a size such as "
            f"64MiB, or {AUTO}, but got {text!r}",
            "For example, use --budget 4k, or use --policy full to keep all tokens",
        ) from None
    if least is not None:
        require_int("budget", number, least)
    return number


def _auto_parameter(text: str) -> tuple[str, int | float]:
    """Parse one parameter of the budget auto, such as ``most=4k``, into its name and value.

    The parameters are ``least``, ``most`` and ``lost_vote``. The range of a value is not checked.

    Raises:
        InvalidArgumentError: the parameter is unknown or its value is not a number.
    """
    name, _, value = (part.strip() for part in text.partition("="))
    if name in ("least", "most"):
        with contextlib.suppress(InvalidArgumentError):
            return name, count(name, value)
    if name == "lost_vote" and re.fullmatch(r"\d*\.?\d+", value):
        return name, float(value)
    raise wrong(
        "budget",
        "the budget auto can only have the parameters lost_vote, least and most, but got "
        f"{text.strip()!r}",
        "For example, use --budget auto:lost_vote=0.001,most=4k",
    )


def token_budgets(text: str) -> tuple[int | str | dict[str, Any], ...]:
    """Parse at least one budget; several have commas between them, such as 1024,auto,12%.

    Blanks between commas are ignored. A comma before ``NAME=`` belongs to the budget before it.

    Returns:
        The budgets in order, each in the form that `token_budget` returns.

    Raises:
        InvalidArgumentError: there is no budget, one is not a budget, or a number is less than 1.
    """
    if parts := [part for part in re.split(r",(?!\s*\w+=)", text) if part.strip()]:
        return tuple(token_budget(part) for part in parts)
    raise wrong(
        "budget",
        f"expected a list of budgets separated by commas, but got {text!r}",
        "For example, use --budget 1024,4k, --budget auto or --budget 12%,64MiB",
    )


EXACT = "exact"
"""The word on the command line for unquantized storage."""


def storage_bits(text: str) -> tuple[str, ...]:
    """Parse the ways to store keys and values, such as ``exact,int8,k8v4``.

    Returns:
        The words as they were typed, in order; at least one.

    Raises:
        InvalidArgumentError: there is none, one is unknown, or one is repeated.
    """
    words = [part.strip() for part in text.split(",") if part.strip()]
    if not words or len(set(words)) < len(words) or not all(map(_is_storage, words)):
        raise wrong(
            "bits",
            f"expected {EXACT}, int8, int4, or the bits of keys and values such as k8v4, without "
            f"repetitions, but got {text!r}",
            f"For example, use --bits {EXACT},int4",
        )
    return tuple(words)


def one_storage(text: str) -> str | None:
    """Parse a single way to store keys and values, such as exact or int4.

    Returns:
        The word as it was typed; None for exact, which is unquantized.

    Raises:
        InvalidArgumentError: there is none, there are several, or the word is unknown.
    """
    word, *more = storage_bits(text)
    if more:
        raise wrong(
            "bits",
            f"expected one word, such as {EXACT} or int4, but got {text!r}",
            "Run the command once for each of the other words",
        )
    return None if word == EXACT else word


def _is_storage(word: str) -> bool:
    return word == EXACT or code_bits(word) is not None


def byte_count(name: str, text: str, before: str | None = None) -> int:
    """Parse a number of bytes with a unit: GB and G are 10^9 bytes, GiB is 2^30.

    Upper and lower case make no difference. The result is rounded down, and may be 0.

    Args:
        name: the name of the argument, for the error.
        text: the bytes as they were typed.
        before: the part of the command line before the bytes, for the example in the error. None
            stands for the option called `name`.

    Raises:
        InvalidArgumentError: `text` is not a number with a unit.
    """
    form = r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(ib|b?)|b)\s*"
    if found := re.fullmatch(form, text, re.IGNORECASE):
        base = 1024 if (found[3] or "").lower() == "ib" else 1000
        return int(Decimal(found[1]) * base ** _POWERS[(found[2] or "").lower()])
    raise wrong(
        name,
        f"expected a size with a unit, such as 80GB or 24GiB, but got {text!r}",
        f"For example, use {before or f'{_option(name)} '}80GB",
    )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class WholeNumber:
    """A mark for an option that takes a whole number, which may be written as 4k.

    The limits of the mark are checked before the command begins.

    Attributes:
        least: the smallest allowed number; None if the command itself checks the number.
        is_counted: whether the number counts things that take memory or time, and therefore has an
            upper limit.
    """

    least: int | None = None
    is_counted: bool = True

    def read(self, name: str, text: str) -> Any:
        """Parse the text of the option called `name`, and return an int.

        Raises:
            InvalidArgumentError: `text` is not a whole number, or the number is less than `least`
                or more than the upper limit. Without `least`, no limit is checked.
        """
        number = count(name, text)
        if self.least is not None:
            check = require_at_least if self.is_counted else require_int
            check(name, number, self.least)
        return number


POSITIVE = WholeNumber(1, is_counted=False)


@dataclass(frozen=True)
class TokenBudgetParameter(WholeNumber):
    """A mark for an option that takes a budget: a number of tokens, auto, or bytes."""

    least: int | None = 1

    def read(self, name: str, text: str) -> Any:
        """Parse a budget, and return it in the form that `token_budget` returns.

        `name` is not used.

        Raises:
            InvalidArgumentError: `text` is not a budget, or the number is below `least`.
        """
        del name
        return token_budget(text, self.least)


@dataclass(frozen=True)
class ReadingLimit:
    """The largest number of tokens to read, and the seconds after which reading has ended."""

    DEFAULT_SECONDS: ClassVar[int] = 60

    tokens: int
    seconds: int = DEFAULT_SECONDS

    def __str__(self) -> str:
        """Return the limit as it is typed, such as "4096,90s"; the default time is left out."""
        is_default = self.seconds == self.DEFAULT_SECONDS
        return str(self.tokens) if is_default else f"{self.tokens},{self.seconds}s"

    def longer(self, times: float) -> Self:
        """Return a new limit with the same tokens and `1 + times` times as many seconds.

        The seconds are rounded up.
        """
        return replace(self, seconds=math.ceil((1 + times) * self.seconds))


@dataclass(frozen=True)
class ReadingLimitParameter(WholeNumber):
    """A mark for an option that takes a number of tokens to read, and optionally a time: 4k,90s."""

    least: int | None = 1
    is_counted: bool = False

    def read(self, name: str, text: str) -> ReadingLimit:
        """Parse a limit such as 4k or 4k,90s; without a time, it has 60 seconds.

        Raises:
            InvalidArgumentError: the number of tokens or the time is not a positive whole number,
                or the time has more than six digits.
        """
        tokens, comma, time = text.partition(",")
        number = super().read(name, tokens)
        if not comma:
            return ReadingLimit(number)
        if found := re.fullmatch(r"\s*0*([1-9]\d{,5})\s*s\s*", time):
            return ReadingLimit(number, int(found[1]))
        problem = f"expected tokens, or tokens and seconds such as 4k,90s, but got {text!r}"
        raise wrong(name, problem, f"For example, use {_option(name)} 4k,90s")
