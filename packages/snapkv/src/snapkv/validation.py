"""Checks of values that come from users, and the formatting of values in messages.

This module can be imported without torch, so that a wrong option is refused at once.
"""

import difflib
import numbers
import operator
import os
import re
from collections.abc import Collection, Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from snapkv.errors import InvalidTypeError, wrong

DEFAULT_BUDGET = 1024
DEFAULT_WINDOW = 32

DEFAULT = "default"
"""The name of the default method of `snapkv.policies.default`: `AcrossLayers` around `SnapKV`."""

SMALL_WINDOW = 16
"""The window size of `DEFAULT`, unless its budget is small, see `default_window`."""

SMALL_BUDGET, SMALL_SHARE = 64, 1 / 16
"""The number of tokens and the share of the bytes below which a budget of `DEFAULT` is small."""

AUTO = "auto"
"""The name of a budget that the votes choose."""

LOST_VOTE = 0.0015
LOST_LARGEST_VOTE = 0.004
LEAST_VOTED = 32
"""The default number of positions that `AutoBudget` always keeps beside the window."""

DTYPES = ("auto", "float32", "bfloat16", "float16")

DEVICES = (  # noqa: SIM905 # a word each
    "cpu cuda ipu xpu mkldnn opengl opencl ideep hip ve fpga maia xla lazy vulkan mps meta hpu "
    "mtia privateuseone"
).split()
"""The device types that torch knows; packages may add others."""

DEFAULT_RECOMPUTE = 0.2
"""The fraction of the tokens of joined documents that is computed again."""

DEFAULT_KERNEL = 7
DEFAULT_DECAY = 0.935
FADING_SINKS = 4

MAX_WINDOW_SIZE = 128
"""The longest window that a server accepts by default; the cost of votes grows with the window."""

MAX_KERNEL_SIZE = 129
"""The widest kernel that a server accepts by default; the cost of pooling grows with the kernel."""

DEFAULT_EVERY = 128
"""How many tokens a server generates between two evictions from an answer."""

POOLINGS = ("max", "avg", "fading")
GROUP_REDUCTIONS = ("mean", "max", "sum", "none")
WINDOW_REDUCTIONS = ("mean", "max")

MOST = 2**63 - 1
"""The largest integer that a tensor holds."""

MOST_COUNTED = 2**24
"""The largest count of things that are read, built or repeated one by one."""


def plain_number(value: Any) -> Any:
    """Convert a number of numpy or torch to a Python int, float or bool.

    Numbers in a tuple or list are converted, too, and the result is a new tuple or list. Anything
    else is returned unchanged: arrays and tensors with an axis, and objects that are no numbers.
    """
    if type(value) in (bool, int, float, str, type(None)):
        return value
    if type(value) in (tuple, list):
        return type(value)(map(plain_number, value))
    if getattr(value, "ndim", 0):
        return value
    if hasattr(value, "dtype") and hasattr(value, "item"):
        return value.item()
    try:
        return operator.index(value)
    except TypeError:
        return float(value) if isinstance(value, numbers.Real) else value


def require_at_least(argument: str, value: object, least: int) -> int:
    """Return `value` as an int, or raise unless it is between `least` and `MOST_COUNTED`.

    Raises:
        InvalidTypeError: `value` is not an integer.
        InvalidArgumentError: `value` is out of range.
    """
    return require_int(argument, value, least, MOST_COUNTED)


def require_each_at_least(argument: str, values: Collection[int], least: int) -> None:
    """Raise unless there is at least one value, and each is from `least` to `MOST_COUNTED`.

    Raises:
        InvalidTypeError: a value is no integer.
        InvalidArgumentError: there is no value, or one is out of range.
    """
    if not values:
        raise wrong(argument, "expected at least one number, but got none", "Use at least one")
    for value in values:
        require_at_least(argument, value, least)


