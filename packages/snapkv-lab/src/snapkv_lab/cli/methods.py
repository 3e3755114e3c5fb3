"""From `--policy`, `--budget`, `--baseline`, `--storage` and shares to what is compared."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from snapkv.app.models import LoadedModel
from snapkv.app.prefills import Prefill
from snapkv.cache.paging import PageRecall
from snapkv.cli.amounts import EXACT, count, storage_bits, token_budgets
from snapkv.cli.methods import specs
from snapkv.cli.options import SweepOptions
from snapkv.cli.policy import make_policy, named_policies, parsed, takes_budget, wrapped
from snapkv.errors import InvalidArgumentError, UnsupportedModelError
from snapkv.policies import POLICIES, EvictingPolicy, FullCache
from snapkv.storage.coded import KVCodes
from snapkv.validation import DEFAULT, require_choice
from snapkv_lab.evaluate.asking import LATER, Later, LaterWord, Method
from snapkv_lab.evaluate.runner import fitting_methods
from snapkv_lab.evaluate.sample import Setting
from snapkv_lab.measure.contenders import Contender, compressed, full

_AMPLE_TOKENS = 2**20
_RECALL_PAGES = "recall-pages"
_LATER_WORDS = (*LATER, f"{_RECALL_PAGES}:8")


def compared_methods(options: SweepOptions) -> list[Method]:
    """The methods that the options name: the full cache and the default policy without any."""
    return [
        *methods(["full"] if options.baseline is None else options.baseline, [], []),
        *_read_in_every_way(options),
    ]


def compared_caches(options: Any) -> list[Contender]:
    """The baselines of a bench, then every policy at every budget in every storage."""
    storages, found = specs([options.storage]), list(map(full, specs([options.baseline])))
    if any(storage not in ("dynamic", "static") for storage in storages):
        raise InvalidArgumentError(
            f"storage: expected dynamic, static or both, got {options.storage!r}"
        )
    for each, storage in itertools.product(_read_in_every_way(options), storages):
        label = f"{each.label} {storage}"
        made = compressed(label, each.policy, storage=storage, codes=each.bits)
        found.append(replace(made, prefill=each.prefill))
    return found


def _read_in_every_way(options: Any) -> list[Method]:
    """Every policy in every storage with every way of reading; labels name what is not exact."""
    ways: Sequence[tuple[str, Prefill]] = options.prefills
    compared = methods([], options.policy or [DEFAULT], token_budgets(options.budget))
    return [
        replace(stored, label=stored.label + ("" if text == "exact" else f" {text}"), prefill=way)
        for method in compared
        for stored in map(method.stored_in, storages(options.bits))
        for text, way in ways
    ]


def storages(text: str) -> list[KVCodes | None]:
    """What words of `storage_bits` stand for; None for as it came."""
    return [None if word == EXACT else KVCodes.of(word) for word in storage_bits(text)]  # type: ignore[arg-type] # read before


def methods(
    baselines: Iterable[str], policies: Iterable[str], budgets: Sequence[int | str | dict[str, Any]]
) -> list[Method]:
    """The baselines, then every policy at every budget.

    A policy without a budget, or with one among its parameters, comes once.
    """
    named = named_policies(baselines, policies, budgets)
    return [Method(label=label, policy=policy) for label, policy in named]


def with_turns(compared: Sequence[Method], texts: Sequence[str] | None) -> list[Method]:
    """Every method with every way to read later questions, which its label names if it drops."""
    words = [word.strip() for text in texts or ["append"] for word in text.split(",")]
    ways = {word: _later(word) for word in words if word}
    if not ways or len(words) - words.count("") > len(ways):
        raise InvalidArgumentError(
            f"turns: expected some of {', '.join(_LATER_WORDS)}, each once, got "
            f"{', '.join(filter(None, words)) or 'none'}; leave the repeated one out"
        )
    made = []
    for method, (place, way) in itertools.product(compared, enumerate(ways)):
        if not isinstance(method.policy, FullCache):
            label = method.label + ("" if way == "append" else f" {way}")
            made.append(replace(method, label=label, later=ways[way]))
        elif place == 0:
            made.append(method)
    return made


def _later(word: str) -> Later:
    """What later questions do, by its word; pages have their number behind a colon."""
    name, _, pages = word.partition(":")
    if name == _RECALL_PAGES:
        return PageRecall(count(_RECALL_PAGES, pages, f"--turns {_RECALL_PAGES}:"))
    require_choice("turns", word, _LATER_WORDS)
    return cast(LaterWord, word)


@dataclass(frozen=True, kw_only=True)
class Contenders:
    """Methods at shares of a cache, for prompts of one length."""

    methods: list[Method]
    left_out: list[str]


def contending(texts: Iterable[str]) -> list[str]:
    """The methods in texts with commas between them; without any, all that have a budget.

    Among all are the default policy and those of `POLICIES` that have a budget, with their usual
    parameters; not those that are made of several others, which have none of their own.
    """
    named = specs(texts)
    if not named:
        every = [DEFAULT, *POLICIES]
        return [name for name in every if takes_budget(name, {}) and len(wrapped(name, {})) < 2]
    for spec in named:
        if not takes_budget(*parsed(spec)):
            raise InvalidArgumentError(
                f"methods: expected methods whose budget the shares can set, got {spec!r}; name "
                "others (the full cache always takes part), and leave budget and keep_ratio out"
            )
        _method(spec, spec, _AMPLE_TOKENS)  # its other parameters are right
    if len(set(named)) < len(named):
        raise InvalidArgumentError(
            f"methods: expected every method once, got {', '.join(named)}; leave the repeated one "
            "out"
        )
    return named


def contenders(
    loaded: LoadedModel,
    named: Sequence[str],
    shares: Sequence[float],
    prompt_tokens: float,
    question: Setting,
    bits: Sequence[KVCodes | None] = (None,),
) -> Contenders:
    """The full cache, and every method in every storage with each share of the full cache's bytes.

    Methods that evict while generating get as many tokens instead. Left out are methods that keep
    more than such a budget for sure, that do not work with the model or the storage, or that never
    choose in sight of a question.
    """
    found, left_out = [Method(label=FullCache.name, policy=FullCache())], []
    for spec, codes in itertools.product(named, bits):
        in_tokens = isinstance(_method(spec, spec, _AMPLE_TOKENS).policy, EvictingPolicy)
        plain = _method(spec, spec, _AMPLE_TOKENS if in_tokens else "100%").stored_in(codes)
        if why := _unfit(loaded, plain, question):
            left_out.append(f"{plain.label}: {why}")
            continue
        for share in shares:
            label = f"{plain.label}@{share:.4g}"
            try:
                method = _method(spec, label, max(1, round(share * prompt_tokens)))
                method = method if in_tokens else _method(spec, label, f"{100 * share:.4g}%")
                found.append(replace(method, bits=codes))
            except InvalidArgumentError as error:
                left_out.append(f"{label}: {error}")
    if len(found) == 1:
        raise InvalidArgumentError(
            f"methods: expected one that can keep to a share where the question is {question}, got "
            f"none of {prompt_tokens:,.0f} tokens: {'; '.join(left_out)}; choose others, larger "
            "shares or a larger --length"
        )
    return Contenders(methods=found, left_out=left_out)


def _unfit(loaded: LoadedModel, method: Method, question: Setting) -> str:
    """Why a method cannot take part at any share; empty where it can."""
    try:
        fitting_methods(loaded, [method])
    except (UnsupportedModelError, InvalidArgumentError) as error:
        return str(error)
    if method.policy.reads_context and question == "visible":
        return "it chooses before a question is known, so only where the question is hidden"
    return ""


def _method(spec: str, label: str, budget: int | str) -> Method:
    name, given = parsed(spec)
    return Method(label=label, policy=make_policy(name, {"budget": budget, **given}))
