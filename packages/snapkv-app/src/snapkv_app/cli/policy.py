"""From options, or a text such as ``snapkv:kernel_size=13``, to a policy in the table."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from snapkv.errors import InvalidArgumentError
from snapkv.hf.model_parts import shares_latent
from snapkv.policies import POLICIES, AcrossLayers, Policy
from snapkv.policies.budget import ByteBudget, budget_of
from snapkv.policies.default import by_layer, default_parameters
from snapkv.storage.bits import Bits
from snapkv.validation import AUTO, DEFAULT
from snapkv_app.cli.amounts import count, kernel, token_budget
from snapkv_app.cli.methods import assignments, known_method, specs, unknown_parameter
from snapkv_app.cli.options import OWN_FLAGS, PolicyOptions, RunOptions

BITS_WITHIN_BYTES: Bits = "K8V4"
"""The bits of the default method with a budget of bytes."""


def build_policy(options: PolicyOptions, *, alone: bool = False) -> Policy:
    """The policy that the options ask for, with its defaults for everything left out.

    Without a policy and a budget, the votes choose the budget. Where layers hold other tokens than
    each other, or choose of what was kept before, every layer of the default chooses `alone`.
    """
    given = {name: value for name in OWN_FLAGS if (value := getattr(options, name)) is not None}
    if "kernel_size" in given:
        given["kernel_size"] = kernel(given["kernel_size"])
    given = typed_assignments(options.policy, options.set_ or [], given)
    if options.policy == DEFAULT and "keep_ratio" not in given:
        given.setdefault("budget", AUTO)
    if options.seed is not None and "seed" in accepted(options.policy, given):
        given.setdefault("seed", options.seed)
    made = make_policy(options.policy, given)
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
    """The policy of that name; parameters that a wrapper lacks go to the methods that it wraps.

    Every wrapped method that has a parameter gets it; ``part.parameter`` reaches only one of them.
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
    """Raise an error that lists the known parameters."""
    hints = list(dict.fromkeys(hint for method in methods for hint in accepted(method, {})))
    raise unknown_parameter(key, value, methods, hints, wrapper)


def wrapped(name: str, given: dict[str, Any]) -> dict[str, str]:
    """The parameters of a policy that are policies, with the name of the policy each one gets."""
    policy = _named(name)
    found = [
        key
        for key, hint in parameters(policy).items()
        if isinstance(hint, type) and issubclass(hint, Policy)
    ]
    return {part: str(given.get(part, getattr(policy(), part).name)) for part in found}


def accepted(name: str, given: dict[str, Any]) -> list[str]:
    """Parameters of a policy and of the policies it wraps."""
    parts = wrapped(name, given).values()
    return [*parameters(_named(name)), *(key for part in parts for key in accepted(part, {}))]


def parameters(policy: type[Policy]) -> dict[str, Any]:
    """A policy's parameters and their types."""
    hints = get_type_hints(policy)
    return {field.name: hints[field.name] for field in fields(policy) if field.init}


def _named(name: str) -> type[Policy]:
    kinds: dict[str, type[Policy]] = {DEFAULT: AcrossLayers, **POLICIES}
    return kinds[known_method(name)]


def typed_assignments(
    name: str, texts: Iterable[str], own: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """A policy's own parameters, and those from ``NAME=VALUE`` texts, converted to their types."""
    hints = parameters(_named(name))
    if wrapped(name, {}):  # including those of any wrapped policy
        others = [parameters(policy) for policy in POLICIES.values() if policy is not _named(name)]
        usual = [parameters(_named(part)) for part in wrapped(name, {}).values()]
        hints = {key: hint for inner in others + usual for key, hint in inner.items()} | hints
    given = dict(own)
    for parameter, text in assignments(texts):
        if parameter in given:
            raise InvalidArgumentError(
                f"{parameter}: expected it once, got {given[parameter]} and {text}; leave one out"
            )
        given[parameter] = _typed(text, hints.get(parameter.rpartition(".")[2]))
    return given


def _typed(text: str, hint: Any) -> Any:
    """The text converted to a parameter's type; if that fails, the policy reports it."""
    kinds = {hint, *get_args(hint)}
    if text.startswith(f"{AUTO}:"):
        return token_budget(text)
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        if kind in kinds:
            with contextlib.suppress(ValueError):  # InvalidArgumentError included
                return count("set", text) if kind is int else kind(text)
    if str not in kinds and any(get_origin(kind) is tuple for kind in kinds):
        return kernel(text)
    return text


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


def takes_budget(name: str, given: Iterable[str]) -> bool:
    """Whether a policy takes a budget and these parameters do not set it."""
    own = {parameter.rpartition(".")[2] for parameter in given}
    return "budget" in accepted(name, {}) and not own & {"budget", "keep_ratio"}


def _shown(budget: int | str | dict[str, Any]) -> str:
    """A budget as it is written on the command line."""
    if not isinstance(budget, dict):
        return str(budget)
    return f"{AUTO}:" + ",".join(f"{name}={value}" for name, value in budget[AUTO].items())


def parsed(spec: str) -> tuple[str, dict[str, Any]]:
    """Split a text into the name of a policy and its parameters."""
    name, _, rest = spec.partition(":")
    given = [part for part in rest.split(",") if part.strip()]
    if not all("=" in part for part in given):
        raise InvalidArgumentError(
            f"policy: expected NAME or NAME:PARAMETER=VALUE,PARAMETER=VALUE, got {spec!r}; "
            "write for instance snapkv:kernel_size=13"
        )
    return name, typed_assignments(name, given)
