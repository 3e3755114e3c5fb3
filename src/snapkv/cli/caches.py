"""From `--baseline`, `--policy`, `--budget` and `--storage` to the caches of a bench."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from snapkv.cli.fields import integers
from snapkv.cli.sweep import methods, specs
from snapkv.errors import InvalidArgumentError
from snapkv.lab.evaluate.runner import Method
from snapkv.lab.measure.contenders import Contender, compressed, full
from snapkv.lab.measure.kvpress import Kvpress
from snapkv.policies import SnapKV


@contextlib.contextmanager
def compared_caches(
    options: Any, model: Any, *, only: str | None
) -> Iterator[list[Contender | Kvpress]]:
    """The baselines, then every policy at every budget in every storage.

    Args:
        options: the `BenchOptions`.
        model: what they are measured on.
        only: the label of one of them, so that nothing else is started.

    Raises:
        InvalidArgumentError: an unknown baseline, policy, parameter or storage.
    """
    policies = methods([], options.policy or ["snapkv"], integers("budget", options.budget))
    caches = [*_baselines(options, model, policies), *_compressed(policies, options.storage)]
    wanted = [each for each in caches if only in (None, each.label)]
    with contextlib.ExitStack() as running:
        for each in wanted:
            if isinstance(each, Kvpress):
                running.enter_context(each)
        yield wanted


def _baselines(
    options: Any, model: Any, policies: Sequence[Method]
) -> Iterator[Contender | Kvpress]:
    for name in specs([options.baseline]):
        if name == "kvpress":
            yield from _beside(options.kvpress_python, model, policies)
        else:
            yield full(name)


def _beside(python: str | None, model: Any, policies: Sequence[Method]) -> Iterator[Kvpress]:
    """kvpress's SnapKV at the settings of every one of ours."""
    alike = [each for each in policies if type(each.policy) is SnapKV]
    if not alike:
        raise InvalidArgumentError(
            "baseline: expected a snapkv policy whose settings kvpress can have too, got "
            f"{', '.join(each.label for each in policies)}; add --policy snapkv"
        )
    for method in alike:
        where = None if python is None else Path(python)
        yield Kvpress(f"kvpress {method.label}", where, model, method.policy)  # type: ignore[arg-type] # it is SnapKV


def _compressed(policies: Sequence[Method], given: str) -> Iterator[Contender]:
    storages = specs([given])
    for storage in storages:
        if storage not in ("dynamic", "static"):
            raise InvalidArgumentError(f"storage: expected dynamic, static or both, got {given!r}")
    for each in policies:
        for storage in storages:
            yield compressed(f"{each.label} {storage}", each.policy, storage=storage)
