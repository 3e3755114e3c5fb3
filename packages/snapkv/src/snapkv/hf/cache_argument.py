"""The name of a model's cache argument: `cache` since transformers 5.24.

In older releases it is `past_key_values`, a name that newer ones also accept for the time being.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch.nn import Module
from transformers.masking_utils import create_causal_mask

_NAMES = ("cache", "past_key_values")
_NAME = next(name for name in _NAMES if name in inspect.signature(create_causal_mask).parameters)


def passed(cache: Any) -> dict[str, Any]:
    """Return the keyword argument that passes a cache to a model in this transformers release."""
    return {_NAME: cache}


def takes_cache(modules: Iterable[Module]) -> bool:
    """Return whether the `forward` of a module has an argument for the cache, under either name."""
    taken = (inspect.signature(module.forward).parameters for module in modules)
    return any(not names.keys().isdisjoint(_NAMES) for names in taken)


def cache_among(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among keyword arguments under either of its names, or None without one."""
    given = (arguments.get(name) for name in _NAMES)
    return next((cache for cache in given if cache is not None), None)


def with_cache(arguments: Mapping[str, Any], cache: Any) -> dict[str, Any]:
    """Return a copy of the keyword arguments with another cache."""
    return {name: each for name, each in arguments.items() if name not in _NAMES} | passed(cache)
