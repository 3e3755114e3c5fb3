"""Checks of values that come from users, and how values read in what is said to them.

Importable without torch, so that options fail at once.
"""

import difflib
import numbers
import operator
import os
import re
from collections.abc import Collection, Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

from snapkv.errors import InvalidArgumentError, InvalidTypeError

DEFAULT_BUDGET = 1024
DEFAULT_WINDOW = 32

DEFAULT = "default"
"""The method of `snapkv.policies.default` by name: `AcrossLayers` around a `SnapKV`."""

SMALL_WINDOW = 16
"""The window of `DEFAULT`."""

AUTO = "auto"
"""A budget that the votes choose."""

LOST_VOTE = 0.0015
LOST_LARGEST_VOTE = 0.004
LEAST_VOTED = 32
"""Of `AutoBudget`."""

DTYPES = ("auto", "float32", "bfloat16", "float16")

DEVICES = (  # noqa: SIM905 # a word each
    "cpu cuda ipu xpu mkldnn opengl opencl ideep hip ve fpga maia xla lazy vulkan mps meta hpu "
    "mtia privateuseone"
).split()
"""What torch may run on; packages may bring more."""

DEFAULT_RECOMPUTE = 0.2
"""The fraction of the tokens of joined documents that is computed again."""

DEFAULT_KERNEL = 7
DEFAULT_DECAY = 0.935
FADING_SINKS = 4

MAX_WINDOW_SIZE = 128
"""The longest window that a server takes by itself: votes cost as much as their window is long."""

MAX_KERNEL_SIZE = 129
"""The widest kernel that a server takes by itself: pooling costs as much as the kernel is wide."""

DEFAULT_EVERY = 128
"""Generated tokens between two evictions from an answer, on a server."""

POOLINGS = ("max", "avg", "fading")
GROUP_REDUCTIONS = ("mean", "max", "sum", "none")
WINDOW_REDUCTIONS = ("mean", "max")

MOST = 2**63 - 1
"""The largest whole number that a tensor holds."""

MOST_COUNTED = 2**24
"""Of what is read, made or repeated one by one."""


def plain_number(value: Any) -> Any:
    """Return a number of numpy or torch as Python's int, float or bool; other values as they are.

    Numbers in a tuple or list become plain, too.
    """
    if type(value) in (bool, int, float, str, type(None)):
        return value
    if type(value) in (tuple, list):
        return type(value)(map(plain_number, value))
    if getattr(value, "ndim", 0):
        return value
    if str(getattr(value, "dtype", "")) in ("bool", "torch.bool"):
        return bool(value)
    try:
        return operator.index(value)
    except TypeError:
        return float(value) if isinstance(value, numbers.Real) else value


def require_at_least(argument: str, value: object, least: int) -> int:
    """Return a number of things to be made or read as an int, or raise if it is out of reason."""
    return require_int(argument, value, least, MOST_COUNTED)


def require_each_at_least(argument: str, values: Collection[int], least: int) -> None:
    """Raise unless there are numbers, each as `require_at_least` wants it."""
    if not values:
        raise InvalidArgumentError(f"{argument}: expected at least one number, got none; pass some")
    require_at_least(argument, min(values), least)
    require_at_least(argument, max(values), least)


def require_budget(budget: Any, keep_ratio: object, window_size: Any, sink_tokens: Any = 0) -> None:
    """Raise unless they say how much of a prompt to keep, its window included."""
    require_int("window_size", window_size, minimum=1)
    require_int("sink_tokens", sink_tokens, minimum=0)
    require_one_limit(budget, keep_ratio)
    if keep_ratio is not None:
        require_ratio("keep_ratio", keep_ratio)
        return
    if isinstance(budget, float) and 0 < budget <= 1:
        raise InvalidTypeError(
            f"budget: expected a number of tokens, got {budget} of type float; pass "
            f"keep_ratio={budget} to keep that share of the prompt before its window"
        )
    # The bounds of an integer are said together below.
    is_integer = type(plain_number(budget)) is int
    require_int("budget", budget, minimum=-MOST if is_integer else window_size + 1)
    if budget <= window_size:
        sinks = f", and at least {window_size + sink_tokens} with sink_tokens={sink_tokens}"
        raise InvalidArgumentError(
            f"budget: expected more than window_size={window_size}{sinks if sink_tokens else ''}, "
            f"since the window is part of the budget, got {budget}; raise budget or lower "
            "window_size"
        )
    if budget < window_size + sink_tokens:
        raise InvalidArgumentError(
            f"budget: expected at least window_size={window_size} + sink_tokens={sink_tokens}, "
            f"since both are part of the budget, got {budget}; raise budget or lower one of them"
        )


