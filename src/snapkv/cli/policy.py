"""From options to a policy, for any policy in the table."""

import contextlib
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from snapkv.cli.options import RunOptions
from snapkv.errors import InvalidArgumentError
from snapkv.policies import POLICIES, Policy, SnapKV
from snapkv.suggestions import nearest

_OWN_FLAGS = ("budget", "keep_ratio", "window_size", "kernel_size", "pooling", "group_reduce")
_WRAPPED = SnapKV.name


def build_policy(options: RunOptions) -> Policy:
    """The policy that the options ask for; what they leave out keeps the policy's own default.

    Raises:
        InvalidArgumentError: an unknown policy, an option it does not have, or a bad value.
        InvalidTypeError: a value of the wrong type.
    """
    given = {name: value for name in _OWN_FLAGS if (value := getattr(options, name)) is not None}
    known = _known_parameters(options.policy)
    if options.seed is not None and "seed" in known:
        given["seed"] = options.seed
    for assignment in options.set_ or []:
        name, text = _split(assignment)
        given[name] = _typed(text, known.get(name))
    return _make(options.policy, given)


def _make(name: str, given: dict[str, Any]) -> Policy:
    """The policy of that name; what a wrapper does not have itself is meant for what it wraps."""
    policy, hints = _named(name), parameters(_named(name))
    if "policy" in hints:
        inner = {key: given.pop(key) for key in list(given) if key not in hints}
        return policy(**given | {"policy": _make(str(given.get("policy", _WRAPPED)), inner)})
    unknown = [key for key in given if key not in hints]
    if unknown:
        raise InvalidArgumentError(
            f"{unknown[0]}: expected a parameter of {name}, which has "
            f"{', '.join(hints) or 'none'}, got {unknown[0]}={given[unknown[0]]}; leave it out"
            f"{nearest(unknown[0], hints)}"
        )
    return policy(**given)


def _named(name: str) -> type[Policy]:
    if name not in POLICIES:
        raise InvalidArgumentError(
            f"policy: expected one of {', '.join(POLICIES)}, got {name!r}{nearest(name, POLICIES)}"
        )
    return POLICIES[name]


def _known_parameters(name: str) -> dict[str, Any]:
    """Parameters of a policy and of any it may wrap, with their types."""
    hints = parameters(_named(name))
    if "policy" not in hints:
        return hints
    wrapped = [parameters(policy) for policy in POLICIES.values() if policy is not _named(name)]
    return {key: hint for inner in wrapped for key, hint in inner.items()} | hints


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
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        if kind in kinds:
            with contextlib.suppress(ValueError):
                return kind(text)
    return text
