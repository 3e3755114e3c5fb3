"""The methods that a command line may name, without importing torch."""

import functools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from snapkv.errors import InvalidArgumentError
from snapkv.validation import DEFAULT, nearest

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


def require_known(texts: Iterable[str]) -> None:
    """Raise if one of the policies in texts, see `specs`, is unknown."""
    for spec in specs(texts):
        known_method(spec.partition(":")[0])


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


def require_parameters(method: str, given: Iterable[tuple[str, Any]]) -> None:
    """Raise unless pairs of a name and a value name parameters of a method, or of what it wraps.

    Which wrapped method has a parameter is checked when they are made.
    """
    own = methods()[method]["parameters"]
    inner = _wrapped_by_default(method)
    known = {*own, *(name for told in methods().values() for name in told["parameters"])}
    known = known if inner else {*own}
    for name, value in given:
        if name.rpartition(".")[2] not in known:
            hints = [name for each in inner or [method] for name in methods()[each]["parameters"]]
            raise unknown_parameter(name, value, inner or [method], hints, own)


def parameters_by_default(method: str) -> dict[str, Any]:
    """The defaults of a method's parameters, with those of the methods that it wraps."""
    names = [method, *_wrapped_by_default(method)] if method != DEFAULT else [method]
    told = [methods()[name]["parameters"] for name in reversed(names)]
    return {name: each["default"] for parameters in told for name, each in parameters.items()}


def _wrapped_by_default(method: str) -> list[str]:
    """The methods that a method wraps, unless others are named; empty if it wraps none."""
    if method == DEFAULT:
        return ["snapkv"]
    own = methods()[method]["parameters"].values()
    return [told["default"] for told in own if told["type"].endswith("Policy")]


def unknown_parameter(
    name: str, value: Any, owners: list[str], hints: list[str], others: Iterable[str] = ()
) -> InvalidArgumentError:
    """The error for a parameter that none of the `owners` has.

    Args:
        name: of the parameter.
        value: given to it.
        owners: names of methods.
        hints: their parameters.
        others: more parameters to suggest.
    """
    return InvalidArgumentError(
        f"{name}: expected a parameter of {' or '.join(owners)}, which has "
        f"{', '.join(hints) or 'none'}, got {name}={value}; leave it out"
        f"{nearest(name, [*hints, *others])}"
    )
