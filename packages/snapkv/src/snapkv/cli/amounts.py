"""Amounts as people write them: 4096, 4k or 1.5k tokens; 80GB, 24GiB or 128kb of memory."""

import contextlib
import re
from decimal import Decimal
from typing import Any

from snapkv.errors import InvalidArgumentError
from snapkv.validation import AUTO, require_int

_PREFIXES = " kmgt"


def count(name: str, text: str, before: str | None = None) -> int:
    """A whole number; 4k stands for 4096, 1.5k for 1536, 1m for 1048576.

    Args:
        name: what it is of.
        text: the number.
        before: what stands right before it on a command line; None for the option of that name.

    Raises:
        InvalidArgumentError: something else, or a part of one.
    """
    return _count(name, text, "a whole number such as 4096, 4k or 1.5k", before)


def counts(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them, see `count`.

    Raises:
        InvalidArgumentError: something else.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return tuple(_count(name, part, "items of type int with commas between them") for part in parts)


def kernel(text: str) -> int | tuple[int, int]:
    """A pooling kernel: a width such as 7, or how far it reaches before and behind, as 0+12.

    Raises:
        InvalidArgumentError: something else.
    """
    found = re.fullmatch(r"\s*(-?\d+)\s*(?:\+\s*(\d+))?\s*", text)
    if found is None:
        raise InvalidArgumentError(
            f"kernel_size: expected a width such as 7, or how far before and behind as 0+12, got "
            f"{text!r}; write for instance --kernel-size 0+12"
        )
    return int(found[1]) if found[2] is None else (int(found[1]), int(found[2]))


def token_budget(text: str) -> int | str | dict[str, Any]:
    """A budget: a whole number of at least 1, auto, or auto with parameters: auto:most=4k.

    Raises:
        InvalidArgumentError: something else.
    """
    word, _, rest = text.strip().partition(":")
    if word != AUTO:
        try:
            number = count("budget", text)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{error} or --budget {AUTO}") from None
        require_int("budget", number, 1)
        return number
    given = dict(_auto_parameter(part) for part in rest.split(",") if part.strip())
    return {AUTO: given} if given else AUTO


def token_budgets(text: str) -> tuple[int | str | dict[str, Any], ...]:
    """Budgets with commas between them, see `token_budget`.

    Raises:
        InvalidArgumentError: something else, or none.
    """
    parts = [part for part in re.split(r",(?!\s*\w+=)", text) if part.strip()]
    if not parts:
        raise InvalidArgumentError(
            f"budget: expected numbers of tokens with commas between them, got {text!r}; write for "
            "instance --budget 1024,4k or --budget auto"
        )
    return tuple(token_budget(part) for part in parts)


def shares(name: str, text: str) -> tuple[float, ...]:
    """Shares of a cache with commas between them, each a fraction such as 0.125 or a ratio: 8:1.

    Raises:
        InvalidArgumentError: something else, none, one that is not below 1, or one twice.
    """
    found = [_share(name, part.strip()) for part in text.split(",") if part.strip()]
    if not found or len(set(found)) < len(found):
        raise InvalidArgumentError(
            f"{name}: expected shares of the cache with commas between them, each once, got "
            f"{text!r}; write for instance --{name.replace('_', '-')} 0.5,0.25 or 8:1,16:1"
        )
    return tuple(found)


def _share(name: str, text: str) -> float:
    number = r"\d+(?:\.\d+)?|\.\d+"
    if parts := re.fullmatch(rf"({number})(?::({number}))?", text):
        whole, kept = float(parts[1]), float(parts[2] or 0)
        share = whole if parts[2] is None else kept / whole if whole else 0.0
        if 0 < share < 1:
            return share
    raise InvalidArgumentError(
        f"{name}: expected a fraction between 0 and 1 that is kept, such as 0.125, or how many "
        f"times smaller the cache gets, such as 8:1, got {text!r}; pass one of these"
    )


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


def byte_count(name: str, text: str) -> int:
    """Bytes with a unit: GB and G are 10^9 of them, GiB 2^30.

    Raises:
        InvalidArgumentError: something else.
    """
    found = _parted(text)
    if found is None or not (found[1] or found[3]):
        hint = f"{text.strip()}{_likely_unit(found[0])}" if found else "80GB"
        raise InvalidArgumentError(
            f"{name}: expected bytes with a unit, such as 80GB or 24GiB, got {text!r}; write for "
            f"instance {_option(name)} {hint}"
        )
    number, prefix, binary, _ = found
    return int(number * (1024 if binary else 1000) ** _PREFIXES.index(prefix or " "))


def _likely_unit(number: Decimal) -> str:
    """What a machine has so many of."""
    return "GB" if number < 1 << 10 else "MB" if number < 1 << 20 else "B"


def _count(name: str, text: str, expected: str, before: str | None = None) -> int:
    found, sign = _parted(text.strip().removeprefix("-")), -1 if text.strip()[:1] == "-" else 1
    hint = "4k"
    if found is not None:
        number, prefix, binary, byte = found
        if prefix in ("", "k", "m"):
            whole = number * 1024 ** _PREFIXES.index(prefix or " ")
            is_count = not binary and not byte and (prefix or "." not in text)
            if is_count and whole == int(whole):
                return sign * int(whole)
            hint = f"{number}{prefix}" if whole == int(whole) and prefix else f"{round(whole)}"
    example = f"{before or f'{_option(name)} '}{hint}"
    raise InvalidArgumentError(
        f"{name}: expected {expected}, got {text!r}; write for instance {example}"
    )


def _parted(text: str) -> tuple[Decimal, str, bool, bool] | None:
    """Number, prefix, whether that is binary, and whether bytes are meant; None for others."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)\s*", text, re.IGNORECASE)
    if found is None or (found[3] and not found[4]):
        return None
    return Decimal(found[1]), found[2].lower(), bool(found[3]), bool(found[4])


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
