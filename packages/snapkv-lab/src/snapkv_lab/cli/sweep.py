"""From `--policy`, `--budget` and `--baseline` to the methods of a run."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

from snapkv.app.prefills import Prefill
from snapkv.cache.paging import PageRecall
from snapkv.cli.amounts import count, token_budgets
from snapkv.cli.options import SweepOptions
from snapkv.cli.specs import named_policies
from snapkv.errors import InvalidArgumentError
from snapkv.policies import FullCache
from snapkv.validation import DEFAULT, require_choice
from snapkv_lab.evaluate.asking import LATER, Later, LaterWord, Method


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
    named = named_policies(baselines, policies, budgets)
    return [Method(label=label, policy=policy) for label, policy in named]
