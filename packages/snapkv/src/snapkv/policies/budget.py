"""How much of a prompt every row, layer or head keeps: the one place where a budget becomes tokens.

A budget is tokens, or a share of them (`TokenBudget`), bytes (`ByteBudget`), or what the votes ask
for (`AutoBudget`). `pyramidkv.LayerBudget` gives lower layers more of one of these, `AdaKV` and
`AcrossLayers` some heads.
"""

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from snapkv import ops
from snapkv.errors import InvalidArgumentError
from snapkv.ops import TokenCost
from snapkv.parameters import WithParameters
from snapkv.policies.prefix import Prefix
from snapkv.token_cost import share_of
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

UNDILUTED_TOKENS = 1024
"""Up to here a vote weighs the same; of a longer prompt each position gets a smaller share of the
window's attention, and so does the one that is the answer."""

Votes = Callable[[Prefix], Tensor]
"""Gives (B, H, P) float32, shares of the window's attention: inf for what must stay, -inf for
pads."""


def dilution(tokens: float) -> float:
    """By how much a vote on a prompt of so many tokens weighs more than its share says."""
    return max(1.0, tokens / UNDILUTED_TOKENS)


class Budget(metaclass=WithParameters):
    """How many positions before its window every row of a layer keeps.

    Attributes:
        key: under which a file has a budget of this kind.
    """

    key: ClassVar[str]

    @property
    def most_tokens(self) -> int | None:
        """Tokens that a layer keeps at most, window included; None where there is no limit."""
        return None

    def require_valid(self, window_size: int, sink_tokens: int) -> None:
        """Raise unless there is room for the window, the sinks and what every layer keeps."""
        require_int("window_size", window_size, minimum=1)
        require_int("sink_tokens", sink_tokens, minimum=0)

    @abstractmethod
    def counts(self, prefix: Prefix, votes: Votes | None) -> list[int]:
        """B numbers: positions that each row keeps of its prefix, at most all of them.

        Of every head as many; on average where heads have budgets of their own. Without `votes` as
        many as if all positions were voted for.
        """

    def describe(self) -> dict[str, Any]:
        """Its parameters, ready for JSON."""
        return {self.key: asdict(self)}  # type: ignore[call-overload] # every kind is a dataclass

    @classmethod
    def _described(cls, budget: dict[str, Any]) -> Self:
        """What `describe` has described."""
        known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        own = budget.get(cls.key)
        if budget.keys() != {cls.key} or not isinstance(own, dict) or not own.keys() <= known:
            raise InvalidArgumentError(
                f"budget: expected a number of tokens, 'auto', bytes as '12%' or '64MiB', or "
                f"{{{cls.key!r}: {{...}}}} with {', '.join(sorted(known))}, got {budget!r}; pass "
                "one of them"
            )
        return cls(**own)


@dataclass(frozen=True)
class TokenBudget(Budget):
    """A number of tokens, window included, or the share of the prefix to keep."""

    tokens: int | None
    keep_ratio: float | None

    @property
    def most_tokens(self) -> int | None:
        return self.tokens

    def require_valid(self, window_size: int, sink_tokens: int) -> None:
        require_budget(self.tokens, self.keep_ratio, window_size, sink_tokens)

    def counts(self, prefix: Prefix, votes: Votes | None) -> list[int]:
        """The number, or the share of each row's own prefix; the sinks at least."""
        if self.tokens is not None:
            return [min(own, self.tokens - prefix.window_size) for own in prefix.lengths]
        assert self.keep_ratio is not None
        shares = (share_of(own, self.keep_ratio) for own in prefix.lengths)
        return list(map(max, shares, prefix.sinks))


