"""In which phase of a request a layer's attention call lies."""

from enum import Enum, auto


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
