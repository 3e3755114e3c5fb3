"""Combinations of test parameters in which any two values occur together at least once."""

from typing import Any

import pytest
from allpairspy import AllPairs


def pairs(**axes: Any) -> pytest.MarkDecorator:
    """Parametrize a test by these axes; a value of a mapping gets its key as id."""
    named = {name: _named(values) for name, values in axes.items()}
    if len(named) == 1:
        raise ValueError("pairs: expected two axes or more; use pytest.mark.parametrize")
    rows = [list(row) for row in AllPairs([list(values) for values in named.values()])]
    return pytest.mark.parametrize(
        tuple(named),
        [[values[key] for values, key in zip(named.values(), row, strict=True)] for row in rows],
        ids=["-".join(filter(None, row)) for row in rows],
    )


def _named(values: Any) -> dict[str, Any]:
    if isinstance(values, dict):
        return values
    return {str(value).removeprefix("torch."): value for value in values}