def require_budget(budget: Any, keep_ratio: object, window_size: Any, sink_tokens: Any = 0) -> None:
    """Raise unless exactly one limit is given and holds the window and the sinks.

    Args:
        budget: tokens to keep, window included; None if `keep_ratio` is given. It must be larger
            than `window_size`, and at least ``window_size + sink_tokens``.
        keep_ratio: the fraction of the prefix to keep, in (0, 1], or None.
        window_size: tokens of the window, at least 1.
        sink_tokens: first tokens that are always kept, at least 0.

    Raises:
        InvalidTypeError: a value has the wrong type, or both limits are None.
        InvalidArgumentError: a value is out of range, both limits are given, or the budget is too
            small.
    """
    require_int("window_size", window_size, minimum=1)
    require_int("sink_tokens", sink_tokens, minimum=0)
    require_one_limit(budget, keep_ratio)
    if keep_ratio is not None:
        require_ratio("keep_ratio", keep_ratio)
        return
    if isinstance(budget, float) and 0 < budget <= 1:
        remedy = f"Use keep_ratio={budget} to keep this fraction of the prompt before the window"
        problem = f"expected a number of tokens, but got {budget} of type float"
        raise wrong("budget", problem, remedy, InvalidTypeError)
    # An integer that is too small gets the message below, which names the window and the sinks.
    is_integer = type(plain_number(budget)) is int
    require_int("budget", budget, minimum=-MOST if is_integer else window_size + 1)
    least = f"window_size={window_size}" + f" + sink_tokens={sink_tokens}" * bool(sink_tokens)
    remedy = f"Increase budget, or reduce window_size{' or sink_tokens' if sink_tokens else ''}"
    if budget <= window_size:
        sinks = f" and at least {window_size + sink_tokens} with sinks" * bool(sink_tokens)
        problem = f"expected a value above window_size={window_size}{sinks}, but got {budget}"
        raise wrong("budget", problem, remedy)
    if budget < window_size + sink_tokens:
        problem = f"expected at least {least}, which are part of the budget, but got {budget}"
        raise wrong("budget", problem, remedy)


def require_one_limit(budget: object, keep_ratio: object) -> None:
    """Raise if both `budget` and `keep_ratio` are given; both may be None.

    Raises:
        InvalidArgumentError: neither of them is None.
    """
    if keep_ratio is not None and budget is not None:
        problem = f"only one can be set, but got budget={budget} and keep_ratio={keep_ratio}"
        raise wrong("budget and keep_ratio", problem, "Remove one of the two arguments")


def require_auto_budget(
    lost_vote: Any = LOST_VOTE, least: Any = LEAST_VOTED, most: Any = None
) -> None:
    """Raise unless the parameters of an `AutoBudget` are in range.

    Args:
        lost_vote: must be a number in (0, 1).
        least: must be an integer of at least 1.
        most: must be None or an integer larger than `least`.

    Raises:
        InvalidTypeError: a value has the wrong type.
        InvalidArgumentError: a value is out of range.
    """
    require_fraction("lost_vote", lost_vote, str(LOST_VOTE))
    require_int("least", least, minimum=1)
    if most is not None:
        require_int("most", most, minimum=least + 1)


def require_dtype(name: str) -> None:
    """Raise unless `name` is the name of a dtype in which a model can be loaded, or "auto".

    Raises:
        InvalidArgumentError: `name` is not one of `DTYPES`.
    """
    if name not in DTYPES:
        problem = f"expected one of {', '.join(DTYPES)}, but got {name!r}"
        raise wrong("dtype", problem, f"For example, use {closest(name, DTYPES) or 'auto'}")


