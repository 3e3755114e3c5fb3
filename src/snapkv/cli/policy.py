"""From options to a policy, for any policy in the table."""

import contextlib
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from snapkv.cli.options import RunOptions
from snapkv.errors import InvalidArgumentError
from snapkv.policies import POLICIES, Policy
from snapkv.suggestions import nearest

_OWN_FLAGS = ("budget", "keep_ratio", "window_size", "kernel_size", "pooling", "group_reduce")


def build_policy(options: RunOptions) -> Policy:
    """The policy that the options ask for; what they leave out keeps the policy's own default.

    Raises:
        InvalidArgumentError: an unknown policy, an option it does not have, or a bad value.
        InvalidTypeError: a value of the wrong type.
    """
    if options.policy not in POLICIES:
        raise InvalidArgumentError(
            f"policy: expected one of {', '.join(POLICIES)}, got {options.policy!r}"
            f"{nearest(options.policy, POLICIES)}"
        )
    policy = POLICIES[options.policy]
    hints = parameters(policy)
    given = {name: value for name in _OWN_FLAGS if (value := getattr(options, name)) is not None}
    if options.seed is not None and "seed" in hints:
        given["seed"] = options.seed
    for assignment in options.set_ or []:
        name, text = _split(assignment)
        given[name] = _typed(text, hints.get(name))
    unknown = [name for name in given if name not in hints]
    if unknown:
        raise InvalidArgumentError(
            f"{unknown[0]}: expected a parameter of {options.policy}, which has "
            f"{', '.join(hints) or 'none'}, got {unknown[0]}={given[unknown[0]]}; leave it out"
            f"{nearest(unknown[0], hints)}"
        )
    return policy(**given)


def parameters(policy: type[Policy]) -> dict[str, Any]:
    """A policy's parameters and their types."""
    hints = get_type_hints(policy)
    return {field.name: hints[field.name] for field in fields(policy) if field.init}  # type: ignore[arg-type]  # every policy is a dataclass; the base class has no fields to be one


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
