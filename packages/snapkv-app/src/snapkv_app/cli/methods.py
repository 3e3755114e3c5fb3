"""The methods that a command line may name, without importing torch."""

import contextlib
import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from snapkv.errors import InvalidArgumentError
from snapkv.validation import (
    AUTO,
    DEFAULT,
    FADING_SINKS,
    SMALL_WINDOW,
    nearest,
    require_budget,
    require_choice,
    require_int,
    require_pooling,
)
from snapkv_app.cli.amounts import count, kernel, token_budget

RECORD = Path(__file__).with_name("methods.json")
"""Written by `python -m tests.cli.methods` from the classes; a test compares both."""


@functools.cache
def methods() -> dict[str, dict[str, Any]]:
    """For every method by name: its `class`, `summary` and `parameters`.

    Each parameter has a `type` and a `default`, as written on a command line.
    """
    found: dict[str, dict[str, Any]] = json.loads(RECORD.read_text("utf-8"))
    return found


def known_method(name: str, argument: str = "policy") -> str:
    """The name of a method, given as its name or its class; anything else is refused."""
    if name in methods():
        return name
    of_class = {told["class"]: own for own, told in methods().items()}
    if name in of_class:
        return of_class[name]
    raise InvalidArgumentError(
        f"{argument}: expected one of {', '.join(methods())}, got {name!r}"
        f"{nearest(name, methods()) or '; see snapkv policies, and --set for parameters'}"
    )


def specs(texts: Iterable[str]) -> list[str]:
    """The policies in texts as ``snapkv:kernel_size=13,pooling=avg,h2o``; "none" names none."""
    parts = [part for text in texts for part in re.split(r",(?!\s*[\w.-]+=)", text)]
    return [part.strip() for part in parts if part.strip() not in ("", "none")]