def require_device(name: str) -> None:
    """Raise unless `name` is "auto" or a device that the installed torch may have.

    Whether this machine has the device is not checked. If a package that adds devices to torch is
    installed, every type of device is accepted.

    Args:
        name: a type of device, or a type with an index, such as "cuda:0".

    Raises:
        InvalidArgumentError: torch knows no device of this type, the index is no number, or it is a
            CUDA device and torch was built for CPUs only.
    """
    device_type, colon, number = name.partition(":")
    if name in (AUTO, "cpu"):
        return
    from importlib import metadata  # takes as long as all other checks before torch

    known = device_type in DEVICES or metadata.entry_points(group="torch.backends")
    lacks = "+cpu" in metadata.version("torch") and device_type == "cuda"
    if not known or lacks or (colon and not number.isdecimal()):
        release = metadata.version("torch")
        problem = f"expected auto, cpu or a device that torch {release} supports, but got {name!r}"
        raise wrong("device", problem, "For example, use auto or cpu")


def byte_budget(text: str) -> dict[str, float | int] | None:
    """Parse a budget that is written as a percentage or as a number of bytes.

    Args:
        text: the budget, such as "12%" or "64MiB", in upper or lower case. KiB is 1024 bytes, and
            kB is 1000 bytes.

    Returns:
        A dictionary, {"share": float} such as 0.12, or {"bytes": int}; None if `text` has another
        form.

    Raises:
        InvalidArgumentError: the percentage is not in (0, 100], or the number of bytes is not
            positive.
    """
    form = r"\s*([+-]?\d+(?:\.\d+)?)\s*(?:(%)|([kmgt]?)(i?)b)\s*"
    if (found := re.fullmatch(form, text, re.IGNORECASE)) is None:
        return None
    number, percent, prefix, binary = found.groups()
    amount = Decimal(number)
    if amount <= 0 or (percent and amount > 100):
        problem = f"expected a percentage in (0, 100] or a positive size in bytes, but got {text!r}"
        raise wrong("budget", problem, "For example, use '12%' or '64MiB'")
    if percent:
        return {"share": float(amount / 100)}
    base = 1024 if binary else 1000
    return {"bytes": int(amount * base ** " kmgt".index(prefix.lower() or " "))}


def default_window(given: Mapping[str, Any], share: float | None = None) -> dict[str, int]:
    """Return the parameters of `DEFAULT` that depend on its budget.

    A small budget would consist of little else than a window of 16 tokens and 4 sinks. So only the
    last 2 tokens and 1 sink are always kept of it. The 16 tokens before these 2 still vote, but
    they compete with all other tokens.

    Args:
        given: the parameters that the user has set. If the window is among them, the budget does
            not matter.
        share: the share of the bytes, if the budget is one.

    Returns:
        "window_size", and also "sink_tokens" and "voters" for a small budget.
    """
    budget = plain_number(given.get("budget"))
    is_small = budget < SMALL_BUDGET if isinstance(budget, int) else (share or 1.0) < SMALL_SHARE
    if is_small and "window_size" not in given:
        return {"window_size": 2, "sink_tokens": 1, "voters": 2 + SMALL_WINDOW}
    return {"window_size": SMALL_WINDOW}


def code_bits(word: str) -> tuple[int, int] | None:
    """Parse a word such as "int4" or "K8V4" that says in how many bits keys and values are stored.

    Returns:
        The bits of a key and of a value, each 4 or 8; None if `word` has another form. Case does
        not matter.
    """
    found = re.fullmatch(r"int([48])|k([48])v([48])", word.lower())
    if found is None:
        return None
    both, keys, values = found.groups()
    return int(keys or both), int(values or both)


