"""The names and parameters of every method, as the command line records them.

python -m tests.cli.methods    record it, when a method or a parameter is new, changed or gone
"""

import json
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from snapkv.policies import POLICIES, default_policy
from snapkv.validation import AUTO, DEFAULT
from snapkv_app.cli.methods import RECORD


def described() -> dict[str, Any]:
    """As `snapkv_app.cli.methods.methods` has it."""
    found = {name: told_of(policy, policy()) for name, policy in POLICIES.items()}
    return {DEFAULT: told_of(default_policy, default_policy(AUTO).policy)} | found


def told_of(made_by: Any, policy: Any) -> dict[str, Any]:
    """The first docstring line of what makes a policy, and what one without arguments has."""
    defaults = policy.describe()
    return {
        "class": made_by.__name__,
        "summary": made_by.__doc__.strip().splitlines()[0],
        "parameters": {
            name: {"type": _type_name(hint), "default": _plain(defaults[name])}
            for name, hint in _parameters(type(policy)).items()
        },
    }


def _parameters(policy: type) -> dict[str, Any]:
    """A policy's parameters and their types."""
    hints = get_type_hints(policy)
    return {field.name: hints[field.name] for field in fields(policy) if field.init}


def _plain(default: Any) -> Any:
    """A default as it is written on the command line: a wrapped method by its name, or auto."""
    return default.get("name", AUTO) if isinstance(default, dict) else default


def _type_name(hint: Any) -> str:
    """A type as an error message would name it: "int or None", "max, avg"."""
    if get_origin(hint) is Literal:
        return ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        kind, rest = get_args(hint)
        return f"{'tuple' if rest is ... else 'pair'} of {_type_name(kind)}"
    if members := get_args(hint):
        names = ["None" if kind is type(None) else _type_name(kind) for kind in members]
        if "AutoBudget" in names:  # one that a text may stand for
            return "int or auto or bytes or None"
        return " or ".join(names)
    return str(hint.__name__)


if __name__ == "__main__":
    RECORD.write_text(json.dumps(described(), indent=1) + "\n", "utf-8")
