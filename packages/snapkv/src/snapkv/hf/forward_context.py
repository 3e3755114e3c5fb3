"""The forward context: what a cache, its masks and attention tell each other, per thread.

`Cache.update` knows the layer but not the queries; the attention function knows the queries but not
the layer. Both run in the same thread, one right after the other. In the same way a cache that is
asked how large a mask must be leaves its `PaddingTracker` for the function that then makes it, and
a forward pass over alternatives says which token sees which.
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

from snapkv.cache.layer import CompressedLayer, Turns
from snapkv.cache.prompt_state import PaddingTracker, PromptState
from snapkv.hf.fidelity import VoteCheck
from snapkv.policies import PromptLayer


class Phase(Enum):
    """What an attention call reads; one function of `snapkv.hf.attention` for each."""

    READ_PROMPT = auto()  # a part of a prompt, whose end is still to come
    END_PROMPT = auto()  # the end of a prompt, all of which the layer holds
    READ_TURN = auto()  # a later prompt, or a part of it, over what was kept
    END_TURN = auto()  # the end of a later prompt that votes on what is stored
    DECODE = auto()  # tokens after the prompt


def phase_of(seen_tokens: int, new_tokens: int, prompt_end: int, turn: Turns | None) -> Phase:
    """The phase of a call that has just appended tokens; `seen_tokens` counts them.

    `turn` is None where the layer holds all that it has seen: then the end of a prompt is that of
    the whole conversation. Where something was dropped, a later prompt is read over the rest.

    | begins before the end | reaches it | turn | phase |
    |---|---|---|---|
    | no | | | DECODE |
    | yes | no | None | READ_PROMPT |
    | yes | yes | None | END_PROMPT |
    | yes | no | any | READ_TURN |
    | yes | yes | "append" | READ_TURN |
    | yes | yes | "compress", "recall" | END_TURN |
    """
    if seen_tokens - new_tokens >= prompt_end:
        return Phase.DECODE
    reaches_end = seen_tokens >= prompt_end
    if turn is None:
        return Phase.END_PROMPT if reaches_end else Phase.READ_PROMPT
    return Phase.END_TURN if reaches_end and turn != "append" else Phase.READ_TURN


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What is the same for all layers of one forward pass; the first compressed layer makes it.

    If a prompt is read layer by layer, each piece of each layer is a pass of its own.

    Attributes:
        prompt_state: what the cache was told of the prompt or turn.
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
        has_own_mask: whether a mask that comes with this pass was made by the user.
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
    """A layer whose new tokens are already stored, for the attention call that follows.

    Attributes:
        layer: the layer.
        keys: the keys that the layer has handed out.
        values: the values that the layer has handed out.
        forward_pass: what the layer shares with the other layers of the forward pass.
        phase: what the attention call reads, before the layer changes.
    """

    layer: CompressedLayer
    keys: Tensor
    values: Tensor
    forward_pass: Pass
    phase: Phase

    def take_back(self) -> None:
        """Undo the update of a layer whose attention is refused; earlier layers stay as they are.

        Changes the layer and the state of the prompt in place.
        """
        layer, seen, state = self.layer, self.layer.seen_tokens, self.forward_pass.prompt_state
        layer.crop(-self.forward_pass.new_tokens)
        state.forget_taken_back(seen)
        state.chooser.unread_layers = ()
        state.is_broken = layer.identity.layer_idx > 0 or bool(layer.other_states)


@dataclass(eq=False)
class Shared:
    """Keys and values that a layer has handed out, for later layers which attend to the same.

    `context` is that of the layer as it was when it attended itself, before it chose what to keep;
    `layer` is the one that goes on. `left` counts the layers that are still to come. Where room is
    lent there is none, and the layer that has stored is still to come.
    """

    context: ForwardContext | None
    layer: CompressedLayer
    prompt_state: PromptState
    keys: Tensor  # by which its readers are known
    left: int


class Branches(ABC):
    """Which of a pass's own tokens see each other, where they are alternatives; see `branching`.

    Attributes:
        own_visible: (Q, Q) bool, lower triangular: which of the Q tokens of the pass each of them
            sees. All see the tokens before the pass.
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
    """Follows the forward passes of a thread; see `hooked`."""

    def on_prompt(self, prompt: PromptLayer) -> None:
        """A layer has read a part of a prompt that goes on; `prompt` has the queries of it all."""

    def on_attention(self, call: Any, attended: Any) -> None:
        """An attention call, a `snapkv.hf.attend.AttentionCall`, has returned that."""