def require_pooling(pooling: Any, kernel_size: Any, decay: Any) -> None:
    """Raise unless the parameters say without contradiction how votes are pooled.

    Args:
        pooling: must be one of `POOLINGS`.
        kernel_size: None, or as in `require_kernel`; must be None with "fading".
        decay: None, or a number in (0, 1); must be None without "fading".

    Raises:
        InvalidTypeError: a value has the wrong type.
        InvalidArgumentError: a value is out of range, or two parameters contradict each other.
    """
    require_choice("pooling", pooling, POOLINGS)
    if pooling != "fading" and decay is not None:
        problem = f"this argument cannot be used with pooling={pooling!r}, but got {decay!r}"
        raise wrong("decay", problem, "Remove decay, or set pooling='fading'")
    if pooling == "fading" and kernel_size is not None:
        problem = f"this argument cannot be used with pooling='fading', but got {kernel_size!r}"
        raise wrong("kernel_size", problem, "Remove kernel_size, or set pooling='max'")
    if kernel_size is not None:
        require_kernel(kernel_size)
    if decay is not None:
        require_fraction("decay", decay, "0.9")


def require_kernel(kernel_size: Any) -> None:
    """Raise unless `kernel_size` is an odd width or a pair of reaches, each of them an integer.

    Args:
        kernel_size: a width of at least 1, or a tuple or list of two numbers of at least 0: how far
            the kernel reaches before and after its own position.

    Raises:
        InvalidTypeError: it holds something that is no integer.
        InvalidArgumentError: the width is even, a number is out of range, or there are not two of
            them.
    """
    if isinstance(kernel_size, tuple | list):
        if len(kernel_size) != 2:
            problem = f"expected an integer or a pair (before, after), but got {kernel_size!r}"
            raise wrong("kernel_size", problem, "For example, use (0, 12)")
        for name, reach in zip(("before", "after"), kernel_size, strict=True):
            require_int(f"kernel_size, {name}", reach, minimum=0)
        return
    require_int("kernel_size", kernel_size, minimum=1)
    if kernel_size % 2 == 0:
        problem = f"the value must be an odd number, but got {kernel_size}"
        raise wrong("kernel_size", problem, f"Use {kernel_size + 1}, or use a pair (before, after)")


def require_int(argument: str, value: object, minimum: int, maximum: int | None = MOST) -> int:
    """Return `value` as an int, or raise unless it is an integer between `minimum` and `maximum`.

    Both bounds are allowed values. Integers of numpy are accepted, and everything else that can be
    an index, such as a tensor with one integer. The caller must use the returned number and not
    `value`.

    Args:
        argument: the name of the argument, for the message.
        value: what the user passed.
        minimum: the smallest allowed value.
        maximum: the largest allowed value; None for no limit.

    Raises:
        InvalidTypeError: `value` is no integer, or a bool.
        InvalidArgumentError: `value` is too small or too large.
    """
    value = plain_number(value)
    if isinstance(value, bool) or not isinstance(value, int):
        problem = f"expected an integer, but got {value!r} of type {type(value).__name__}"
        remedy = f"Use an integer of at least {minimum}"
        raise wrong(argument, problem, remedy, InvalidTypeError)
    if value < minimum:
        problem = f"expected a value of at least {minimum}, but got {value}"
        raise wrong(argument, problem, "Use a larger value")
    if maximum is not None and value > maximum:
        problem = f"expected a value of at most {maximum:,}, but got {value:,}"
        raise wrong(argument, problem, "Use a smaller value")
    return value


def require_ratio(argument: str, value: object) -> float:
    """Return `value` as a Python number, or raise unless it is in (0, 1].

    Raises:
        InvalidTypeError: `value` is no number, or a bool.
        InvalidArgumentError: `value` is out of range or NaN.
    """
    return _require_number(argument, value, "(0, 1]", "0.25", ends=(1,))


def require_share(argument: str, value: object, example: str) -> float:
    """Return `value` as a Python number, or raise unless it is in [0, 1].

    Args:
        argument: the name of the argument, for the message.
        value: what the user passed.
        example: a valid number, for the message.

    Raises:
        InvalidTypeError: `value` is no number, or a bool.
        InvalidArgumentError: `value` is out of range or NaN.
    """
    return _require_number(argument, value, "[0, 1]", example, ends=(0, 1))


