"""From `--policy`, `--budget` and `--baseline` to the methods of a run."""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

from snapkv.app.prefills import Prefill
from snapkv.cache.paging import PageRecall
from snapkv.cli.amounts import count, token_budgets
from snapkv.cli.options import SweepOptions
from snapkv.cli.policy import accepted, make_policy, typed_assignments
from snapkv.errors import InvalidArgumentError
from snapkv.lab.evaluate.asking import Method
from snapkv.lab.evaluate.conversing import LATER, Later, LaterWord
from snapkv.policies import FullCache
from snapkv.validation import AUTO, DEFAULT, require_choice


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


def with_turns(compared: Sequence[Method], texts: Sequence[str] | None) -> list[Method]:
    """Every method with every way to read later questions, which its label names if it drops.

    Args:
        compared: what answers; the full cache comes once, since nothing of it is dropped.
        texts: "append", "compress", "recall" and "recall-pages:N", also with commas between them;
            None for the first.

    Raises:
        InvalidArgumentError: another word, one of them twice, or no number of pages.
    """
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


_RECALL_PAGES = "recall-pages"
_LATER_WORDS = (*LATER, f"{_RECALL_PAGES}:8")


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
    made = [Method(label=spec, policy=make_policy(*parsed(spec))) for spec in specs(baselines)]
    for spec in specs(policies):
        name, given = parsed(spec)
        if not takes_budget(name, given):
            made.append(Method(label=spec, policy=make_policy(name, given)))
            continue
        for budget in budgets:
            policy = make_policy(name, {"budget": budget, **given})
            made.append(Method(label=f"{spec}@{_shown(budget)}", policy=policy))
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