def assignments(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Split ``NAME=VALUE`` texts into names, as Python writes them, and values."""
    found = []
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals):
            raise InvalidArgumentError(
                f"set: expected NAME=VALUE, got {text!r}; write for instance --set seed=1"
            )
        found.append((name.replace("-", "_"), value))
    return found


@dataclass(frozen=True)
class Chosen:
    """A method, its own parameters, and the methods that it wraps by the parameters they are."""

    method: str
    own: dict[str, Any]
    parts: dict[str, "Chosen"]


def chosen(name: str, given: Mapping[str, Any]) -> Chosen:
    """Choose a method; parameters that a wrapper lacks go to the methods that it wraps.

    Every wrapped method that has a parameter gets it; ``part.parameter`` reaches only one of them.

    Raises:
        InvalidArgumentError: a parameter that none of them has.
    """
    known, parts = parameters(name), wrapped(name, given)
    own: dict[str, Any] = {}
    meant: dict[str, dict[str, Any]] = {part: {} for part in parts}
    for key, value in given.items():
        part, _, rest = key.partition(".")
        takers = [part for part, method in parts.items() if key in accepted(method)]
        if key in known:
            own[key] = value
        elif rest and part in parts:
            meant[part][rest] = value
        elif takers:
            for taker in takers:
                meant[taker][key] = value
        else:
            raise _unknown_parameter(key, value, list(parts.values()) or [name], known)
    inner = {part: chosen(method, meant[part]) for part, method in parts.items()}
    return Chosen(_of_record(name), own, inner)


def parameters(name: str) -> dict[str, Any]:
    """The `type` and `default` of every own parameter of a method."""
    found: dict[str, Any] = methods()[_of_record(name)]["parameters"]
    return found


def _of_record(name: str) -> str:
    """The name of a method under which its own parameters are recorded."""
    return "across-layers" if name == DEFAULT else known_method(name)


def wrapped(name: str, given: Mapping[str, Any] = MappingProxyType({})) -> dict[str, str]:
    """The parameters of a method that are methods, with the name of the method each one gets."""
    return {
        part: str(given.get(part, told["default"]))
        for part, told in parameters(name).items()
        if told["type"].endswith("Policy")
    }


def accepted(name: str, given: Mapping[str, Any] = MappingProxyType({})) -> list[str]:
    """Parameters of a method and of the methods it wraps."""
    parts = wrapped(name, given).values()
    return [*parameters(name), *(key for part in parts for key in accepted(part))]


def takes_budget(name: str, given: Iterable[str]) -> bool:
    """Whether a policy takes a budget and these parameters do not set it."""
    own = {parameter.rpartition(".")[2] for parameter in given}
    return "budget" in accepted(name) and not own & {"budget", "keep_ratio"}


def parsed(spec: str) -> tuple[str, dict[str, Any]]:
    """Split a text into the name of a policy and its parameters."""
    name, _, rest = spec.partition(":")
    given = [part for part in rest.split(",") if part.strip()]
    if not all("=" in part for part in given):
        raise InvalidArgumentError(
            f"policy: expected NAME or NAME:PARAMETER=VALUE,PARAMETER=VALUE, got {spec!r}; "
            "write for instance snapkv:kernel_size=13"
        )
    return name, typed_assignments(name, given)


def typed_assignments(
    name: str, texts: Iterable[str], own: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """A method's own parameters, and those from ``NAME=VALUE`` texts, converted to their types."""
    owners = [*methods(), *inner.values(), name] if (inner := wrapped(name)) else [name]
    kinds = {key: told["type"] for each in owners for key, told in parameters(each).items()}
    given = dict(own)
    for parameter, text in assignments(texts):
        if parameter in given:
            raise InvalidArgumentError(
                f"{parameter}: expected it once, got {given[parameter]} and {text}; leave one out"
            )
        given[parameter] = _typed(text, kinds.get(parameter.rpartition(".")[2], ""))
    return given


def _typed(text: str, kind: str) -> Any:
    """The text converted to a parameter's type; if that fails, the method reports it."""
    kinds = kind.split(" or ")
    if text.startswith(f"{AUTO}:"):
        return token_budget(text)
    if "bool" in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    with contextlib.suppress(ValueError):  # InvalidArgumentError included
        if "int" in kinds:
            return count("set", text)
    with contextlib.suppress(ValueError):
        if "float" in kinds:
            return float(text)
    return kernel(text) if any(each.startswith(("pair ", "tuple ")) for each in kinds) else text


def require_values(name: str, given: Mapping[str, Any]) -> None:
    """Refuse wrong parameters of a method before torch is imported.

    The method refuses them, too, and those that are not checked here.
    """
    if name == DEFAULT:  # as `snapkv.policies.default.default_parameters`, which imports torch
        pooling = {} if given.get("kernel_size") is not None else {"pooling": "fading"}
        given = {"window_size": SMALL_WINDOW, **pooling, **given}
    _require_values(chosen(name, given))


def _require_values(found: Chosen) -> None:
    known, given = parameters(found.method), found.own
    values = {name: told["default"] for name, told in known.items()} | given
    for name, told in known.items():
        if ", " in told["type"]:
            require_choice(name, values[name], tuple(told["type"].split(", ")))
    if "pooling" in known:
        require_pooling(values["pooling"], given.get("kernel_size"), given.get("decay"))
    if given.get("keep_ratio") is not None:
        require_budget(given.get("budget"), given["keep_ratio"], 1)
    elif isinstance(values.get("budget"), int):
        if "window_size" in known:
            fades = values.get("pooling") == "fading" and given.get("sink_tokens") is None
            sinks = FADING_SINKS if fades else values.get("sink_tokens") or 0
            require_budget(values["budget"], None, values["window_size"], sinks)
        else:
            require_int("budget", values["budget"], 1)
    for inner in found.parts.values():
        _require_values(inner)


def _unknown_parameter(
    name: str, value: Any, owners: list[str], others: Iterable[str]
) -> InvalidArgumentError:
    """The error for a parameter that none of the `owners` has; it may resemble one of `others`."""
    hints = list(dict.fromkeys(hint for owner in owners for hint in accepted(owner)))
    return InvalidArgumentError(
        f"{name}: expected a parameter of {' or '.join(owners)}, which has "
        f"{', '.join(hints) or 'none'}, got {name}={value}; leave it out"
        f"{nearest(name, [*hints, *others])}"
    )
