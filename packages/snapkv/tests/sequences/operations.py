"""The operations on a cache, and a sequence of them."""

from dataclasses import dataclass, field
from typing import Any

from snapkv.policies import Policy


class Operation:
    """One of those below."""


@dataclass(frozen=True)
class Turn(Operation):
    """A prompt, the first one or a later one, read to its end.

    Attributes:
        tokens: of the longest row; where a prompt is open already, what is left of it is read.
        how: "call" unannounced, which after a prompt has ended is a step of many tokens; "told" by
            `expect_prompt`; then in "pieces", by "layers"; "generate"; "context", the
            first one by `read_context`.
        piece: tokens of a piece; for "generate", 0 for none.
        answer: tokens to generate.
        pads: in front of each row of a first prompt; there are as many rows.
    """

    tokens: int
    how: str = "told"
    piece: int = 0
    answer: int = 1
    pads: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Begin(Operation):
    """Announce a prompt and read the beginning of it."""

    tokens: int
    of: int
    pads: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Step(Operation):
    """Plain calls: one token after the other, or together."""

    tokens: int = 1
    together: bool = False


@dataclass(frozen=True)
class Crop(Operation):
    """Take back the last tokens."""

    tokens: int


@dataclass(frozen=True)
class Drop(Operation):
    """Drop spans as far as they were seen.

    Attributes:
        spans: of each row's own tokens.
        shift: by how many tokens they stand further right in every later row.
    """

    spans: tuple[tuple[int, int], ...]
    shift: int = 0


@dataclass(frozen=True)
class Rows(Operation):
    """Take rows by the cache's method of that name; numbers beyond the last row begin again.

    Attributes:
        how: "reorder_cache", by as many of the numbers as there are rows; "batch_select_indices",
            or "batch_repeat_interleave", by one number.
        numbers: of rows, or how often each is repeated.
    """

    how: str
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Copy(Operation):
    """Copy the cache; go on with the copy or the original, the other one goes on later."""

    deep: bool = False
    go_on: str = "copy"


@dataclass(frozen=True)
class Swap(Operation):
    """Go on with the other one of two caches."""


@dataclass(frozen=True)
class Save(Operation):
    """Save, load, and go on with what was loaded."""


@dataclass(frozen=True)
class Reset(Operation):
    """Empty the cache."""


@dataclass(frozen=True)
class Sequence:
    """A cache of that kind of model, policy and options, and what is done to it.

    Attributes:
        recorded: whether the steps of `generate` are recorded, in room that runs out soon.
        waiting_bytes: how much layers may hold that wait to choose together.
    """

    model: str
    policy: Policy
    operations: tuple[Operation, ...]
    options: dict[str, Any] = field(default_factory=dict)
    recorded: bool = False
    waiting_bytes: int = 0
