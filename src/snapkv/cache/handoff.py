"""Passing a layer from the cache to the attention call that follows, per thread.

`Cache.update` knows the layer but not the queries; the attention function knows the queries but
not the layer. Both run in the same thread, one right after the other. In the same way a cache that
is asked how large a mask must be is passed to the function that then makes it of the padding.
"""

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapkv.cache.layer import CompressedLayer

if TYPE_CHECKING:
    from snapkv.cache.compressed import CompressedCache


@dataclass(frozen=True, kw_only=True)
class Handoff:
    """A layer that has just been updated.

    Attributes:
        cache: the cache the layer belongs to.
        layer: the layer; its new tokens are already stored.
        new_tokens: how many tokens the update appended.
        prompt_end: tokens seen when the prompt ends, counted from the start of the cache.
        turn_start: tokens seen when it began.
        has_own_mask: whether a mask that comes with this pass is the user's own.
    """

    cache: "CompressedCache"
    layer: CompressedLayer
    new_tokens: int
    prompt_end: int
    turn_start: int = 0
    has_own_mask: bool = False


_current = threading.local()


def offer(handoff: Handoff) -> None:
    """Leave a layer for the next attention call of this thread."""
    _current.handoff = handoff


def take() -> Handoff | None:
    """The layer left for this attention call, if any; it is left only once."""
    handoff = peek()
    _current.handoff = None
    return handoff


def peek() -> Handoff | None:
    """The layer left for the next attention call, without taking it."""
    return getattr(_current, "handoff", None)


def ask_for_padding(cache: "CompressedCache") -> None:
    """Leave a cache for the mask that this thread makes next."""
    _current.asking = weakref.ref(cache)


def take_asking() -> "CompressedCache | None":
    """The cache that a mask is made for, if any; it is left only once, and not kept alive."""
    asking = getattr(_current, "asking", None)
    _current.asking = None
    return None if asking is None else asking()
