"""Turn the options of policies, budgets, baselines and storages into the methods to compare."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

from snapkv.errors import wrong
from snapkv.policies import FullCache
from snapkv.policies.default import by_layer
from snapkv.storage.bits import KVCodes
from snapkv.validation import DEFAULT, require_choice
from snapkv_app.cli.amounts import EXACT, storage_bits, token_budgets
from snapkv_app.cli.methods import specs
from snapkv_app.cli.options import SweepOptions
from snapkv_app.cli.policy import named_policies
from snapkv_app.prefills import Prefill
from snapkv_lab.evaluate.asking import LATER, Later, Method
from snapkv_lab.measure.contenders import Contender, compressed_contender, transformers_contender


def compared_methods(options: SweepOptions) -> list[Method]:
    """Return the methods that the options name, first the baselines. By default they are the full
    cache and the default policy.

    Raises:
        InvalidArgumentError: a policy or a storage is not known, or a policy refuses its parameters
            or its budget.
    """
    return [
        *make_methods(["full"] if options.baseline is None else options.baseline, [], []),
        *_read_in_every_way(options),
    ]


def compared_caches(options: Any) -> list[Contender]:
    """Return the baselines of a benchmark, followed by every policy with every budget.

    Raises:
        InvalidArgumentError: a baseline is no cache of transformers, or another option is wrong.
    """
    return [
        *map(transformers_contender, specs([options.baseline])),
        *(
            replace(
                compressed_contender(each.label, each.policy, codes=each.bits), prefill=each.prefill
            )
            for each in _read_in_every_way(options)
        ),
    ]


def _read_in_every_way(options: Any) -> list[Method]:
    """Return every policy with every budget, storage and prefill that the options name. The label
    of a method names its storage and its prefill, unless they are exact.

    Raises:
        InvalidArgumentError: a policy or a storage is not known, or a policy refuses its parameters
            or its budget.
    """
    ways: Sequence[tuple[str, Prefill]] = options.prefills
    compared = make_methods([], options.policy or [DEFAULT], token_budgets(options.budget))
    return [
        replace(stored, label=stored.label + ("" if text == "exact" else f" {text}"), prefill=way)
        for method in compared
        for stored in map(method.stored_in, parse_storages(options.bits))
        for text, way in ways
    ]


def parse_storages(text: str) -> list[KVCodes | None]:
    """Return the storage that each word in the text names, in order; None stands for unquantized
    storage.

    Args:
        text: the words of the option, with commas between them.

    Raises:
        InvalidArgumentError: a word names no storage.
    """
    return [None if word == EXACT else KVCodes.of(word) for word in storage_bits(text)]  # type: ignore[arg-type] # checked


def make_methods(
    baselines: Iterable[str], policies: Iterable[str], budgets: Sequence[int | str | dict[str, Any]]
) -> list[Method]:
    """Return a list of the baselines, followed by every policy with every budget.

    A policy appears once if it has no budget or if its parameters set one. All methods have an
    exact prefill and unquantized storage.

    Raises:
        InvalidArgumentError: a policy is not known, or refuses its parameters or its budget.
    """
    policies_by_label = named_policies(baselines, policies, budgets)
    return [Method(label=label, policy=policy) for label, policy in policies_by_label]


def combine_with_turns(compared: Sequence[Method], texts: Sequence[str] | None) -> list[Method]:
    """Return a list of all methods with every way of handling later questions.

    Labels name the way, unless it is "append". A full cache handles later questions in one way
    only, and is listed once. With "compress", the default policy selects the tokens of each layer
    by itself.

    Args:
        compared: the methods.
        texts: the words of the option, "append", "compress" or "recall", several in a text with
            commas; None for "append".

    Raises:
        InvalidArgumentError: a way is unknown or repeated, or none is given.
    """
    words = [word.strip() for text in texts or ["append"] for word in text.split(",")]
    ways = [word for word in words if word]
    for word in ways:
        require_choice("turns", word, tuple(LATER))
    if not ways or len(ways) > len(set(ways)):
        problem = (
            f"expected some of {', '.join(LATER)}, each once, but got {', '.join(ways) or 'none'}"
        )
        raise wrong("turns", problem, "Remove the value that is repeated")
    methods = []
    for method, (place, way) in itertools.product(compared, enumerate(ways)):
        if way == "compress" and method.label.startswith(DEFAULT):
            method = replace(method, policy=by_layer(method.policy))
        if not isinstance(method.policy, FullCache):
            label = method.label + ("" if way == "append" else f" {way}")
            methods.append(replace(method, label=label, later=cast(Later, way)))
        elif place == 0:
            methods.append(method)
    return methods
