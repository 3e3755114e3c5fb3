"""Several policies on one command line: ``snapkv:kernel_size=13,h2o``, each at every budget."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from snapkv.cli.policy import accepted, make_policy, typed_assignments
from snapkv.errors import InvalidArgumentError
from snapkv.policies import Policy
from snapkv.validation import AUTO


def named_policies(
    baselines: Iterable[str], policies: Iterable[str], budgets: Sequence[int | str | dict[str, Any]]
) -> list[tuple[str, Policy]]:
    """The baselines, then every policy at every budget, each with its label.

    A policy without a budget, or with one among its parameters, comes once.

    Args:
        baselines: as `policies`, but at their own budgets.
        policies: names, each with parameters where it has any:
            ``snapkv:kernel_size=13,pooling=avg``.
        budgets: tokens per head and layer, window included.

    Raises:
        InvalidArgumentError: an unknown policy, parameter or value.
    """
    made = [(spec, make_policy(*parsed(spec))) for spec in specs(baselines)]
    for spec in specs(policies):
        name, given = parsed(spec)
        if not takes_budget(name, given):
            made.append((spec, make_policy(name, given)))
            continue
        for budget in budgets:
            policy = make_policy(name, {"budget": budget, **given})
            made.append((f"{spec}@{_shown(budget)}", policy))
    return made


def takes_budget(name: str, given: Iterable[str]) -> bool:
    """Whether a policy has a budget that these parameters of it do not set."""
    own = {parameter.rpartition(".")[2] for parameter in given}
    return "budget" in accepted(name, {}) and not own & {"budget", "keep_ratio"}


def _shown(budget: int | str | dict[str, Any]) -> str:
    """A budget as it is written on the command line."""
    if not isinstance(budget, dict):
        return str(budget)
    return f"{AUTO}:" + ",".join(f"{name}={value}" for name, value in budget[AUTO].items())


def specs(texts: Iterable[str]) -> list[str]:
    """The policies in texts with commas between them; "none" stands for no policy."""
    parts = [part for text in texts for part in re.split(r",(?!\s*[\w.-]+=)", text)]
    return [part.strip() for part in parts if part.strip() not in ("", "none")]


def parsed(spec: str) -> tuple[str, dict[str, Any]]:
    """The name of a policy, and the parameters that it is written with.

    Raises:
        InvalidArgumentError: an unknown policy, or a parameter without a value.
    """
    name, _, rest = spec.partition(":")
    parameters = [part for part in rest.split(",") if part.strip()]
    for parameter in parameters:
        if "=" not in parameter:
            raise InvalidArgumentError(
                f"policy: expected NAME or NAME:PARAMETER=VALUE,PARAMETER=VALUE, got {spec!r}; "
                "write for instance snapkv:kernel_size=13"
            )
    return name, typed_assignments(name, parameters)
