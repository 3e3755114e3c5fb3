"""`snapkv policies`: the methods, what they do, and their parameters."""

from typing import Any, Literal, get_args, get_origin

import typer

from snapkv.cli import panels
from snapkv.cli.standard_output import write_json
from snapkv.validation import AUTO, DEFAULT

EXAMPLES = {"policies": ("snapkv policies", "snapkv policies --json")}


def policies(json: panels.AsJson = False) -> None:
    """List the methods with their parameters and defaults."""
    from snapkv.policies import POLICIES, default_policy  # imports torch, --help must not wait

    described = {DEFAULT: _describe(default_policy, default_policy(AUTO))}
    described |= {name: _describe(policy, policy()) for name, policy in POLICIES.items()}
    if json:
        write_json(described)
        return
    for name, policy in described.items():
        typer.echo(f"{name}: {policy['summary']}")
        for parameter, details in policy["parameters"].items():
            typer.echo(f"    {parameter}={details['default']}  ({details['type']})")


def _describe(made_by: Any, policy: Any) -> dict[str, Any]:
    """The first docstring line of what makes a policy, and what one without arguments has."""
    from snapkv.cli.policy import parameters

    defaults = policy.describe()
    return {
        "summary": made_by.__doc__.strip().splitlines()[0],
        "parameters": {
            name: {"type": _type_name(hint), "default": _plain(defaults[name])}
            for name, hint in parameters(type(policy)).items()
        },
    }


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
