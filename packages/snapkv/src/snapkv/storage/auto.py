"""How many bits hold what is kept of a prompt, where the prompt's end chooses that by layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from snapkv.errors import InvalidArgumentError
from snapkv.ops import TokenCost
from snapkv.storage.base import TokenStore
from snapkv.storage.coded import Bits, CodedStore, KVCodes
from snapkv.storage.dense import DenseStore
from snapkv.storage.dynamic import Dynamic
from snapkv.validation import AUTO, require_fraction

CANDIDATES = (
    None,
    KVCodes(8, 8, recent_tokens=16),
    KVCodes(8, 4, recent_tokens=16),
    KVCodes(4, 4, recent_tokens=16),
)


@dataclass(frozen=True)
class AutoCodes:
    """Chooses for every layer, when a prompt has been read, how many bits hold what is kept.

    Every candidate is tried: as many tokens are chosen as it has room for, encoded, and attended to
    by the prompt's last queries. Its error is how far their attention output is from that of the
    whole prompt as it came: the sum of squares, relative to the output's own, mean over heads and
    rows, which share the bits. Within a budget of bytes the candidate of the least error is taken.
    Beside any other budget all candidates keep the same tokens: the error is then against those as
    they came, and of all candidates with at most `most_error` the one of fewest bits is taken, or
    that of the least error; the first one where a number of tokens is no less than the prompt.

    Args:
        candidates: what to choose from, at least one; None is as it came. Of equal ones the first.
        most_error: in (0, 1).

    Raises:
        InvalidArgumentError: no candidates, one with `exact_layers`, or an error out of range.
    """

    candidates: tuple[KVCodes | None, ...] = CANDIDATES
    most_error: float = 0.003

    def __post_init__(self) -> None:
        require_fraction("most_error", self.most_error, "0.003")
        if not self.candidates or any(each and each.exact_layers for each in self.candidates):
            raise InvalidArgumentError(
                f"candidates: expected at least one, None or KVCodes of the same bits in all "
                f"layers, got {self.candidates!r}; leave exact_layers out"
            )

    @property
    def exact_layers(self) -> int:
        """None by rule: a layer that needs its bits keeps them."""
        return 0


Quantize = KVCodes | AutoCodes | Bits | Literal["auto"]


def read_codes(given: Quantize | Mapping[str, Any]) -> KVCodes | AutoCodes:
    """The `AutoCodes` or `KVCodes` that a name stands for, or what a file has.

    Raises:
        InvalidArgumentError: another name.
    """
    if given == AUTO:
        return AutoCodes()
    if isinstance(given, Mapping) and "candidates" in given:
        found = [None if each is None else KVCodes.of(each) for each in given["candidates"]]
        return AutoCodes(**{**given, "candidates": tuple(found)})
    return given if isinstance(given, AutoCodes) else KVCodes.of(given)  # type: ignore[arg-type] # not "auto"


@dataclass(frozen=True, kw_only=True)
class AutoStorage:
    """Storage that becomes one of its candidates at the end of a prompt.

    Attributes:
        codes: what is chosen from, and how.
    """

    codes: AutoCodes
    is_compileable = False
    holds_as_it_came = False
    decodes = False

    @property
    def candidates(self) -> tuple[Dynamic, ...]:
        """What it may become."""
        return tuple(Dynamic(codes=each, alike=False) for each in self.codes.candidates)

    def at(self, depth: int, num_layers: int, *, latents: bool) -> "AutoStorage":
        """Itself; what a latent is expanded to is not known at a prompt's end."""
        del depth, num_layers
        if latents:
            raise InvalidArgumentError(
                "quantize: expected bits by name for a model whose layers hold latents, got "
                "'auto'; pass for instance 'int8'"
            )
        return self

    def like(self, store: TokenStore) -> Dynamic:
        """The candidate that has made a store."""
        return Dynamic(codes=store.how if isinstance(store, CodedStore) else None, alike=False)

    def empty(self) -> DenseStore:
        """A store without tokens."""
        return DenseStore()

    def finalize(
        self, store: TokenStore, kept_tokens: int, policy: str, empty: Tensor | None
    ) -> TokenStore:
        """As it is: who chose finalizes by the candidate."""
        return self.like(store).finalize(store, kept_tokens, policy, empty)

    def token_cost(self, store: TokenStore, heads: int, shortest_tokens: int) -> TokenCost:
        """As the store holds them now."""
        return self.like(store).token_cost(store, heads, shortest_tokens)

    def restored(self, kind: str, state: dict[str, Any]) -> TokenStore:
        """The store of that kind."""
        return Dynamic().restored(kind, state)