def require_one_limit(budget: object, keep_ratio: object) -> None:
    """Raise if both say how much to keep."""
    if keep_ratio is not None and budget is not None:
        raise InvalidArgumentError(
            f"budget and keep_ratio: expected one of them, got budget={budget} and "
            f"keep_ratio={keep_ratio}; leave one out"
        )


def require_auto_budget(
    lost_vote: Any = LOST_VOTE, least: Any = LEAST_VOTED, most: Any = None
) -> None:
    """Raise unless votes can choose by them how much of a prompt to keep."""
    require_fraction("lost_vote", lost_vote, str(LOST_VOTE))
    require_int("least", least, minimum=1)
    if most is not None:
        require_int("most", most, minimum=least + 1)


def require_dtype(name: str) -> None:
    """Raise unless it is "auto", or a dtype that models are run in."""
    if name not in DTYPES:
        raise InvalidArgumentError(
            f"dtype: expected one of {', '.join(DTYPES)}, got {name!r}{nearest(name, DTYPES)}"
        )


def require_device(name: str) -> None:
    """Raise unless it is "auto", or a kind of device that the installed torch may have."""
    kind, colon, number = name.partition(":")
    if name in (AUTO, "cpu"):
        return
    from importlib import metadata  # takes as long as all else that is asked before torch

    known = kind in DEVICES or metadata.entry_points(group="torch.backends")
    lacks = "+cpu" in metadata.version("torch") and kind == "cuda"
    if not known or lacks or (colon and not number.isdecimal()):
        raise InvalidArgumentError(
            f"device: expected auto, cpu or a device that torch {metadata.version('torch')} has, "
            f"such as cuda:0, got {name!r}; pass auto"
        )


def byte_budget(text: str) -> dict[str, float | int] | None:
    """The share, or the bytes, of a budget such as "12%" or "64MiB"; None for another text.

    Raises:
        InvalidArgumentError: a share outside of (0, 100 %], or no bytes.
    """
    form = r"\s*([+-]?\d+(?:\.\d+)?)\s*(?:(%)|([kmgt]?)(i?)b)\s*"
    if (found := re.fullmatch(form, text, re.IGNORECASE)) is None:
        return None
    number, percent, prefix, binary = found.groups()
    amount = Decimal(number)
    if amount <= 0 or (percent and amount > 100):
        raise InvalidArgumentError(
            f"budget: expected a share in (0, 100 %] or a number of bytes, got {text!r}; pass for "
            "instance '12%' or '64MiB'"
        )
    if percent:
        return {"share": float(amount / 100)}
    base = 1024 if binary else 1000
    return {"bytes": int(amount * base ** " kmgt".index(prefix.lower() or " "))}


def code_bits(word: str) -> tuple[int, int] | None:
    """Bits of keys and of values: "int4", or apart as in "K8V4"; None for another word."""
    found = re.fullmatch(r"int([48])|k([48])v([48])", word.lower())
    if found is None:
        return None
    both, keys, values = found.groups()
    return int(keys or both), int(values or both)


def require_pooling(pooling: Any, kernel_size: Any, decay: Any) -> None:
    """Raise unless they say how votes are pooled."""
    require_choice("pooling", pooling, POOLINGS)
    if pooling != "fading" and decay is not None:
        raise InvalidArgumentError(
            f"decay: expected none with pooling={pooling!r}, which does not fade, got {decay!r}; "
            "leave it out, or choose the pooling fading"
        )
    if pooling == "fading" and kernel_size is not None:
        raise InvalidArgumentError(
            f"kernel_size: expected none with pooling='fading', which has a decay instead of a "
            f"width, got {kernel_size!r}; leave it out, or choose the pooling max"
        )
    if kernel_size is not None:
        require_kernel(kernel_size)
    if decay is not None:
        require_fraction("decay", decay, "0.9")