def require_fraction(argument: str, value: object, example: str) -> float:
    """Return `value` as a Python number, or raise unless it is in (0, 1).

    Args:
        argument: the name of the argument, for the message.
        value: what the user passed.
        example: a valid number, for the message.

    Raises:
        InvalidTypeError: `value` is no number, or a bool.
        InvalidArgumentError: `value` is out of range or NaN.
    """
    return _require_number(argument, value, "(0, 1)", example, ends=())


def _require_number(
    argument: str, value: object, interval: str, example: str, ends: tuple[int, ...]
) -> float:
    """Return `value` as a Python number, or raise unless it is between 0 and 1 or one of `ends`.

    Args:
        argument: the name of the argument, for the message.
        value: what the user passed.
        interval: the allowed numbers, for the message.
        example: a valid number, for the message.
        ends: which of 0 and 1 are allowed, too.

    Raises:
        InvalidTypeError: `value` is no number, or a bool.
        InvalidArgumentError: `value` is out of range or NaN.
    """
    value, remedy = plain_number(value), f"Use a fraction such as {example}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        got = f"{value!r} of type {type(value).__name__}"
        problem = f"expected a number in {interval}, but got {got}"
        raise wrong(argument, problem, remedy, InvalidTypeError)
    if not (0 < value < 1 or value in ends):
        raise wrong(argument, f"expected a number in {interval}, but got {value}", remedy)
    return value


def path_of(argument: str, value: object) -> Path:
    """Convert `value` to a path, without checking whether anything exists there.

    Raises:
        InvalidTypeError: `value` is neither a string nor a path.
        InvalidArgumentError: `value` holds a NUL byte.
    """
    if not isinstance(value, str | os.PathLike):
        problem = f"expected a path, but got {value!r} of type {type(value).__name__}"
        raise wrong(argument, problem, "Use a string or a Path object", InvalidTypeError)
    if "\0" in str(value):
        problem = f"a path cannot contain NUL bytes, but got {value!r}"
        raise wrong(argument, problem, "Remove these bytes from the path")
    return Path(value)


def require_choice(argument: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise unless `value` is one of `choices`.

    Raises:
        InvalidArgumentError: `value` is none of them, whatever its type.
    """
    if value not in choices:
        problem = f"expected one of {', '.join(choices)}, but got {value!r}"
        raise wrong(argument, problem, "Use one of these values")


def printable(name: str) -> str:
    r"""Return a file name as text that can be encoded in UTF-8.

    Bytes of the name that are not UTF-8 become escapes such as ``\xff``. Python holds them as lone
    surrogates, which tokenizers refuse.
    """
    return os.fsencode(name).decode("utf-8", "backslashreplace")


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def without_controls(text: str) -> str:
    """Return the text with its control characters escaped, because a terminal would obey them.

    Line feeds and tabs stay. Carriage returns are escaped.
    """
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def nearest(name: str, candidates: Iterable[str], otherwise: str) -> str:
    """Suggest similar names for a name that is not known, as the remedy of an error.

    Returns:
        "Did you mean ...?" with at most three candidates that are like `name`, or `otherwise` if
        none is.
    """
    close = closest(name, candidates)
    return f"Did you mean {close}?" if close else otherwise


def closest(name: str, candidates: Iterable[str]) -> str:
    """Return the candidates that are most like `name`, joined by " or ".

    Case is ignored, and `name` itself is left out. Characters that cannot be printed are escaped.

    Returns:
        At most three candidates, the most similar first; an empty string if none is similar.
    """
    others = (candidate for candidate in candidates if candidate != name)
    by_lower_case = {candidate.lower(): candidate for candidate in others}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=3)
    return " or ".join(_on_a_line(by_lower_case[match]) for match in close)


def _on_a_line(name: str) -> str:
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in name)


def first_line(error: Exception) -> str:
    """Return the first line of the error's message that is not blank, or the name of its class."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def format_bytes(count: float) -> str:
    """Format a number of bytes with a binary unit, such as "512 B" or "22.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
