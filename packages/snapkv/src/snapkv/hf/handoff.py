"""Passing a layer from the cache to the attention call that follows, per thread.

`Cache.update` knows the layer but not the queries; the attention function knows the queries but
not the layer. Both run in the same thread, one right after the other. In the same way a cache that
is asked how large a mask must be leaves its `PaddingWatch` for the function that then makes it.
"""

import threading
import weakref
from dataclasses import dataclass
from typing import Any

from snapkv.cache.layer import CompressedLayer
from snapkv.cache.padding import PaddingWatch
from snapkv.cache.reading import Reading
from snapkv.hf.fidelity import VoteCheck


@dataclass(frozen=True, kw_only=True)
class Handoff:
    """A layer that has just been updated.

    Attributes:
        layer: the layer; its new tokens are already stored.
        new_tokens: how many tokens the update appended.
        reading: what its cache was told of the prompt.
        modules: those of the model that its cache is for.
        check: whether the votes are what the model computes.
        has_own_mask: whether a mask that comes with this pass is the user's own.
    """

    layer: CompressedLayer
    new_tokens: int
    reading: Reading
    modules: "weakref.WeakSet[Any]"
    check: VoteCheck
    has_own_mask: bool = False

    @property
    def prompt_end(self) -> int:
        """Tokens seen when the prompt or turn ends, counted from the start of the cache."""
        assert self.reading.prompt_end is not None
        return self.reading.prompt_end

    @property
    def turn_tokens(self) -> int:
        """How many tokens the prompt or turn has, whether it comes in pieces or not."""
        return self.prompt_end - self.reading.turn_start

    @property
    def drafts(self) -> int:
        """How many of the tokens seen stand behind the prompt's end; negative before it."""
        return self.layer.seen_tokens - self.prompt_end

    def take_back(self) -> None:
        """Undo the update, whose attention is refused."""
        seen = self.layer.seen_tokens
        self.layer.take_back(self.new_tokens)
        self.reading.forget_end_within(seen)


_current = threading.local()


def offer(handoff: Handoff) -> None:
    """Leave a layer for the next attention call of this thread."""
    _current.handoff = handoff


def take() -> Handoff | None:
    """The layer left for this attention call, if any; it is left only once."""
    handoff = getattr(_current, "handoff", None)
    _current.handoff = None
    return handoff


def withdraw(reading: Reading) -> bool:
    """Take back what a cache has left and no attention call has taken; whether there was any."""
    handoff: Handoff | None = getattr(_current, "handoff", None)
    left = handoff is not None and handoff.reading is reading
    if left:
        _current.handoff = None
    return left


def ask_for_padding(watch: PaddingWatch) -> None:
    """Leave a cache's watch for the mask that this thread makes next."""
    _current.asking = weakref.ref(watch)


def take_asking() -> PaddingWatch | None:
    """Whose watch a mask is made for, if any; it is left only once, and not kept alive."""
    asking = getattr(_current, "asking", None)
    _current.asking = None
    return None if asking is None else asking()
