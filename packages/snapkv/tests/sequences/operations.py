"""What can be done to a cache, and a sequence of it."""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from snapkv.policies import Policy


class Operation:
    """One of those below; prints as it is written."""

    def __repr__(self) -> str:
        return written(self)


@dataclass(frozen=True, repr=False)
class Turn(Operation):
    """A prompt, the first one or a later one, read to its end.

    Attributes:
        tokens: of the longest row; where a prompt is open already, what is left of it is read.
        how: "call" unannounced, which after a prompt has ended is a step of many tokens; "told" by
            `expect_prompt`; then in "pieces", by "layers" or "chunked" under a cap; "generate".
        piece: tokens of a piece; for "generate", 0 for none.
        cap: tokens, where it is chunked.
        answer: tokens to generate.
        pads: in front of each row of a first prompt; there are as many rows.
    """

    tokens: int
    how: str = "told"
    piece: int = 0
    cap: int = 0
    answer: int = 1
    pads: tuple[int, ...] = (0,)


@dataclass(frozen=True, repr=False)
class Begin(Operation):
    """Announce a prompt and read the beginning of it."""

    tokens: int
    of: int
    pads: tuple[int, ...] = (0,)


@dataclass(frozen=True, repr=False)
class Step(Operation):
    """Plain calls: one token after the other, or together."""

    tokens: int = 1
    together: bool = False


@dataclass(frozen=True, repr=False)
class Crop(Operation):
    """Take back the last tokens."""

    tokens: int


@dataclass(frozen=True, repr=False)
class Repeat(Operation):
    """`batch_repeat_interleave`."""

    times: int = 2


@dataclass(frozen=True, repr=False)
class Select(Operation):
    """`batch_select_indices`; numbers beyond the last row begin again."""

    rows: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Reorder(Operation):
    """`reorder_cache`, by as many of the numbers as there are rows."""

    rows: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Copy(Operation):
    """Copy the cache; go on with the copy or the original, the other one goes on later."""

    deep: bool = False
    go_on: str = "copy"


@dataclass(frozen=True, repr=False)
class Swap(Operation):
    """Go on with the other one of two caches."""


@dataclass(frozen=True, repr=False)
class Save(Operation):
    """Save, load, and go on with what was loaded."""


@dataclass(frozen=True, repr=False)
class Reset(Operation):
    """Empty the cache."""


@dataclass(frozen=True)
class Sequence:
    """A cache and what is done to it.

    Attributes:
        model: a kind of `tests.sequences.models`.
        policy: what the cache keeps.
        operations: one after the other.
        options: of the cache.
    """

    model: str
    policy: Policy
    operations: tuple[Operation, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        done = " ".join(map(repr, self.operations))
        return f"{self.model}: {written(self.policy)}{options}: {done}"


def written(value: Any) -> str:
    """A dataclass as a call, without what is at its default or derived."""
    if not hasattr(value, "__dataclass_fields__"):
        return repr(value)
    given, usual = [], _usual(value)
    for number, each in enumerate(part for part in fields(value) if part.init):
        own = getattr(value, each.name)
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if own != default and own != getattr(usual, each.name, None):
            name = "" if number == 0 and not each.kw_only else f"{each.name}="
            given.append(f"{name}{written(own)}")
    return f"{type(value).__name__}({', '.join(given)})"


def _usual(value: Any) -> Any:
    """One of its class with nothing but defaults, None where there is none such."""
    try:
        return type(value)()
    except TypeError:
        return None
