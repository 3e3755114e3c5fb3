"""From `--baseline`, `--policy`, `--budget` and `--storage` to the caches of a bench."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from snapkv.cli.amounts import token_budgets
from snapkv.cli.specs import specs
from snapkv.errors import InvalidArgumentError
from snapkv.validation import DEFAULT
from snapkv_lab.cli.sweep import methods, read_in_every_way
from snapkv_lab.evaluate.asking import Method
from snapkv_lab.measure.contenders import Contender, compressed, full


def compared_caches(options: Any) -> list[Contender]:
    """The baselines, then every policy at every budget in every storage.

    Args:
        options: the `BenchOptions`.

    Raises:
        InvalidArgumentError: an unknown baseline, policy, parameter or storage.
    """
    policies = read_in_every_way(
        methods([], options.policy or [DEFAULT], token_budgets(options.budget)), options.prefills
    )
    return [
        *map(full, specs([options.baseline])),
        *_compressed(policies, specs([options.storage]), options.storage),
    ]


def _compressed(
    policies: Sequence[Method], storages: Sequence[str], given: str
) -> Iterator[Contender]:
    for storage in storages:
        if storage not in ("dynamic", "static"):
            raise InvalidArgumentError(f"storage: expected dynamic, static or both, got {given!r}")
    for each in policies:
        for storage in storages:
            made = compressed(f"{each.label} {storage}", each.policy, storage=storage)
            yield replace(made, prefill=each.prefill)
