"""What a model calls the argument that is its cache: `cache` since transformers 5.24.

Before, it was `past_key_values`, which users may go on with until transformers takes it away.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from transformers.masking_utils import create_causal_mask

_NAMES = ("cache", "past_key_values")
_NAME = next(name for name in _NAMES if name in inspect.signature(create_causal_mask).parameters)


def passed(cache: Any) -> dict[str, Any]:
    """A cache as the argument of a model's call, or a field of its output."""
    return {_NAME: cache}


def cache_among(arguments: Mapping[str, Any]) -> Any:
    """The cache that was passed, by either name; None where none was."""
    given = (arguments.get(name) for name in _NAMES)
    return next((cache for cache in given if cache is not None), None)


def with_cache(arguments: Mapping[str, Any], cache: Any) -> dict[str, Any]:
    """The same arguments with another cache."""
    return {name: each for name, each in arguments.items() if name not in _NAMES} | passed(cache)
