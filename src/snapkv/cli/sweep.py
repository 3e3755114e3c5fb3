"""From `--policy`, `--budget` and `--baseline` to the methods of a run."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from snapkv.cli.fields import integers
from snapkv.cli.options import SweepOptions
from snapkv.cli.policy import accepted, make_policy, typed_assignments
from snapkv.errors import InvalidArgumentError
from snapkv.lab.evaluate.runner import Method


def compared_methods(options: SweepOptions) -> list[Method]:
    """The methods that the options name: the full cache and SnapKV by default.

    Raises:
        InvalidArgumentError: an unknown policy, parameter or value.
    """
    return methods(
        ["full"] if options.baseline is None else options.baseline,
        options.policy or ["snapkv"],
        integers("budget", options.budget),
    )


def methods(
    baselines: Iterable[str], policies: Iterable[str], budgets: Sequence[int]
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
    made = [_method(spec, None) for spec in specs(baselines)]
    for spec in specs(policies):
        made += [_method(spec, budget) for budget in (budgets if _takes_budget(spec) else [None])]
    return made


def specs(texts: Iterable[str]) -> list[str]:
    """The policies in texts with commas between them; "none" stands for no policy."""
    parts = [part for text in texts for part in re.split(r",(?!\s*[\w.-]+=)", text)]
    return [part.strip() for part in parts if part.strip() not in ("", "none")]


def _method(spec: str, budget: int | None) -> Method:
    name, _ = _split(spec)
    given = _given(spec)
    if budget is None:
        return Method(label=spec, policy=make_policy(name, given))
    return Method(label=f"{spec}@{budget}", policy=make_policy(name, {"budget": budget, **given}))


def _takes_budget(spec: str) -> bool:
    """Whether the method has a budget that its parameters leave open."""
    own = {parameter.rpartition(".")[2] for parameter in _given(spec)}
    return "budget" in accepted(_split(spec)[0], {}) and own.isdisjoint({"budget", "keep_ratio"})


def _given(spec: str) -> dict[str, Any]:
    """The parameters that a policy is written with."""
    name, parameters = _split(spec)
    for parameter in parameters:
        if "=" not in parameter:
            raise InvalidArgumentError(
                f"policy: expected NAME or NAME:PARAMETER=VALUE,PARAMETER=VALUE, got {spec!r}; "
                "write for instance snapkv:kernel_size=13"
            )
    return typed_assignments(name, parameters)


def _split(spec: str) -> tuple[str, list[str]]:
    name, _, parameters = spec.partition(":")
    return name, [part for part in parameters.split(",") if part.strip()]
