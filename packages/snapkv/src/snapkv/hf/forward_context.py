"""State of the current thread that connects a cache, its mask functions and its attention.

`Cache.update` knows the layer but not the queries; the attention function knows the queries but not
the layer. Both run in the same thread, one right after the other, so the first one leaves a
`ForwardContext` for the second. In the same way, a cache that reports the size of a mask leaves its
`PaddingTracker` for the function that then makes the mask, and `branching` sets which tokens of a
forward pass see each other.
"""

import contextlib
import copy
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from torch import Tensor

from snapkv.cache.layer import CompressedLayer
from snapkv.cache.prompt_state import PaddingTracker, PromptState
from snapkv.hf.fidelity import VoteCheck
from snapkv.policies import PromptLayer


class Phase(Enum):
    """The part of a conversation that an attention call reads.

    `snapkv.hf.attention` has one function for each phase.
    """

    READ_PROMPT = auto()  # a piece of a prompt before its last piece
    END_PROMPT = auto()  # the end of a prompt, of which the layer holds every token
    READ_TURN = auto()  # a later prompt, or a piece of it, that is stored after the kept tokens
    END_TURN = auto()  # the end of a later prompt, which votes on all stored tokens
    DECODE = auto()  # tokens after the prompt


def phase_of(
    seen_tokens: int, new_tokens: int, prompt_end: int, chooses_again: bool | None
) -> Phase:
    """Return the phase of an attention call whose layer has just appended its tokens.

    Args:
        seen_tokens: how many tokens the layer has seen, including the new ones.
        new_tokens: how many tokens this pass reads.
        prompt_end: how many tokens the layer will have seen at the end of the prompt or turn.
        chooses_again: whether the end of a later prompt compresses a layer again that has evicted
            tokens. None if the layer still holds all tokens: then the whole conversation is
            compressed like a first prompt.

    | begins before the end | reaches it | chooses_again | phase |
    |---|---|---|---|
    | no | | | DECODE |
    | yes | no | None | READ_PROMPT |
    | yes | yes | None | END_PROMPT |
    | yes | no | any | READ_TURN |
    | yes | yes | False | READ_TURN |
    | yes | yes | True | END_TURN |
    """
    if seen_tokens - new_tokens >= prompt_end:
        return Phase.DECODE
    reaches_end = seen_tokens >= prompt_end
    if chooses_again is None:
        return Phase.END_PROMPT if reaches_end else Phase.READ_PROMPT
    return Phase.END_TURN if reaches_end and chooses_again else Phase.READ_TURN


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The properties of one forward pass that all layers share; the first compressed layer sets it.

    If a prompt is read layer by layer, each piece of each layer is a pass of its own.

    Attributes:
        prompt_state: the state of the cache's prompt or turn.
        modules: the modules of the model that the cache is for.
        check: compares the votes with the model's attention.
        start: how many tokens each layer had seen before this pass.
        new_tokens: how many tokens this pass reads.
        coming: how many tokens of the prompt or turn later passes will read; None if this pass
            reads tokens after its end.
        reads_end: whether the prompt or turn has been read to its end with this pass.
        turn_tokens: how many tokens the prompt or turn has, in one pass or in several.
        phase: the phase for a layer that holds all tokens it has seen.
        turn_phase: the phase for a layer that has dropped tokens of a prompt.
        has_own_mask: whether a mask in this pass was made by the user and not by transformers.
    """

    prompt_state: PromptState
    modules: "weakref.WeakSet[Any]"
    check: VoteCheck
    start: int
    new_tokens: int
    coming: int | None
    reads_end: bool
    turn_tokens: int
    phase: Phase
    turn_phase: Phase
    has_own_mask: bool


@dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """A layer that has just stored new tokens, for the attention call that follows.

    Attributes:
        layer: the layer.
        keys: (B, Hkv, S + N, D) keys that the layer's update returned.
        values: (B, Hkv, S + N, Dv) values that the layer's update returned.
        forward_pass: the properties of the forward pass that all layers share.
        phase: the part of the conversation that the attention call reads.
    """

    layer: CompressedLayer
    keys: Tensor
    values: Tensor
    forward_pass: Pass
    phase: Phase

    def take_back(self) -> None:
        """Remove the new tokens of this layer after its attention was refused.

        Changes the layer and the state of the prompt in place. Earlier layers keep their new
        tokens, so unless this is the first layer, the cache is marked as broken until `reset`.
        """
        layer, seen, state = self.layer, self.layer.seen_tokens, self.forward_pass.prompt_state
        layer.crop(-self.forward_pass.new_tokens)
        state.forget_taken_back(seen)
        state.chooser.unread_layers = ()
        state.is_broken = layer.identity.layer_idx > 0 or bool(layer.other_states)


@dataclass(eq=False)
class Shared:
    """Keys and values of a layer that later layers attend to as well.

    Attributes:
        context: the context of the layer with a copy of the layer from before it evicted tokens.
            None during captured decode steps, in which the layer itself is the only reader.
        layer: the layer that stores the keys and values.
        prompt_state: the prompt state of its cache.
        keys: (B, Hkv, S, D) keys that the layer's update returned. A later attention call with the
            same tensor is a reader.
        left: how many attention calls will still read them.
    """

    context: ForwardContext | None
    layer: CompressedLayer
    prompt_state: PromptState
    keys: Tensor
    left: int


class Branches(ABC):
    """The visibility among the tokens of a forward pass that are alternatives; see `branching`.

    Attributes:
        own_visible: (Q, Q) bool, lower triangular: True if the token of the row sees the token of
            the column. Every token also sees all tokens before the pass.
    """

    own_visible: Tensor

    @abstractmethod
    def mask(self, call: Any) -> Any:
        """Return the mask for an attention call, in the form that its implementation takes.

        Args:
            call: a `snapkv.hf.attend.AttentionCall`, whose `mask` is the one for Q tokens in a row,
                or None.
        """


class Hook:
    """An object that is called during the forward passes of a thread; see `hooked`."""

    def on_prompt(self, prompt: PromptLayer) -> None:
        """Receive a layer that has read a piece of a prompt before its last piece.

        Args:
            prompt: the states of the layer, with all queries of the piece.
        """

    def on_attention(self, call: Any, attended: Any) -> None:
        """Receive an attention call after it has run.

        Args:
            call: a `snapkv.hf.attend.AttentionCall`.
            attended: the outputs and weights that it returned.
        """


class _Current(threading.local):
    """The state of this thread for its next call of a mask function or an attention function."""

    def __init__(self) -> None:
        self.context: ForwardContext | None = None
        self.padding: weakref.ref[PaddingTracker] | None = None
        self.branches: Branches | None = None
        self.hook: Hook | None = None
        self.is_recording = False
        self.is_step = False
        self.shared: list[Shared] = []


current = _Current()
"""The state of this thread: its next context, its hook and the branches of its forward pass."""


@contextlib.contextmanager
def step(*, is_recording: bool = False) -> Iterator[None]:
    """Mark the forward passes in this block as decode steps of a `generate` call.

    Only these passes may write into fixed append buffers.

    Args:
        is_recording: whether the step is being captured. It will be replayed without Python, so
            checks that read a number from the device are skipped.
    """
    before = current.is_step, current.is_recording
    current.is_step, current.is_recording = True, is_recording
    try:
        yield
    finally:
        current.is_step, current.is_recording = before


def leave(prompt_state: PromptState) -> bool:
    """Forget the context that an update of this cache has left for its attention.

    Returns:
        Whether there was one.
    """
    context = current.context
    left = context is not None and context.forward_pass.prompt_state is prompt_state
    if left:
        current.context = None
    return left


def share(context: ForwardContext, keys: Tensor) -> None:
    """Share the keys of a layer with the later layers that read them.

    The caller must call it before the layer evicts tokens.
    """
    layer, readers = context.layer, context.layer.identity.readers
    before = replace(context, layer=copy.copy(layer)) if readers else context
    _share(Shared(before, layer, context.forward_pass.prompt_state, keys, readers))


def share_heads(layer: CompressedLayer, prompt_state: PromptState, keys: Tensor) -> None:
    """Share a layer with its own attention call during captured decode steps.

    The keys that its update returned are only the append buffer; the layer holds more tokens.
    """
    _share(Shared(None, layer, prompt_state, keys, 1))


def _share(shared: Shared) -> None:
    """Remember `shared`, and forget what this and later layers shared in an earlier pass."""
    layer_idx = shared.layer.identity.layer_idx
    earlier = [each for each in current.shared if each.layer.identity.layer_idx < layer_idx]
    current.shared = [*earlier, shared] if shared.left else earlier


def take_shared(keys: Tensor) -> Shared | None:
    """Return the shared layer whose update returned this very tensor, and count the reader.

    Returns:
        None if no compressed cache has shared `keys`.
    """
    for shared in current.shared:
        if shared.keys is keys:
            shared.left -= 1
            if not shared.left:
                current.shared = [each for each in current.shared if each is not shared]
            return shared
    return None


def enter_padding(watch: PaddingTracker) -> None:
    """Leave the padding tracker of a cache for the mask that this thread makes next."""
    current.padding = weakref.ref(watch)


def take_padding() -> PaddingTracker | None:
    """Return the padding tracker that was left for the next mask, and forget it.

    Returns:
        The tracker, or None if none was left or its cache has been deleted.
    """
    padding, current.padding = current.padding, None
    return None if padding is None else padding()


@contextlib.contextmanager
def branching(branches: Branches) -> Iterator[None]:
    """Treat the tokens of this thread's forward passes in this block as alternatives.

    The caller must pass their `position_ids`, call `cache.activate_past_recording()` before the
    first pass, and call `cache.keep_among_last` after each pass to keep one branch.
    """
    current.branches = branches
    try:
        yield
    finally:
        current.branches = None


@contextlib.contextmanager
def hooked(follower: Hook) -> Iterator[None]:
    """Call the methods of `follower` during this thread's forward passes in this block."""
    before, current.hook = current.hook, follower
    try:
        yield
    finally:
        current.hook = before