class _Current(threading.local):
    """What is left for this thread's next call of a mask function or an attention function."""

    def __init__(self) -> None:
        self.context: ForwardContext | None = None
        self.padding: weakref.ref[PaddingTracker] | None = None
        self.branches: Branches | None = None
        self.hook: Hook | None = None
        self.is_recording = False
        self.is_step = False
        self.shared: list[Shared] = []


current = _Current()
"""Of this thread, likewise what follows its forward passes, and the branches that one reads."""


@contextlib.contextmanager
def step(*, is_recording: bool = False) -> Iterator[None]:
    """Within this block, masks and passes are of the `generate` that has lent a cache room.

    One that is recorded will be run again without Python, so that it may ask for no number.
    """
    before = current.is_step, current.is_recording
    current.is_step, current.is_recording = True, is_recording
    try:
        yield
    finally:
        current.is_step, current.is_recording = before


def leave(prompt_state: PromptState) -> bool:
    """Drop the context that a cache has left; return whether there was one."""
    context = current.context
    left = context is not None and context.forward_pass.prompt_state is prompt_state
    if left:
        current.context = None
    return left


def share(context: ForwardContext, keys: Tensor) -> None:
    """Before a layer attends and chooses: let its readers, if any, attend to the same."""
    layer, readers = context.layer, context.layer.identity.readers
    before = replace(context, layer=copy.copy(layer)) if readers else context
    _share(Shared(before, layer, context.forward_pass.prompt_state, keys, readers))


def share_heads(layer: CompressedLayer, prompt_state: PromptState, keys: Tensor) -> None:
    """Before a layer attends that is lent room: heads hold more than the keys it is handed."""
    _share(Shared(None, layer, prompt_state, keys, 1))


def _share(shared: Shared) -> None:
    """What that layer or a later one has shared before is of an earlier pass."""
    layer_idx = shared.layer.identity.layer_idx
    earlier = [each for each in current.shared if each.layer.identity.layer_idx < layer_idx]
    current.shared = [*earlier, shared] if shared.left else earlier


def take_shared(keys: Tensor) -> Shared | None:
    """Whose keys a layer attends to that has stored none; None for another cache's."""
    for shared in current.shared:
        if shared.keys is keys:
            shared.left -= 1
            if not shared.left:
                current.shared = [each for each in current.shared if each is not shared]
            return shared
    return None


def enter_padding(watch: PaddingTracker) -> None:
    """Leave a cache's watch for the mask that this thread makes next."""
    current.padding = weakref.ref(watch)


def take_padding() -> PaddingTracker | None:
    """Whose watch a mask is made for, if any; it is left only once, and not kept alive."""
    padding, current.padding = current.padding, None
    return None if padding is None else padding()


@contextlib.contextmanager
def branching(branches: Branches) -> Iterator[None]:
    """Within this block, the tokens of this thread's forward passes are alternatives.

    The caller must pass their `position_ids`, call `cache.activate_past_recording()` before, and
    `cache.keep_among_last` after each pass, which keeps one branch.
    """
    current.branches = branches
    try:
        yield
    finally:
        current.branches = None


@contextlib.contextmanager
def hooked(follower: Hook) -> Iterator[None]:
    """Within this block, it is told of every attention call of this thread."""
    before, current.hook = current.hook, follower
    try:
        yield
    finally:
        current.hook = before
