"""The forward context: what a cache, its masks and attention tell each other, per thread.

`Cache.update` knows the layer but not the queries; the attention function knows the queries but not
the layer. Both run in the same thread, one right after the other. In the same way a cache that is
asked how large a mask must be leaves its `PaddingWatch` for the function that then makes it, and a
forward pass over a tree of candidates says which token sees which.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from torch import Tensor

from snapkv.cache.layer import CompressedLayer
from snapkv.cache.reading import PaddingWatch, Reading
from snapkv.hf.fidelity import VoteCheck
from snapkv.policies import PromptLayer


class Phase(Enum):
    """What an attention call reads; one function of `snapkv.hf.attention` for each.

    Attributes:
        READ_PROMPT: a part of a prompt, whose end is still to come.
        END_PROMPT: the end of a prompt, all of which the layer holds.
        READ_TURN: a later prompt, or a part of it, over what was kept.
        END_TURN: the end of a later prompt that votes on what is stored.
        DECODE: tokens behind the prompt.
    """

    READ_PROMPT = auto()
    END_PROMPT = auto()
    READ_TURN = auto()
    END_TURN = auto()
    DECODE = auto()


def phase_of(
    seen_tokens: int, new_tokens: int, prompt_end: int, *, is_compressed: bool, turns_vote: bool
) -> Phase:
    """The phase of a call that has just appended tokens.

    Where a layer has dropped something, a later prompt is read over the rest; only where nothing
    was dropped, or all was recalled, is its end the end of a prompt again.

    | begins before the end | reaches the end | compressed | turns vote | phase |
    |---|---|---|---|---|
    | no | | | | DECODE |
    | yes | no | no | | READ_PROMPT |
    | yes | yes | no | | END_PROMPT |
    | yes | no | yes | | READ_TURN |
    | yes | yes | yes | no | READ_TURN |
    | yes | yes | yes | yes | END_TURN |

    Args:
        seen_tokens: tokens the layer has seen, the new ones included.
        new_tokens: how many the call has appended.
        prompt_end: tokens seen when the prompt or turn ends.
        is_compressed: whether a prompt has ended and some of it was dropped.
        turns_vote: whether the end of a later prompt votes on what is stored.
    """
    if seen_tokens - new_tokens >= prompt_end:
        return Phase.DECODE
    reaches_end = seen_tokens >= prompt_end
    if is_compressed:
        return Phase.END_TURN if reaches_end and turns_vote else Phase.READ_TURN
    return Phase.END_PROMPT if reaches_end else Phase.READ_PROMPT


@dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """A layer that has just been updated, for the attention call that follows.

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
    def phase(self) -> Phase:
        """Where in the conversation the pass lies."""
        layer = self.layer
        return phase_of(
            layer.seen_tokens,
            self.new_tokens,
            self.prompt_end,
            is_compressed=layer.slots.is_compressed,
            turns_vote=layer.turns is not None,
        )

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """The tree of candidate tokens that a forward pass reads instead of a text.

    Attributes:
        visible: (Q, Q) bool, which of the Q tokens of the pass each of them sees.
        masks: what a layer has made of the model's mask, for the layers behind it.
    """

    visible: Tensor
    masks: dict[Any, Any] = field(default_factory=dict, repr=False)


class Hook:
    """Follows the forward passes of a thread; see `hooked`."""

    def on_prompt(self, prompt: PromptLayer) -> None:
        """A layer has read a part of a prompt that goes on; `prompt` has the queries of it all."""

    def on_attention(self, call: Any, attended: Any) -> None:
        """An attention call, a `snapkv.hf.attend.AttentionCall`, has returned that."""


class _Current(threading.local):
    """What is left for this thread's next call of a mask function or an attention function."""

    context: ForwardContext | None = None
    padding: "weakref.ref[PaddingWatch] | None" = None
    candidates: Candidates | None = None
    hook = Hook()


_current = _Current()


def enter(context: ForwardContext) -> None:
    """Leave a layer for the next attention call of this thread."""
    _current.context = context


def take() -> ForwardContext | None:
    """The layer left for this attention call, if any; it is left only once."""
    context, _current.context = _current.context, None
    return context


def leave(reading: Reading) -> bool:
    """Take back what a cache has left and no attention call has taken; whether there was any."""
    left = _current.context is not None and _current.context.reading is reading
    if left:
        _current.context = None
    return left


def enter_padding(watch: PaddingWatch) -> None:
    """Leave a cache's watch for the mask that this thread makes next."""
    _current.padding = weakref.ref(watch)


def take_padding() -> PaddingWatch | None:
    """Whose watch a mask is made for, if any; it is left only once, and not kept alive."""
    padding, _current.padding = _current.padding, None
    return None if padding is None else padding()


def candidates() -> Candidates | None:
    """The tree that this thread's forward pass reads; None for plain text."""
    return _current.candidates


@contextlib.contextmanager
def reading_candidates(visible: Tensor) -> Iterator[None]:
    """Within this block, forward passes of this thread read a tree; `visible` as `Candidates`'."""
    _current.candidates = Candidates(visible=visible)
    try:
        yield
    finally:
        _current.candidates = None


def hook() -> Hook:
    """What follows this thread's forward passes."""
    return _current.hook


@contextlib.contextmanager
def hooked(follower: Hook) -> Iterator[None]:
    """Within this block, it is told of every attention call of this thread."""
    before, _current.hook = _current.hook, follower
    try:
        yield
    finally:
        _current.hook = before
