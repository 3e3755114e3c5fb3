"""The operations on a cache, and a sequence of them."""

from dataclasses import dataclass, field
from typing import Any

from snapkv.policies import Policy


class Operation:
    """The base class of the operations below."""


@dataclass(frozen=True)
class Turn(Operation):
    """Read the first or a later prompt to its end.

    Attributes:
        tokens: length of the longest row; if a prompt is already open, the rest of it is read.
        how: "call" unannounced, which after a prompt has ended is a step of many tokens; "told" by
            `expect_prompt`; then in "pieces", by "layers"; "generate"; "context", the
            first one by `read_context`.
        piece: tokens of a piece; for "generate", 0 for none.
        answer: tokens to generate.
        pads: padding in front of each row of a first prompt; also sets the number of rows.
    """

    tokens: int
    how: str = "told"
    piece: int = 0
    answer: int = 1
    pads: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Begin(Operation):
    """Announce a prompt and read only its beginning."""

    tokens: int
    of: int
    pads: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Step(Operation):
    """Read tokens in plain calls, one by one or together."""

    tokens: int = 1
    together: bool = False


@dataclass(frozen=True)
class Crop(Operation):
    """Remove the last tokens with `cache.crop`."""

    tokens: int


@dataclass(frozen=True)
class Drop(Operation):
    """Drop spans of tokens, as far as they have been read.

    Attributes:
        spans: spans in the tokens of each row.
        shift: number of tokens by which the spans move to the right from row to row.
    """

    spans: tuple[tuple[int, int], ...]
    shift: int = 0


@dataclass(frozen=True)
class Rows(Operation):
    """Select rows with the cache method `how`; numbers beyond the last row wrap around.

    Attributes:
        how: "reorder_cache", by as many of the numbers as there are rows; "batch_select_indices",
            or "batch_repeat_interleave", by one number.
        numbers: of rows, or how often each is repeated.
    """

    how: str
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Copy(Operation):
    """Copy the cache and continue with the copy or the original; the other one continues later."""

    deep: bool = False
    go_on: str = "copy"


@dataclass(frozen=True)
class Swap(Operation):
    """Continue with the other one of two caches."""


@dataclass(frozen=True)
class Save(Operation):
    """Save and load the cache, and continue with the loaded one."""


@dataclass(frozen=True)
class Reset(Operation):
    """Empty the cache."""


@dataclass(frozen=True)
class Sequence:
    """A kind of model, a policy and options for a cache, and the operations on it.

    Attributes:
        recorded: whether the steps of `generate` are captured, with small append buffers.
        waiting_bytes: limit for the bytes of layers that wait to select together.
    """

    model: str
    policy: Policy
    operations: tuple[Operation, ...]
    options: dict[str, Any] = field(default_factory=dict)
    recorded: bool = False
    waiting_bytes: int = 0
