"""Candidates that branch: who sees whom while they are verified.

A forward pass may read a tree of candidate tokens instead of a text. Attention then hides the
branches from each other; which token sees which is left here, per thread, for the attention calls
of that pass.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

_current = threading.local()


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """The tree of candidates that a forward pass reads.

    Attributes:
        visible: (Q, Q) bool, which of the Q tokens of the pass each of them sees.
        masks: what a layer has made of the model's mask, for the layers behind it.
    """

    visible: Tensor
    masks: dict[Any, Any] = field(default_factory=dict, repr=False)


@contextlib.contextmanager
def verifying(visible: Tensor) -> Iterator[None]:
    """Within this block, forward passes of this thread read a tree of candidates.

    Args:
        visible: (Q, Q) bool, which of the Q tokens of the pass each of them sees: itself and its
            ancestors, which stand before it.
    """
    _current.candidates = Candidates(visible=visible)
    try:
        yield
    finally:
        _current.candidates = None


def current_candidates() -> Candidates | None:
    """The tree that this thread's forward pass reads; None for plain text."""
    return getattr(_current, "candidates", None)
