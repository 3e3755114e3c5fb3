"""The name of a model's cache argument: `cache` since transformers 5.24.

In older releases it is `past_key_values`, a name that newer ones also accept for the time being.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers.masking_utils import create_causal_mask

_NAMES = ("cache", "past_key_values")
_NAME = next(name for name in _NAMES if name in inspect.signature(create_causal_mask).parameters)


def passed(cache: Any) -> dict[str, Any]:
    """Return the keyword argument that passes a cache to a model in this transformers release."""
    return {_NAME: cache}


def takes_cache(function: Callable[..., Any]) -> bool:
    """Return whether a function names an argument for the cache, under either of its names."""
    return not inspect.signature(function).parameters.keys().isdisjoint(_NAMES)


def cache_among(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among keyword arguments under either of its names, or None without one."""
    given = (arguments.get(name) for name in _NAMES)
    return next((cache for cache in given if cache is not None), None)


def with_cache(arguments: Mapping[str, Any], cache: Any) -> dict[str, Any]:
    """Return a copy of the keyword arguments with another cache."""
    return {name: each for name, each in arguments.items() if name not in _NAMES} | passed(cache)
