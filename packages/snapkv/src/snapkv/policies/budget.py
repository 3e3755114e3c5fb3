"""How many positions of a prompt every row, layer or head keeps.

This is the one place where a budget becomes positions. A budget is a number of tokens or a fraction
of the prompt (`TokenBudget`), bytes (`ByteBudget`), or what the votes need (`AutoBudget`).
`pyramidkv.LayerBudget` gives lower layers more of one of these; `AdaKV` and `AcrossLayers` give
some heads more.
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
from snapkv.errors import wrong
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
"""The prompt length up to which votes count in full.

In a longer prompt each position gets a smaller share of the window's attention, and so does the
position that holds the answer.
"""

Votes = Callable[[Prefix], Tensor]
"""Returns (B, H, P) float32, shares of the window's attention: infinity for positions that must be
kept, minus infinity for padding."""


def dilution(tokens: float) -> float:
    """Return the factor by which the votes in a long prompt are increased.

    It is 1 for prompts of up to `UNDILUTED_TOKENS` tokens.
    """
    return max(1.0, tokens / UNDILUTED_TOKENS)


class Budget(metaclass=WithParameters):
    """Decides how many positions before the window each row of a layer keeps.

    Attributes:
        key: the key under which a file stores a budget of this kind.
    """

    key: ClassVar[str]

    @property
    def most_tokens(self) -> int | None:
        """The largest number of tokens that a layer can keep, or None if there is no limit.

        The window is included.
        """
        return None

    def require_valid(self, window_size: int, sink_tokens: int) -> None:
        """Check that the budget is large enough for the window and the attention sinks.

        Raises:
            InvalidTypeError: a value has the wrong type.
            InvalidArgumentError: a value is out of range, or the budget is too small for what every
                layer must keep.
        """
        require_int("window_size", window_size, minimum=1)
        require_int("sink_tokens", sink_tokens, minimum=0)

    @abstractmethod
    def counts(self, prefix: Prefix, votes: Votes | None) -> list[int]:
        """Return the number of positions that each row keeps before its window.

        Every head of the row keeps this number; if heads have budgets of their own, it is their
        mean.

        Args:
            prefix: the positions before the window.
            votes: computes the votes; None to count as if every position was voted for.

        Returns:
            B numbers, none larger than the row's number of positions.
        """

    def describe(self) -> dict[str, Any]:
        """Return the parameters of the budget as JSON values."""
        return {self.key: asdict(self)}  # type: ignore[call-overload] # every kind is a dataclass

    @classmethod
    def _from_description(cls, budget: dict[str, Any]) -> Self:
        """Create a budget from a dictionary that `describe` returned.

        Raises:
            InvalidArgumentError: the dict has another key, or unknown fields; or a value is out of
                range.
            InvalidTypeError: a value has the wrong type.
        """
        known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        own = budget.get(cls.key)
        if budget.keys() != {cls.key} or not isinstance(own, dict) or not own.keys() <= known:
            raise wrong(
                "budget",
                f"expected a dictionary {{{cls.key!r}: {{...}}}} with the keys "
                f"{', '.join(sorted(known))}, but got {budget}",
                "Use a number of tokens, 'auto', or a text such as '12%' or '64MiB'",
            )
        return cls(**own)


@dataclass(frozen=True)
class TokenBudget(Budget):
    """A budget that is a number of tokens, or a fraction of the prompt.

    Attributes:
        tokens: the number of tokens, window included, or None.
        keep_ratio: the fraction of the prefix to keep, or None.
    """

    tokens: int | None
    keep_ratio: float | None

    @property
    def most_tokens(self) -> int | None:
        return self.tokens

    def require_valid(self, window_size: int, sink_tokens: int) -> None:
        require_budget(self.tokens, self.keep_ratio, window_size, sink_tokens)

    def counts(self, prefix: Prefix, votes: Votes | None) -> list[int]:
        """Return the number of positions that each row keeps before its window.

        With a number of tokens that number less the window, but no more than the row has; with
        `keep_ratio` that fraction of the row's prefix, but at least its sinks.
        """
        if self.tokens is not None:
            return [min(own, self.tokens - prefix.window_size) for own in prefix.lengths]
        assert self.keep_ratio is not None
        shares = (share_of(own, self.keep_ratio) for own in prefix.lengths)
        return list(map(max, shares, prefix.sinks))


@dataclass(frozen=True, kw_only=True)
class AutoBudget(Budget):
    """A budget that keeps every position that the window looks at.

    A layer keeps the smallest number at which every head keeps all positions whose pooled vote is
    more than `lost_vote` of the window's attention. In a prompt longer than 1,024 tokens this bound
    falls in proportion to the length. So a layer with focused heads keeps few positions, and a
    layer with dispersed heads many. The bound is on the highest vote that is lost, not on the sum
    of them.

    Args:
        lost_vote: the highest share of a query's attention, averaged over the window, that a
            position may have and be dropped, in (0, 1), in a prompt of up to 1,024 tokens.
        least: positions that every layer keeps beside the window, whatever the votes.
        most: the most tokens that a layer keeps, the window included; None for no limit.

    Raises:
        InvalidTypeError: a value has the wrong type.
        InvalidArgumentError: a value is out of range.
    """

    key: ClassVar[str] = AUTO

    lost_vote: float = LOST_VOTE
    least: int = LEAST_VOTED
    most: int | None = None

    def __post_init__(self) -> None:
        require_auto_budget(self.lost_vote, self.least, self.most)

    @classmethod
    def read(cls, budget: object) -> object:
        """Return the budget that the user has asked for, or `budget` if it is of another kind.

        "auto" and a dictionary of `describe` are converted.

        Raises:
            InvalidArgumentError: a dict describes no such budget.
            InvalidTypeError: a value in the dict has the wrong type.
        """
        if budget == AUTO:
            return cls()
        return cls._from_description(budget) if isinstance(budget, dict) else budget

    @property
    def most_tokens(self) -> int | None:
        return self.most

    def require_valid(self, window_size: int, sink_tokens: int) -> None:
        """Check that `most` is large enough for the window, the sinks and `least`.

        Raises:
            InvalidTypeError: a value has the wrong type.
            InvalidArgumentError: a value is out of range, or `most` is too small.
        """
        super().require_valid(window_size, sink_tokens)
        tokens = self.most or window_size + sink_tokens + self.least
        require_budget(tokens, None, window_size, sink_tokens)
        if tokens < window_size + self.least:
            least = f"window_size={window_size} + least={self.least}"
            problem = f"expected at least {least}, which every layer keeps, but got {tokens}"
            raise wrong("budget, most", problem, "Increase most, or reduce least")

    def counts(self, prefix: Prefix, votes: Votes | None) -> list[int]:
        """Return the number of positions that the most demanding head of each row needs.

        If heads have budgets of their own, return the mean of the heads, rounded up. The numbers
        are at least `least`, and at most what `most` and the row's length allow.

        Raises:
            InvalidArgumentError: the policy returned scores of another shape or dtype, or NaN.
        """
        wanted = prefix.lengths
        if votes is not None and prefix.slots:
            required = self.count_required(votes(prefix))
            of_row = required.sum(-1) if prefix.per_head_budget else required.amax(-1)
            heads = required.shape[-1] if prefix.per_head_budget else 1
            # Divided as integers, because a mean of floats would not be exact.
            wanted = [-(-tokens // heads) for tokens in of_row.tolist()]
        most = math.inf if self.most is None else self.most - prefix.window_size
        return [
            int(min(max(tokens, self.least), most, own))
            for tokens, own in zip(wanted, prefix.lengths, strict=True)
        ]

    def count_required(self, shares: Tensor) -> Tensor:
        """Count the positions of each head that have too many votes to be dropped.

        Args:
            shares: (B, H, P) float32, as `Votes` returns them.

        Returns:
            (B, H) int64.
        """
        tokens = (shares > -math.inf).sum(dim=-1, keepdim=True)
        bound = self.lost_vote / (tokens.float() / UNDILUTED_TOKENS).clamp(min=1.0)
        return (shares > bound).sum(dim=-1)


@dataclass(frozen=True, kw_only=True)
class ByteBudget(Budget):
    """A budget in bytes, which holds as many tokens as fit into it at the end of the prompt.

    Everything counts: codes with their scales, and what is not quantized. So with `quantize` the
    same bytes hold more tokens. Tokens after the prompt come on top, as with a budget of tokens.
    Every compressed layer gets the same bytes; the remainder goes to the first layers.

    Args:
        share: the fraction of the bytes that the row's own prompt takes in these layers of the full
            cache, in the model's dtype, in (0, 1]; "12%" stands for 0.12. A row that is too short
            for what must be kept keeps that, or everything it has.
        bytes: the bytes of one row in all of these layers together; "64MiB" stands for 2**26.

    Raises:
        InvalidTypeError: a value has the wrong type.
        InvalidArgumentError: not exactly one of the two is given, or it is out of range.
        BudgetTooSmallError: at the end of a prompt, `bytes` cannot hold the window and the sinks.
    """

    key: ClassVar[str] = "bytes"

    share: float | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        if (self.share is None) is (self.bytes is None):
            problem = f"expected either a share or a number of bytes and not both, but got {self!r}"
            raise wrong("budget", problem, "Set exactly one of the two values")
        if self.share is None:
            require_int("budget, bytes", self.bytes, minimum=1)
        else:
            require_ratio("budget, share", self.share)

    @classmethod
    def read(cls, budget: object) -> object:
        """Return the budget that the user has asked for, or `budget` if it is of another kind.

        A text such as "12%" or "64MiB" and a dictionary of `describe` are converted.

        Raises:
            InvalidArgumentError: the text names no bytes or a share out of range, or a dict
                describes no such budget.
            InvalidTypeError: a value in the dict has the wrong type.
        """
        if isinstance(budget, str):
            found = byte_budget(budget)
            return budget if found is None else cls(**found)  # type: ignore[arg-type] # by name
        if isinstance(budget, dict) and budget.keys() == {cls.key}:
            return cls._from_description(budget)
        return budget

    def counts(self, prefix: Prefix, votes: Votes | None) -> list[int]:
        """Return the number of positions that fit into the budget next to the window.

        The sinks are always included.

        Raises:
            InvalidArgumentError: it is not known how many bytes a token takes.
            BudgetTooSmallError: the bytes cannot hold the window and the sinks.
        """
        layer, window = prefix.layer, prefix.window_size
        if (cost := layer.cost) is None:
            problem = f"{self!r} cannot be used here, because the size of a token is not known"
            raise wrong("budget", problem, "Use a number of tokens instead")
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
        """Return the number of tokens of a row that fit into one layer.

        It may be more than the row has.

        Args:
            cost: what a token costs in bytes.
            own: tokens of the row.
            least: tokens that must be kept.
            depth: how many compressed layers come before this one.
            layers: how many layers are compressed.

        Raises:
            BudgetTooSmallError: `bytes` holds fewer than `least` tokens. (A share keeps `least`
                then.)
        """
        return cost.fitting_tokens(
            self.share, self.bytes, own=own, least=least, depth=depth, layers=layers
        )


def require_tokens(policy: Any) -> None:
    """Check that the budget of an evicting policy is not in bytes.

    Raises:
        InvalidArgumentError: the budget is in bytes.
    """
    if isinstance(ByteBudget.read(policy.budget), ByteBudget):
        problem = f"the method {policy.name} needs a budget in tokens, but got {policy.budget!r}"
        raise wrong("budget", problem, "Use a number of tokens, or use SnapKV instead")


def budget_of(policy: Any) -> int | AutoBudget | ByteBudget | None:
    """Return the budget of a policy, or of the policy that it wraps.

    Returns:
        The budget, or None if there is none.
    """
    while hasattr(policy, "policy"):
        policy = policy.policy
    return getattr(policy, "budget", None)


def largest_remainder(shares: Sequence[float], total: int) -> list[int]:
    """Round numbers to integers that have the same sum.

    Every number is rounded down. What is left of `total` goes to the numbers with the largest
    remainders; of equal remainders to the smaller number, then to the first.

    Args:
        shares: numbers that add up to `total`.
        total: the sum.
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
    """Return a budget for each layer, which increases or decreases linearly with depth.

    Args:
        bottom: the budget of the first layer, before rounding.
        top: the budget of the last layer, before rounding.
        mean: the exact mean of the result.
        num_layers: how many layers there are.
    """
    steps = max(num_layers - 1, 1)
    shares = [bottom - (bottom - top) * depth / steps for depth in range(num_layers)]
    if num_layers == 1:
        shares = [float(mean)]
    return tuple(largest_remainder(shares, mean * num_layers))


def counts_of_best(ranked: Tensor, totals: list[int]) -> Tensor:
    """Count how many of the best scores of a row belong to each head.

    Args:
        ranked: (B, H, P) float32.
        totals: how many of the best scores of each row to count, over all its heads.

    Returns:
        (B, H) int64.
    """
    B, H, P = ranked.shape
    most = max(totals)
    order = ranked.flatten(1).sort(dim=-1, descending=True, stable=True).indices[:, :most]
    heads = order // P
    if min(totals) < most:
        wanted = ops.on_device(totals, heads.device)[:, None]
        heads = heads.masked_fill(torch.arange(most, device=heads.device) >= wanted, H)
    counts = torch.zeros(B, H + 1, dtype=torch.int64, device=ranked.device)
    return counts.scatter_(1, heads, 1, reduce="add")[:, :H]
