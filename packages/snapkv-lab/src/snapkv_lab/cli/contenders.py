"""The methods of a leaderboard: each at every share of the cache that it can hold."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from snapkv.app.models import LoadedModel
from snapkv.cli.policy import make_policy, wrapped
from snapkv.cli.specs import parsed, specs, takes_budget
from snapkv.errors import InvalidArgumentError, UnsupportedModelError
from snapkv.policies import POLICIES, FullCache
from snapkv.validation import DEFAULT
from snapkv_lab.evaluate.asking import Method
from snapkv_lab.evaluate.runner import fitting_methods
from snapkv_lab.evaluate.sample import Setting


@dataclass(frozen=True, kw_only=True)
class Contenders:
    """Methods at shares of a cache, for prompts of one length.

    Attributes:
        methods: the full cache first; their labels end in the share: ``snapkv@0.125``.
        left_out: which cannot take part, and why, a line each.
    """

    methods: list[Method]
    left_out: list[str]


def contending(texts: Iterable[str]) -> list[str]:
    """The methods in texts with commas between them; without any, all that have a budget.

    Among all are the default policy and those of `POLICIES` that have a budget, with their usual
    parameters; not those that are made of several others, which have none of their own.

    Raises:
        InvalidArgumentError: an unknown method or parameter, one without a budget or with a fixed
            one, or a method twice.
    """
    named = specs(texts)
    if not named:
        every = [DEFAULT, *POLICIES]
        return [name for name in every if takes_budget(name, {}) and len(wrapped(name, {})) < 2]
    for spec in named:
        name, given = parsed(spec)
        if not takes_budget(name, given):
            raise InvalidArgumentError(
                f"methods: expected methods whose budget the shares can set, got {spec!r}; name "
                "others (the full cache always takes part), and leave budget and keep_ratio out"
            )
        make_policy(name, {"budget": _AMPLE_TOKENS, **given})  # its other parameters are right
    if len(set(named)) < len(named):
        raise InvalidArgumentError(
            f"methods: expected every method once, got {', '.join(named)}; leave the repeated one "
            "out"
        )
    return named


_AMPLE_TOKENS = 2**20


def contenders(
    loaded: LoadedModel,
    named: Sequence[str],
    shares: Sequence[float],
    prompt_tokens: float,
    question: Setting,
) -> Contenders:
    """The full cache, and every method with the budget that is each share of the prompt.

    Left out are methods that keep more than such a budget for sure, that do not work with the
    model, or that never choose in sight of a question.

    Args:
        loaded: the model.
        named: see `contending`.
        shares: of the prompt's tokens that are kept, each below 1.
        prompt_tokens: how long the prompts are.
        question: the setting.

    Raises:
        InvalidArgumentError: all of them are.
    """
    found, left_out = [Method(label=FullCache.name, policy=FullCache())], []
    for spec in named:
        if why := _unfit(loaded, spec, question):
            left_out.append(f"{spec}: {why}")
            continue
        for share in shares:
            label = f"{spec}@{share:.4g}"
            try:
                found.append(_method(spec, label, max(1, round(share * prompt_tokens))))
            except InvalidArgumentError as error:
                left_out.append(f"{label}: {error}")
    if len(found) == 1:
        raise InvalidArgumentError(
            f"methods: expected one that can keep to a share where the question is {question}, got "
            f"none of {prompt_tokens:,.0f} tokens: {'; '.join(left_out)}; choose others, larger "
            "shares or a larger --length"
        )
    return Contenders(methods=found, left_out=left_out)


def _unfit(loaded: LoadedModel, spec: str, question: Setting) -> str:
    """Why a method cannot take part at any share; empty where it can."""
    method = _method(spec, spec, _AMPLE_TOKENS)
    try:
        fitting_methods(loaded, [method])
    except UnsupportedModelError as error:
        return str(error)
    if method.policy.reads_twice and question == "visible":
        return "it chooses before a question is known, so only where the question is hidden"
    return ""


def _method(spec: str, label: str, budget: int) -> Method:
    name, given = parsed(spec)
    return Method(label=label, policy=make_policy(name, {"budget": budget, **given}))
