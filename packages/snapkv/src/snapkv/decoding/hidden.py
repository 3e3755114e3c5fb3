"""What a model's output projection sees: the states that Medusa's heads read."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from snapkv.errors import UnsupportedModelError


class LastStates:
    """The last input of a model's output projection, (B, N, d) for the N tokens with logits."""

    value: Tensor


@contextlib.contextmanager
def last_states(model: Any) -> Iterator[LastStates]:
    """Within this block, notes what the output projection sees in this thread's forward passes.

    It is behind the last norm, whatever the family does to the logits, and only of the tokens
    whose logits were asked for, so that a long prompt costs nothing.

    Raises:
        UnsupportedModelError: the model has no output projection of its own.
    """
    found, thread = LastStates(), threading.get_ident()

    def note(_: Any, inputs: tuple[Tensor, ...]) -> None:
        if threading.get_ident() == thread:
            found.value = inputs[0]

    hook = output_projection(model).register_forward_pre_hook(note)
    try:
        yield found
    finally:
        hook.remove()


def output_projection(model: Any) -> Any:
    """The module that turns states into logits.

    Raises:
        UnsupportedModelError: the model has none.
    """
    projection = model.get_output_embeddings()
    if projection is None:
        raise UnsupportedModelError(
            f"model: expected one with an output projection (lm_head), got {type(model).__name__} "
            "without; Medusa heads need it"
        )
    return projection