@dataclass(frozen=True, kw_only=True)
class AutoBudget(Budget):
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

    key: ClassVar[str] = AUTO

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
        return cls._described(budget) if isinstance(budget, dict) else budget

    @property
    def most_tokens(self) -> int | None:
        return self.most

    def require_valid(self, window_size: int, sink_tokens: int) -> None:
        super().require_valid(window_size, sink_tokens)
        tokens = self.most or window_size + sink_tokens + self.least
        require_budget(tokens, None, window_size, sink_tokens)
        if tokens < window_size + self.least:
            raise InvalidArgumentError(
                f"budget, most: expected at least window_size={window_size} + least={self.least}, "
                f"which every layer keeps, got {tokens}; raise most or lower least"
            )

    def counts(self, prefix: Prefix, votes: Votes | None) -> list[int]:
        """What the head asks for that needs most; the mean of what heads with their own ask for."""
        wanted = prefix.lengths
        if votes is not None and prefix.slots:
            voted = self.voted(votes(prefix))
            of_row = voted.sum(-1) if prefix.per_head_budget else voted.amax(-1)
            heads = voted.shape[-1] if prefix.per_head_budget else 1
            wanted = [-(-tokens // heads) for tokens in of_row.tolist()]  # exact: no mean in floats
        most = math.inf if self.most is None else self.most - prefix.window_size
        return [
            int(min(max(tokens, self.least), most, own))
            for tokens, own in zip(wanted, prefix.lengths, strict=True)
        ]

    def voted(self, shares: Tensor) -> Tensor:
        """How many positions of every head may not be lost by such `Votes`: (B, H) int64."""
        tokens = (shares > -math.inf).sum(dim=-1, keepdim=True)
        bound = self.lost_vote / (tokens.float() / UNDILUTED_TOKENS).clamp(min=1.0)
        return (shares > bound).sum(dim=-1)


@dataclass(frozen=True, kw_only=True)
class ByteBudget(Budget):
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
            window and the sinks.
    """

    key: ClassVar[str] = "bytes"

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
        if isinstance(budget, dict) and budget.keys() == {cls.key}:
            return cls._described(budget)
        return budget

    def counts(self, prefix: Prefix, votes: Votes | None) -> list[int]:
        """What the bytes hold beside the window; the sinks at least."""
        layer, window = prefix.layer, prefix.window_size
        if (cost := layer.cost) is None:
            raise InvalidArgumentError(
                f"budget: expected a number of tokens where it is not known what they cost, got "
                f"{self!r}; pass a number"
            )
        cost = replace(cost, uneven=cost.uneven or prefix.per_head_budget)
        least = window + prefix.sink_tokens
        fit = (
            self.tokens(cost, own, min(least, own), depth, layer.num_layers)
            for own, depth in zip(layer.row_lengths, layer.depths, strict=True)
        )
        return [
            max(0, min(own, tokens - window))
            for own, tokens in zip(prefix.lengths, fit, strict=True)
        ]

    def tokens(self, cost: TokenCost, own: int, least: int, depth: int, layers: int) -> int:
        """Tokens of a row of `own` that fit into one of so many layers, or more than it has.

        Raises:
            BudgetTooSmallError: so many bytes hold fewer than `least`; of a share those stay.
        """
        return cost.fitting_tokens(
            self.share, self.bytes, own=own, least=least, depth=depth, layers=layers
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


@functools.lru_cache(maxsize=64)
def linear_budgets(bottom: float, top: float, mean: int, num_layers: int) -> tuple[int, ...]:
    """Budgets that go linearly from the bottom layer to the top one, whose mean is exact."""
    steps = max(num_layers - 1, 1)
    shares = [bottom - (bottom - top) * depth / steps for depth in range(num_layers)]
    if num_layers == 1:
        shares = [float(mean)]
    return tuple(largest_remainder(shares, mean * num_layers))


def counts_of_best(ranked: Tensor, totals: list[int]) -> Tensor:
    """(B, H) int64: how many of a row's best, so many of all its (H, P) scores, are each head's."""
    B, H, P = ranked.shape
    most = max(totals)
    order = ranked.flatten(1).sort(dim=-1, descending=True, stable=True).indices[:, :most]
    heads = order // P
    if min(totals) < most:
        wanted = ops.on_device(totals, heads.device)[:, None]
        heads = heads.masked_fill(torch.arange(most, device=heads.device) >= wanted, H)
    counts = torch.zeros(B, H + 1, dtype=torch.int64, device=ranked.device)
    return counts.scatter_(1, heads, 1, reduce="add")[:, :H]
