"""Noting the attention calls of a forward pass, so that they can be gone through again.

The attention function leaves every call and its output here, per thread. Outside of a block of
`noting_calls` that does nothing.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Given = TypeVar("Given")

_current = threading.local()

NoteCall = Callable[[Any, Any], None]
"""Takes an attention call and what it returned, see `snapkv.hf.attend`."""


@contextlib.contextmanager
def noting_calls(take: NoteCall) -> Iterator[None]:
    """Within this block every attention call of this thread is passed on, with its output."""
    _current.take = take
    try:
        yield
    finally:
        _current.take = None


def note(call: Any, attended: Given) -> Given:
    """Pass a call on to whoever asked for it; returns what it returned."""
    take: NoteCall | None = getattr(_current, "take", None)
    if take is not None:
        take(call, attended)
    return attended
