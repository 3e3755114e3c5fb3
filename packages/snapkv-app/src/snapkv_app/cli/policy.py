"""From options, or a text such as ``snapkv:kernel_size=13``, to a policy in the table."""

from collections.abc import Iterable, Sequence
from typing import Any

from snapkv.hf.model_parts import shares_latent
from snapkv.policies import POLICIES, Policy
from snapkv.policies.budget import ByteBudget, budget_of
from snapkv.policies.default import by_layer, default_parameters
from snapkv.storage.bits import Bits
from snapkv.validation import AUTO, DEFAULT
from snapkv_app.cli.methods import Chosen, chosen, parsed, specs, takes_budget
from snapkv_app.cli.options import PolicyOptions, RunOptions

BITS_WITHIN_BYTES: Bits = "K8V4"
"""The bits of the default method with a budget of bytes."""


def build_policy(options: PolicyOptions, *, alone: bool = False) -> Policy:
    """The policy that the options ask for, with its defaults for everything left out.

    Without a policy and a budget, the votes choose the budget. Where layers hold other tokens than
    each other, or choose of what was kept before, every layer of the default chooses `alone`.
    """
    made = make_policy(options.policy, options.parameters)
    return by_layer(made) if alone and options.policy == DEFAULT else made


def usual_bits(
    policy: Policy, model: Any, options: RunOptions | None = None
) -> tuple[Bits | None, str]:
    """The `quantize` of `CompressedCache`, and a reason if there are to be no codes.

    The default method with a budget of bytes stores codes: more tokens fit, but each decoding step
    takes longer.
    """
    is_asked = options is None or (options.policy == DEFAULT and not options.exact_bits)
    if not is_asked or not isinstance(budget_of(policy), ByteBudget):
        return None, ""
    if shares_latent(model):
        return None, "unquantized, since all heads of this model share one latent"
    return BITS_WITHIN_BYTES, ""


def make_policy(name: str, given: dict[str, Any]) -> Policy:
    """The policy of that name, with parameters as `chosen` takes them."""
    return _made(chosen(name, default_parameters(given) if name == DEFAULT else given))


def _made(found: Chosen) -> Policy:
    parts = {part: _made(inner) for part, inner in found.parts.items()}
    return POLICIES[found.method](**found.own | parts)


def named_policies(
    baselines: Iterable[str], policies: Iterable[str], budgets: Sequence[int | str | dict[str, Any]]
) -> list[tuple[str, Policy]]:
    """The baselines at their default budgets, then every policy at every budget, with labels.

    A policy without a budget, or whose parameters set one, appears once.
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


def _shown(budget: int | str | dict[str, Any]) -> str:
    """A budget as it is written on the command line."""
    if not isinstance(budget, dict):
        return str(budget)
    return f"{AUTO}:" + ",".join(f"{name}={value}" for name, value in budget[AUTO].items())
