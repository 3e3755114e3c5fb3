"""The methods and parameters that a command line may name, known without importing torch."""

import contextlib
import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from snapkv.errors import SnapKVError, wrong
from snapkv.validation import (
    AUTO,
    DEFAULT,
    FADING_SINKS,
    default_window,
    nearest,
    require_budget,
    require_choice,
    require_int,
    require_pooling,
)
from snapkv_app.cli.amounts import count, kernel, token_budget

RECORD = Path(__file__).with_name("methods.json")
"""The file that `python -m tests.cli.methods` writes; a test compares it with the classes."""


@functools.cache
def methods() -> dict[str, dict[str, Any]]:
    """Return the `class`, the `summary` and the `parameters` of every method, by name.

    Each parameter has a `type` and a `default`, as they are written on a command line. Every call
    returns the same dict, which the caller must not change.
    """
    found: dict[str, dict[str, Any]] = json.loads(RECORD.read_text("utf-8"))
    return found


def known_method(name: str, argument: str = "policy") -> str:
    """Return the name of a method, which may be given by the name of its class instead.

    Args:
        name: the name of the method, such as "snapkv", or of its class, such as "SnapKV".
        argument: the name of the argument, for the error.

    Raises:
        InvalidArgumentError: there is no such method.
    """
    if name in methods():
        return name
    by_class = {facts["class"]: own for own, facts in methods().items()}
    if name in by_class:
        return by_class[name]
    problem = f"expected one of {', '.join(methods())}, but got {name!r}"
    remedy = "Run snapkv policies to see all methods, and use --set to set their parameters"
    raise wrong(argument, problem, nearest(name, methods(), remedy))


def specs(texts: Iterable[str]) -> list[str]:
    """Split texts such as ``snapkv:kernel_size=13,pooling=avg,h2o`` into one text per method.

    A comma before ``NAME=VALUE`` does not split, because it belongs to the method before it. The
    word none and blank texts are left out. Whether the methods exist is not checked.
    """
    parts = [part for text in texts for part in re.split(r",(?!\s*[\w.-]+=)", text)]
    return [part.strip() for part in parts if part.strip() not in ("", "none")]


