"""How much of a prompt a layer keeps: tokens, bytes, a fraction, or what its votes ask for."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from torch import Tensor

from snapkv.errors import BudgetTooSmallError, InvalidArgumentError
from snapkv.ops import TokenCost
from snapkv.validation import (
    AUTO,
    LEAST_VOTED,
    LOST_VOTE,
    byte_budget,
    require_auto_budget,
    require_budget,
    require_int,
    require_ratio,
)

if TYPE_CHECKING:
    from snapkv.policies.states import PromptLayer

BYTES = "bytes"
"""Under which a file has a budget of bytes."""

UNDILUTED_TOKENS = 1024
"""Up to here a vote weighs the same; of a longer prompt each position gets a smaller share of the
window's attention, and so does the one that is the answer."""


def dilution(tokens: float) -> float:
    """By how much a vote on a prompt of so many tokens weighs more than its share says."""
    return max(1.0, tokens / UNDILUTED_TOKENS)


@dataclass(frozen=True, kw_only=True)
class AutoBudget:
    """As many positions as it takes to lose none that the window looked at.

    A layer keeps the smallest number at which, in every head, all positions are kept whose pooled
    vote is more than `lost_vote` of the window's attention; of a prompt longer than 1,024 tokens,
    more than as much less as it is longer. So a layer with focused heads keeps few, one with
    dispersed heads many. The bound is on the highest vote that is lost, not on the sum of them.

    Args:
        lost_vote: the highest share of a query's attention, mean over the window, that a position
            may have and be dropped, in (0, 1), in a prompt of up to 1,024 tokens.
        least: positions that every layer keeps beside the window, whatever the votes.
        most: tokens that no layer keeps more of, the window included; None for no limit.
    """

    lost_vote: float = LOST_VOTE
    least: int = LEAST_VOTED
    most: int | None = None

    def __post_init__(self) -> None:
        require_auto_budget(self.lost_vote, self.least, self.most)

    @classmethod
    def read(cls, budget: object) -> object:
        """The budget that "auto", or what `describe` gives, stands for; anything else as it is."""
        if budget == AUTO:
            return cls()
        if not isinstance(budget, dict):
            return budget
        known = {field.name for field in fields(cls)}
        own = budget.get(AUTO)
        if budget.keys() != {AUTO} or not isinstance(own, dict) or not own.keys() <= known:
            raise InvalidArgumentError(
                f"budget: expected a number of tokens, 'auto' or {{'auto': {{...}}}} with "
                f"{', '.join(sorted(known))}, got {budget!r}; pass one of them"
            )
        return cls(**own)

    def describe(self) -> dict[str, Any]:
        """Its parameters, ready for JSON."""
        return {AUTO: asdict(self)}

    def voted(self, shares: Tensor) -> Tensor:
        """How many positions of every head may not be lost: (B, H) int64.

        `shares` are pooled votes as shares of the window's attention, (B, H, P) float32: infinity
        for what must stay, minus infinity for pads.
        """
        tokens = (shares > -math.inf).sum(dim=-1, keepdim=True)
        bound = self.lost_vote / (tokens.float() / UNDILUTED_TOKENS).clamp(min=1.0)
        return (shares > bound).sum(dim=-1)

    def within(self, voted: int, prefix_tokens: int, window_size: int) -> int:
        """Positions of a prefix to keep, where so many may not be lost."""
        most = prefix_tokens if self.most is None else max(self.most - window_size, 0)
        return min(max(voted, self.least), most, prefix_tokens)


@dataclass(frozen=True, kw_only=True)
class ByteBudget:
    """As many tokens as the bytes hold that keys and values take at the end of a prompt.

    All of them count: codes with their scales, and what stays as it came. So with `quantize` the
    same bytes hold more tokens. Tokens behind the prompt come on top, as with a budget of tokens.
    Every compressed layer gets the same bytes; what would be left over goes to the first ones.

    Args:
        share: of the bytes that the row's own prompt takes in these layers of the full cache, in
            the model's dtype, in (0, 1]; "12%" stands for 0.12. A row too short for what must stay
            keeps that, or all it has.
        bytes: of one row in all of them together; "64MiB" stands for 2**26.

    Raises:
        InvalidArgumentError: not one of them, or out of range.
        BudgetTooSmallError: at the end of a prompt, too few `bytes` for what must stay: the
            window, the sinks, and the tokens that `quantize` leaves as they came.
    """

    share: float | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        if (self.share is None) is (self.bytes is None):
            raise InvalidArgumentError(
                f"budget: expected either a share or bytes, got {self!r}; pass one of them"
            )
        if self.share is None:
            require_int("budget, bytes", self.bytes, minimum=1)
        else:
            require_ratio("budget, share", self.share)

    @classmethod
    def read(cls, budget: object) -> object:
        """The budget that "12%", "64MiB", or what `describe` gives, stands for; or as it is."""
        if isinstance(budget, str):
            found = byte_budget(budget)
            return budget if found is None else cls(**found)  # type: ignore[arg-type] # by name
        if not isinstance(budget, dict) or budget.keys() != {BYTES}:
            return budget
        own = budget[BYTES]
        if not isinstance(own, dict) or not own.keys() <= {"share", "bytes"}:
            raise InvalidArgumentError(
                f"budget: expected {{'bytes': {{...}}}} with share or bytes, got {budget!r}; pass "
                "for instance '12%' or '64MiB'"
            )
        return cls(**own)

    def describe(self) -> dict[str, Any]:
        """Its parameters, ready for JSON."""
        return {BYTES: asdict(self)}

    def rows(self, layer: "PromptLayer", least_tokens: int) -> list[int]:
        """B numbers: tokens of each row that fit; at least so many, or all it has."""
        if layer.token_cost is None:
            raise InvalidArgumentError(
                f"budget: expected a number of tokens where it is not known what they cost, got "
                f"{self!r}; pass a number"
            )
        cost = layer.token_cost(min(layer.row_lengths))
        least = max(least_tokens, cost.exact_tokens)
        return [
            self.tokens(cost, tokens, min(least, tokens), layer.depth, layer.num_layers)
            for tokens in layer.row_lengths
        ]

    def tokens(self, cost: TokenCost, own: int, least: int, depth: int, layers: int) -> int:
        """Tokens of a row of `own` that fit into one of so many layers, or more than it has.

        Raises:
            BudgetTooSmallError: so many bytes hold fewer than `least`; of a share those stay.
        """
        full = cost.full_bytes * own * layers
        given = self.bytes if self.share is None else share_of(full, self.share)
        assert given is not None
        needed = layers * cost.held_bytes(least)
        if not cost.alike:  # as many bytes of its own for each layer
            given, depth, layers = given * (depth + 1) // layers - given * depth // layers, 0, 1
        blocks = (given - layers * cost.exact_tokens * cost.token_bytes) // cost.block_bytes
        fewest = cost.exact_tokens - cost.spare_tokens
        if fewest + blocks // layers * cost.block_tokens < least:
            self._require_share(own, least, needed)
            return least
        more = -blocks * depth // layers - -blocks * (depth + 1) // layers
        return fewest + more * cost.block_tokens

    def _require_share(self, own: int, least: int, needed: int) -> None:
        if self.share is None:
            raise BudgetTooSmallError(
                f"budget: expected at least {needed:,} bytes for {least} of {own:,} prompt tokens, "
                "which are the window, the sinks and what stays as it came, got "
                f"{self.bytes:,} bytes; raise it, lower those, or pass a share or a number of "
                "tokens"
            )


