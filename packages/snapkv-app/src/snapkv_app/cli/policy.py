"""Build policies from options, or from texts such as ``snapkv:kernel_size=13``."""

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

FEW_BYTES = 1 / 32
"""The share of the bytes below which the default method stores keys and values in int4."""


def build_policy(options: PolicyOptions, *, alone: bool = False) -> Policy:
    """Build the policy of the options, with its defaults for everything that is left out.

    If the options name neither a policy nor a budget, the votes choose the budget.

    Args:
        options: the options of the command.
        alone: whether each layer of the default method must select by itself. That is necessary if
            the layers already hold different tokens.

    Raises:
        InvalidArgumentError: the policy refuses a parameter.
    """
    made = make_policy(options.policy, options.parameters)
    return by_layer(made) if alone and options.policy == DEFAULT else made


def usual_bits(
    policy: Policy, model: Any, options: RunOptions | None = None
) -> tuple[Bits | None, str]:
    """Choose the format in which a compressed cache stores keys and values.

    The default method quantizes if its budget is in bytes: more tokens fit then, but each decode
    step takes longer. It uses K8V4, and int4 below `FEW_BYTES`. Any other method does not quantize,
    and neither do options with `exact_bits`.

    Args:
        policy: the policy of the cache.
        model: the model.
        options: the options of the command; None if `policy` is the default method.

    Returns:
        The bits, or None for unquantized storage; and a reason if the cache would be quantized but
        the model forbids it, which is empty otherwise.
    """
    is_wanted = options is None or (options.policy == DEFAULT and not options.exact_bits)
    budget = budget_of(policy)
    if not is_wanted or not isinstance(budget, ByteBudget):
        return None, ""
    if shares_latent(model):
        return None, "unquantized, since all heads of this model share one latent"
    # In K8V4, 1/64 of 1,024 tokens holds hardly more than one block of 32 tokens in each head.
    return "int4" if (budget.share or 1.0) < FEW_BYTES else "K8V4", ""


def make_policy(name: str, given: dict[str, Any]) -> Policy:
    """Build the policy of a method with parameters.

    A parameter that the method itself lacks goes to every method that it wraps and that has it.

    Args:
        name: the name of a method, or "default".
        given: the parameters by name, converted to their types.

    Raises:
        InvalidArgumentError: a method or a parameter is unknown, or the policy refuses its value.
    """
    return _build(chosen(name, default_parameters(given) if name == DEFAULT else given))


def _build(found: Chosen) -> Policy:
    parts = {part: _build(inner) for part, inner in found.parts.items()}
    return POLICIES[found.method](**found.own | parts)


def named_policies(
    baselines: Iterable[str], policies: Iterable[str], budgets: Sequence[int | str | dict[str, Any]]
) -> list[tuple[str, Policy]]:
    """Build the baselines at their default budgets, and every policy at every budget.

    A policy that takes no budget, or whose parameters set one, appears one time.

    Args:
        baselines: texts with methods and their parameters, such as "snapkv:kernel_size=13,h2o",
            each for one or several methods.
        policies: such texts for the policies.
        budgets: the budgets, in the form that policies take.

    Returns:
        A label and the policy for each of them, in this order. The label is the text, followed by
        "@" and the budget if the policy takes one of `budgets`.

    Raises:
        InvalidArgumentError: a method or a parameter is unknown, or a policy refuses a value.
    """
    made = [(spec, make_policy(*parsed(spec))) for spec in specs(baselines)]
    for spec in specs(policies):
        name, given = parsed(spec)
        if not takes_budget(name, given):
            made.append((spec, make_policy(name, given)))
            continue
        for budget in budgets:
            policy = make_policy(name, {"budget": budget, **given})
            made.append((f"{spec}@{_format_budget(budget)}", policy))
    return made


def _format_budget(budget: int | str | dict[str, Any]) -> str:
    """Return a budget as it is typed on the command line; a dict must have the key "auto"."""
    if not isinstance(budget, dict):
        return str(budget)
    return f"{AUTO}:" + ",".join(f"{name}={value}" for name, value in budget[AUTO].items())