def assignments(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Split ``NAME=VALUE`` texts into pairs of a name, with underscores, and a value.

    A value may be empty.

    Raises:
        InvalidArgumentError: a text has no name, or no ``=``.
    """
    found = []
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals):
            problem = f"expected a parameter in the form NAME=VALUE, but got {text!r}"
            raise wrong("set", problem, "For example, use --set seed=1")
        found.append((name.replace("-", "_"), value))
    return found


@dataclass(frozen=True)
class Chosen:
    """A method with its parameters, from which a policy can be built.

    Attributes:
        method: the name of the method.
        own: the parameters of the method itself.
        parts: the methods that it wraps, by the name of the parameter that takes each of them.
    """

    method: str
    own: dict[str, Any]
    parts: dict[str, "Chosen"]


def chosen(name: str, given: Mapping[str, Any]) -> Chosen:
    """Assign parameters to a method and to the methods that it wraps.

    A parameter that the method itself lacks goes to every wrapped method that has it. A parameter
    written as ``part.parameter`` goes only to that wrapped method. The values are not checked.

    Args:
        name: the name of the method, or "default".
        given: the parameters by name. One that takes a method names it.

    Raises:
        InvalidArgumentError: none of the methods has a parameter, or a method is unknown.
    """
    known, parts = parameters(name), wrapped(name, given)
    own: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {part: {} for part in parts}
    for key, value in given.items():
        part, _, rest = key.partition(".")
        takers = [part for part, method in parts.items() if key in accepted(method)]
        if key in known:
            own[key] = value
        elif rest and part in parts:
            inner[part][rest] = value
        elif takers:
            for taker in takers:
                inner[taker][key] = value
        else:
            raise _unknown_parameter(key, value, list(parts.values()) or [name], known)
    chosen_parts = {part: chosen(method, inner[part]) for part, method in parts.items()}
    return Chosen(_recorded_name(name), own, chosen_parts)


def parameters(name: str) -> dict[str, Any]:
    """Return the `type` and the `default` of each parameter of a method itself, by name.

    Raises:
        InvalidArgumentError: there is no such method.
    """
    found: dict[str, Any] = methods()[_recorded_name(name)]["parameters"]
    return found


def _recorded_name(name: str) -> str:
    """Return the name under which the parameters of a method itself are recorded.

    Raises:
        InvalidArgumentError: there is no such method.
    """
    return "across-layers" if name == DEFAULT else known_method(name)


def wrapped(name: str, given: Mapping[str, Any] = MappingProxyType({})) -> dict[str, str]:
    """Return the names of the methods that a method wraps, by the parameter that takes each.

    They are those in `given`, or else the defaults. Empty for a method that wraps none.

    Raises:
        InvalidArgumentError: there is no method `name`.
    """
    return {
        part: str(given.get(part, facts["default"]))
        for part, facts in parameters(name).items()
        if facts["type"].endswith("Policy")
    }


def accepted(name: str, given: Mapping[str, Any] = MappingProxyType({})) -> list[str]:
    """Return the names of the parameters of a method and of all methods that it wraps.

    A name may occur several times.

    Args:
        name: the name of the method.
        given: parameters of the method; those that take a method say which one is wrapped.

    Raises:
        InvalidArgumentError: a method is unknown.
    """
    parts = wrapped(name, given).values()
    return [*parameters(name), *(key for part in parts for key in accepted(part))]


def takes_budget(name: str, given: Iterable[str]) -> bool:
    """Return whether a method takes a budget, and no name in `given` sets one or a `keep_ratio`.

    Raises:
        InvalidArgumentError: there is no such method.
    """
    own = {parameter.rpartition(".")[2] for parameter in given}
    return "budget" in accepted(name) and not own & {"budget", "keep_ratio"}


def parsed(spec: str) -> tuple[str, dict[str, Any]]:
    """Split a text such as ``snapkv:kernel_size=13`` into the name of a method and its parameters.

    The values are converted to the types of the parameters. The value of an unknown parameter stays
    a text.

    Raises:
        InvalidArgumentError: the method is unknown, or a parameter is not written as
            ``NAME=VALUE``, is repeated, or has a malformed kernel or budget as its value.
    """
    name, _, rest = spec.partition(":")
    given = [part for part in rest.split(",") if part.strip()]
    if not all("=" in part for part in given):
        problem = f"expected NAME or NAME:PARAMETER=VALUE,PARAMETER=VALUE, but got {spec!r}"
        raise wrong("policy", problem, "For example, use --policy snapkv:kernel_size=13")
    return name, typed_assignments(name, given)


def typed_assignments(
    name: str, texts: Iterable[str], own: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Parse ``NAME=VALUE`` texts, and return `own` with the parameters in them.

    The values are converted to the types of the parameters. The value of an unknown parameter stays
    a text, which `chosen` refuses. `own` is not changed.

    Args:
        name: the name of the method.
        texts: the parameters, as ``NAME=VALUE``.
        own: the parameters that options of their own have set.

    Raises:
        InvalidArgumentError: the method is unknown, a parameter is given twice, a text is not
            ``NAME=VALUE``, or a kernel or a budget is malformed.
    """
    owners = [*methods(), *inner.values(), name] if (inner := wrapped(name)) else [name]
    kinds = {key: facts["type"] for each in owners for key, facts in parameters(each).items()}
    given = dict(own)
    for parameter, text in assignments(texts):
        if parameter in given:
            problem = f"this can only have one value, but got {given[parameter]} and {text}"
            raise wrong(parameter, problem, "Remove one of the two values")
        given[parameter] = _typed(text, kinds.get(parameter.rpartition(".")[2], ""))
    return given


def _typed(text: str, kind: str) -> Any:
    """Convert the text to the type of a parameter.

    If that is impossible, the text is returned, and the method refuses it later.

    Args:
        text: the value as it was typed.
        kind: the `type` of the parameter in `methods`; empty for an unknown parameter.

    Raises:
        InvalidArgumentError: a budget with parameters or the size of a kernel is malformed.
    """
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
    """Check the parameters of a method before torch is imported.

    The method checks them again when it is built, and it alone checks some of them.

    Args:
        name: the name of the method, or "default".
        given: the parameters by name, converted to their types.

    Raises:
        InvalidArgumentError: a parameter is unknown, or its value is wrong.
    """
    if name == DEFAULT:  # as `snapkv.policies.default.default_parameters`, which imports torch
        pooling = {} if given.get("kernel_size") is not None else {"pooling": "fading"}
        given = {**default_window(given), **pooling, **given}
    _require_values(chosen(name, given))


def _require_values(found: Chosen) -> None:
    """Check the parameters of a method and of the methods that it wraps, as far as possible here.

    Only words of a fixed list, the pooling, the budget and `keep_ratio` are checked.

    Raises:
        InvalidArgumentError: a value is wrong.
    """
    known, given = parameters(found.method), found.own
    values = {name: facts["default"] for name, facts in known.items()} | given
    for name, facts in known.items():
        if ", " in facts["type"]:
            require_choice(name, values[name], tuple(facts["type"].split(", ")))
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
) -> SnapKVError:
    """Build the InvalidArgumentError for a parameter that none of the methods `owners` has.

    It suggests a similar name among the parameters of the `owners` and the names in `others`.
    """
    hints = list(dict.fromkeys(hint for owner in owners for hint in accepted(owner)))
    problem = f"this is not a parameter of {' or '.join(owners)}, which has "
    problem += f"{', '.join(hints) or 'none'}, but got {name}={value}"
    return wrong(name, problem, nearest(name, [*hints, *others], "Remove this parameter"))
