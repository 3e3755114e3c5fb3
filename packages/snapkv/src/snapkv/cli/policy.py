"""From options to a policy, for any policy in the table."""

import contextlib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from snapkv.cli.amounts import count, kernel, token_budget
from snapkv.cli.options import PolicyOptions
from snapkv.errors import InvalidArgumentError
from snapkv.policies import POLICIES, Policy, SnapKV
from snapkv.policies.default import default_parameters
from snapkv.validation import AUTO, DEFAULT, nearest

OWN_FLAGS = (
    "budget",
    "keep_ratio",
    "window_size",
    "kernel_size",
    "pooling",
    "decay",
    "group_reduce",
)
"""Parameters of methods that have an option of their own; others are given with ``--set``."""


def build_policy(options: PolicyOptions) -> Policy:
    """The policy that the options ask for; what they leave out keeps the policy's own default.

    Where they name none, the votes choose the budget, too.

    Raises:
        InvalidArgumentError: an unknown policy, an option it does not have, or a bad value.
        InvalidTypeError: a value of the wrong type.
    """
    given = {name: value for name in OWN_FLAGS if (value := getattr(options, name)) is not None}
    if "kernel_size" in given:
        given["kernel_size"] = kernel(given["kernel_size"])
    given |= typed_assignments(options.policy, options.set_ or [])
    if options.policy == DEFAULT and not given.keys() & {"budget", "keep_ratio"}:
        given["budget"] = AUTO
    if options.seed is not None and "seed" in accepted(options.policy, given):
        given.setdefault("seed", options.seed)
    return make_policy(options.policy, given)


def typed_assignments(name: str, assignments: Iterable[str]) -> dict[str, Any]:
    """Parameters of a policy out of ``NAME=VALUE`` texts, each in the type that it has.

    Raises:
        InvalidArgumentError: an unknown policy, or a text without an equals sign.
    """
    known = _known_parameters(name)
    given = {}
    for assignment in assignments:
        parameter, text = _split(assignment)
        given[parameter] = _typed(text, known.get(parameter.rpartition(".")[2]))
    return given


def make_policy(name: str, given: dict[str, Any]) -> Policy:
    """The policy of that name; what a wrapper does not have itself is meant for what it wraps.

    Where it wraps several methods, an option goes to each that has it, and ``part.option`` to one.
    """
    if name == DEFAULT:
        given = default_parameters(given)
    policy, parts = _named(name), wrapped(name, given)
    own: dict[str, Any] = {}
    meant: dict[str, dict[str, Any]] = {part: {} for part in parts}
    for key, value in given.items():
        part, _, rest = key.partition(".")
        takers = [part for part, method in parts.items() if key in accepted(method, {})]
        if key in parameters(policy):
            own[key] = value
        elif rest and part in parts:
            meant[part][rest] = value
        elif takers:
            for taker in takers:
                meant[taker][key] = value
        else:
            _refuse(key, value, list(parts.values()) or [name], list(parameters(policy)))
    return policy(
        **own | {part: make_policy(method, meant[part]) for part, method in parts.items()}
    )


def _refuse(key: str, value: Any, methods: list[str], wrapper: list[str]) -> NoReturn:
    """Say which parameters there are instead."""
    hints = list(dict.fromkeys(hint for method in methods for hint in accepted(method, {})))
    raise InvalidArgumentError(
        f"{key}: expected a parameter of {' or '.join(methods)}, which has "
        f"{', '.join(hints) or 'none'}, got {key}={value}; leave it out"
        f"{nearest(key, [*hints, *wrapper])}"
    )


def wrapped(name: str, given: dict[str, Any]) -> dict[str, str]:
    """The parameters of a policy that are policies, each with the name of the one it shall be."""
    policy = _named(name)
    found = [
        key
        for key, hint in parameters(policy).items()
        if isinstance(hint, type) and issubclass(hint, Policy)
    ]
    return {part: str(given.get(part, getattr(policy(), part).name)) for part in found}


def accepted(name: str, given: dict[str, Any]) -> list[str]:
    """Parameters of a policy and of those it wraps."""
    parts = wrapped(name, given).values()
    return [*parameters(_named(name)), *(key for part in parts for key in accepted(part, {}))]


def _named(name: str) -> type[Policy]:
    kinds: dict[str, type[Policy]] = {DEFAULT: SnapKV, **POLICIES}
    if name not in kinds:
        raise InvalidArgumentError(
            f"policy: expected one of {', '.join(kinds)}, got {name!r}{nearest(name, kinds)}"
        )
    return kinds[name]


def _known_parameters(name: str) -> dict[str, Any]:
    """Parameters of a policy and of any it may wrap, with their types."""
    hints = parameters(_named(name))
    if not wrapped(name, {}):
        return hints
    others = [parameters(policy) for policy in POLICIES.values() if policy is not _named(name)]
    return {key: hint for inner in others for key, hint in inner.items()} | hints


def parameters(policy: type[Policy]) -> dict[str, Any]:
    """A policy's parameters and their types."""
    hints = get_type_hints(policy)
    return {field.name: hints[field.name] for field in fields(policy) if field.init}


def _split(assignment: str) -> tuple[str, str]:
    name, equals, text = assignment.partition("=")
    if not (name and equals):
        raise InvalidArgumentError(
            f"set: expected NAME=VALUE, got {assignment!r}; write for instance --set seed=1"
        )
    return name.strip().replace("-", "_"), text.strip()


def _typed(text: str, hint: Any) -> Any:
    """The text as the type a parameter has; what is no such thing is left to the policy's check."""
    kinds = {hint, *get_args(hint)}
    if text.startswith(f"{AUTO}:"):
        return token_budget(text)
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        if kind in kinds:
            with contextlib.suppress(ValueError):  # an InvalidArgumentError is one
                return count("set", text) if kind is int else kind(text)
    if str in kinds:
        return text
    if any(get_origin(kind) is tuple for kind in kinds):
        return kernel(text)
    return text
