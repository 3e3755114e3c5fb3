"""From `--policy`, `--budget` and `--baseline` to the methods of a run."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from snapkv.app.prefills import Prefill
from snapkv.cli.amounts import token_budgets
from snapkv.cli.options import SweepOptions
from snapkv.cli.policy import accepted, make_policy, typed_assignments
from snapkv.errors import InvalidArgumentError
from snapkv.lab.evaluate.asking import Method
from snapkv.validation import AUTO, DEFAULT


def compared_methods(options: SweepOptions) -> list[Method]:
    """The methods that the options name: the full cache and the default policy without any.

    Raises:
        InvalidArgumentError: an unknown policy, parameter or value.
    """
    baselines = methods(["full"] if options.baseline is None else options.baseline, [], [])
    compared = methods([], options.policy or [DEFAULT], token_budgets(options.budget))
    return [*baselines, *read_in_every_way(compared, options.prefills)]


def read_in_every_way(
    compared: Sequence[Method], prefills: Sequence[tuple[str, Prefill]]
) -> list[Method]:
    """Every method with every way of reading, which its label names where it is not exact."""
    return [
        replace(method, label=method.label + ("" if text == "exact" else f" {text}"), prefill=way)
        for method in compared
        for text, way in prefills
    ]


def methods(
    baselines: Iterable[str], policies: Iterable[str], budgets: Sequence[int | str | dict[str, Any]]
) -> list[Method]:
    """The baselines, then every policy at every budget.

    A policy without a budget, or with one among its parameters, comes once.

    Args:
        baselines: as `policies`, but at their own budgets.
        policies: names, each with parameters where it has any:
            ``snapkv:kernel_size=13,pooling=avg``.
        budgets: tokens per head and layer, window included.

    Raises:
        InvalidArgumentError: an unknown policy, parameter or value.
    """
    made = [Method(label=spec, policy=make_policy(*_parsed(spec))) for spec in specs(baselines)]
    for spec in specs(policies):
        name, given = _parsed(spec)
        own = {parameter.rpartition(".")[2] for parameter in given}
        if "budget" not in accepted(name, {}) or own & {"budget", "keep_ratio"}:
            made.append(Method(label=spec, policy=make_policy(name, given)))
            continue
        for budget in budgets:
            policy = make_policy(name, {"budget": budget, **given})
            made.append(Method(label=f"{spec}@{_shown(budget)}", policy=policy))
    return made


def _shown(budget: int | str | dict[str, Any]) -> str:
    """A budget as it is written on the command line."""
    if not isinstance(budget, dict):
        return str(budget)
    return f"{AUTO}:" + ",".join(f"{name}={value}" for name, value in budget[AUTO].items())


def specs(texts: Iterable[str]) -> list[str]:
    """The policies in texts with commas between them; "none" stands for no policy."""
    parts = [part for text in texts for part in re.split(r",(?!\s*[\w.-]+=)", text)]
    return [part.strip() for part in parts if part.strip() not in ("", "none")]


def _parsed(spec: str) -> tuple[str, dict[str, Any]]:
    """The name of a policy, and the parameters that it is written with."""
    name, _, rest = spec.partition(":")
    parameters = [part for part in rest.split(",") if part.strip()]
    for parameter in parameters:
        if "=" not in parameter:
            raise InvalidArgumentError(
                f"policy: expected NAME or NAME:PARAMETER=VALUE,PARAMETER=VALUE, got {spec!r}; "
                "write for instance snapkv:kernel_size=13"
            )
    return name, typed_assignments(name, parameters)