def require_tokens(policy: Any) -> None:
    """Raise where a policy that evicts while generating is given bytes."""
    if isinstance(ByteBudget.read(policy.budget), ByteBudget):
        raise InvalidArgumentError(
            f"budget: expected a number of tokens with {policy.name}, which evicts while "
            f"generating, got {policy.budget!r}; pass a number, or use SnapKV"
        )


def budget_of(policy: Any) -> int | AutoBudget | ByteBudget | None:
    """The budget of a policy, or of one that it wraps; None where there is none."""
    while hasattr(policy, "policy"):
        policy = policy.policy
    return getattr(policy, "budget", None)


@dataclass(frozen=True)
class Budget:
    """What a layer keeps beside the window: `row` is where any budget becomes tokens.

    Attributes:
        limit: tokens, window included, or bytes, or a budget that the votes choose; None where
            there is a `keep_ratio`.
        keep_ratio: the fraction of the prefix to keep.
        window_size: the last tokens of the prompt, always kept.
    """

    limit: int | AutoBudget | ByteBudget | None
    keep_ratio: float | None
    window_size: int

    def require_valid(self, sink_tokens: int) -> None:
        """Raise unless it has room for the window, the sinks and what every layer keeps."""
        require_int("window_size", self.window_size, minimum=1)
        require_int("sink_tokens", sink_tokens, minimum=0)
        auto = self.limit
        if isinstance(auto, ByteBudget):  # the prompt's end will tell
            auto = self.window_size + sink_tokens + 1
        if not isinstance(auto, AutoBudget):
            require_budget(auto, self.keep_ratio, self.window_size, sink_tokens)
            return
        tokens = auto.most or self.window_size + sink_tokens + auto.least
        require_budget(tokens, self.keep_ratio, self.window_size, sink_tokens)
        if tokens < self.window_size + auto.least:
            raise InvalidArgumentError(
                f"budget, most: expected at least window_size={self.window_size} + "
                f"least={auto.least}, which every layer keeps, got {tokens}; raise most or lower "
                "least"
            )

    @property
    def most_tokens(self) -> int | None:
        """Tokens that no layer keeps more of, window included; None where there is no limit."""
        if isinstance(self.limit, ByteBudget):
            return None
        return self.limit.most if isinstance(self.limit, AutoBudget) else self.limit

    def row(self, prefix_tokens: int, wanted: int) -> int:
        """Positions that a row keeps of so many before the window.

        `wanted` are those that may not be lost where the votes choose, and the tokens that fit
        where bytes do.
        """
        if self.keep_ratio is not None:
            return share_of(prefix_tokens, self.keep_ratio)
        if isinstance(self.limit, AutoBudget):
            return self.limit.within(wanted, prefix_tokens, self.window_size)
        tokens = wanted if isinstance(self.limit, ByteBudget) else self.limit
        assert tokens is not None
        return max(0, min(prefix_tokens, tokens - self.window_size))


def share_of(tokens: int, share: float) -> int:
    """A share of tokens or bytes, rounded down as it is written: 0.29 of 100 are 29."""
    return int(Fraction(str(share)) * tokens)


def largest_remainder(shares: Sequence[float], total: int) -> list[int]:
    """Round shares, which add up to `total`, to whole numbers that do.

    Every share is rounded down; the slots left over go to the largest remainders, of equal ones to
    the smaller share, then to the first.
    """
    whole = [math.floor(share + 1e-9) for share in shares]
    order = sorted(
        range(len(shares)), key=lambda i: (-round(shares[i] - whole[i], 9), shares[i], i)
    )
    for index in order[: total - sum(whole)]:
        whole[index] += 1
    return whole