def require_kernel(kernel_size: Any) -> None:
    """Raise unless a pooling window has a middle, or is a pair of how far it reaches."""
    if isinstance(kernel_size, tuple | list):
        if len(kernel_size) != 2:
            raise InvalidArgumentError(
                f"kernel_size: expected a width or a pair (before, after), got {kernel_size!r}; "
                "pass for instance (0, 12)"
            )
        for name, reach in zip(("before", "after"), kernel_size, strict=True):
            require_int(f"kernel_size, {name}", reach, minimum=0)
        return
    require_int("kernel_size", kernel_size, minimum=1)
    if kernel_size % 2 == 0:
        raise InvalidArgumentError(
            f"kernel_size: expected an odd number, so that a position stays in the middle of "
            f"its cluster, got {kernel_size}; pass {kernel_size + 1}, or a pair (before, after)"
        )


def require_int(argument: str, value: object, minimum: int, maximum: int | None = MOST) -> int:
    """Return `value` as an int, or raise unless it is an integer between `minimum` and `maximum`.

    Integers of numpy are accepted, and whatever else can be an index; what keeps one keeps what is
    returned.

    Raises:
        InvalidTypeError: no integer, or a truth value.
        InvalidArgumentError: an integer that is too small or too large.
    """
    value = plain_number(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidTypeError(
            f"{argument}: expected an integer, got {value!r} of type {type(value).__name__}; "
            f"pass a whole number of at least {minimum}"
        )
    if value < minimum:
        raise InvalidArgumentError(
            f"{argument}: expected at least {minimum}, got {value}; pass a larger number"
        )
    if maximum is not None and value > maximum:
        raise InvalidArgumentError(
            f"{argument}: expected at most {maximum:,}, got {value:,}; pass a smaller number"
        )
    return value


def require_ratio(argument: str, value: object) -> float:
    """Return a number in (0, 1] as a plain one, or raise."""
    return _require_number(argument, value, "(0, 1]", "0.25", ends=(1,))


def require_share(argument: str, value: object, example: str) -> float:
    """Return a number in [0, 1] as a plain one, or raise."""
    return _require_number(argument, value, "[0, 1]", example, ends=(0, 1))


def require_fraction(argument: str, value: object, example: str) -> float:
    """Return a number in (0, 1) as a plain one, or raise."""
    return _require_number(argument, value, "(0, 1)", example, ends=())


def _require_number(
    argument: str, value: object, interval: str, example: str, ends: tuple[int, ...]
) -> float:
    value = plain_number(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidTypeError(
            f"{argument}: expected a number in {interval}, got {value!r} of type "
            f"{type(value).__name__}; pass a fraction such as {example}"
        )
    if not (0 < value < 1 or value in ends):
        raise InvalidArgumentError(
            f"{argument}: expected a number in {interval}, got {value}; pass a fraction such as "
            f"{example}"
        )
    return value


def path_of(argument: str, value: object) -> Path:
    """The path that `value` is, or names."""
    if not isinstance(value, str | os.PathLike):
        raise InvalidTypeError(
            f"{argument}: expected a path, got {value!r} of type {type(value).__name__}; pass a "
            "text or a Path"
        )
    if "\0" in str(value):
        raise InvalidArgumentError(
            f"{argument}: expected a path without NUL bytes, got {value!r}; leave them out"
        )
    return Path(value)


def require_choice(argument: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        raise InvalidArgumentError(
            f"{argument}: expected one of {', '.join(choices)}, got {value!r}; pass one of them"
        )


def printable(name: str) -> str:
    """The name of a file in UTF-8, with other bytes, which no tokenizer takes, escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def without_controls(text: str) -> str:
    """The text with control characters escaped, which a terminal would obey; lines stay lines."""
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def nearest(name: str, candidates: Iterable[str]) -> str:
    """The candidates most like `name`, as the end of an error message; empty where none is."""
    others = (candidate for candidate in candidates if candidate != name)
    by_lower_case = {candidate.lower(): candidate for candidate in others}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=3)
    if not close:
        return ""
    return f"; did you mean {' or '.join(_on_a_line(by_lower_case[match]) for match in close)}?"


def _on_a_line(name: str) -> str:
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in name)


def first_line(error: Exception) -> str:
    """The first line of a message that may be a page long, or empty."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def format_bytes(count: float) -> str:
    """Bytes with a binary unit, such as "22.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
