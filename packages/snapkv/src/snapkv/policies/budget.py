"""How many positions of a prompt every row, layer or head keeps.

All budgets become numbers of positions in this module. A budget is a number of tokens or a fraction
of the prompt (`TokenBudget`), a number or fraction of bytes (`ByteBudget`), or chosen by the votes
(`AutoBudget`). `pyramidkv.LayerBudget` gives lower layers more of such a budget; `AdaKV` and
`AcrossLayers` give some heads more.
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
    """Return the factor by which votes must be multiplied to compare them with a short prompt's.

    It is 1 for prompts of up to `UNDILUTED_TOKENS` tokens, and above that proportional to `tokens`.
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
        """The largest number of tokens that a layer can keep, window included.

        It is None if there is no such number before the prompt is known, as by default.
        """
        return None

    def require_valid(self, window_size: int, sink_tokens: int) -> None:
        """Check that the budget is large enough for the window and the attention sinks.

        Here only `window_size` and `sink_tokens` themselves are checked; subclasses check their
        budget.

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
            prefix: the positions before the window. Its rows may be those of several stacked
                layers.
            votes: computes the votes; None to count as if every position was voted for.

        Returns:
            One number for each row, not larger than the row's number of positions.
        """

    def describe(self) -> dict[str, Any]:
        """Return the parameters of the budget as JSON values, as {key: {parameter: value}}.

        The budget must have a `key`, which a `TokenBudget` has not.
        """
        return {self.key: asdict(self)}  # type: ignore[call-overload] # every kind is a dataclass

    @classmethod
    def _from_description(cls, budget: dict[str, Any]) -> Self:
        """Create a budget from a dictionary that `describe` returned.

        Parameters that are missing get their defaults.

        Raises:
            InvalidArgumentError: the dictionary has another key, or unknown parameters; or a value
                is out of range.
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

        With a number of tokens it is that number less the window, but no more than the row has.
        With `keep_ratio` it is that fraction of the row's positions before the window, rounded
        down, but at least its sinks. `votes` are not used.
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
        """Convert "auto", or a dictionary that `describe` returned, to an `AutoBudget`.

        Returns:
            The budget; `budget` itself if it is neither "auto" nor a dictionary.

        Raises:
            InvalidArgumentError: a dictionary does not describe an `AutoBudget`, or a value is out
                of range.
            InvalidTypeError: a value in the dictionary has the wrong type.
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
        """Return the number of positions that each row needs before its window.

        It is the number that the most demanding head of the row needs. If heads have budgets of
        their own, it is the mean of the heads, rounded up. The numbers are at least `least`, and at
        most what `most` and the row's length allow.

        Args:
            prefix: the positions before the window.
            votes: computes the votes; None to count all positions of the row.

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

        These are the positions whose share is above `lost_vote`, or in a prompt with more than
        `UNDILUTED_TOKENS` positions above a bound that falls in proportion. `least` and `most` are
        not applied.

        Args:
            shares: (B, H, P) float32, as `Votes` returns them: minus infinity for padding.

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
        """Convert a text such as "64MiB", or a dictionary of `describe`, to a `ByteBudget`.

        Returns:
            The budget; `budget` itself if it is anything else, such as another text.

        Raises:
            InvalidArgumentError: a percentage or a number of bytes is out of range, or a dictionary
                with the key "bytes" describes no budget.
            InvalidTypeError: a value in the dictionary has the wrong type.
        """
        if isinstance(budget, str):
            found = byte_budget(budget)
            return budget if found is None else cls(**found)  # type: ignore[arg-type] # by name
        if isinstance(budget, dict) and budget.keys() == {cls.key}:
            return cls._from_description(budget)
        return budget

    def counts(self, prefix: Prefix, votes: Votes | None) -> list[int]:
        """Return the number of positions that fit into the budget next to the window.

        It is never more than the row has. The sinks are always included; `votes` are not used.

        Raises:
            InvalidArgumentError: `prefix.layer` does not say how many bytes a token takes.
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
        """Return the number of tokens of a row that fit into one layer, window included.

        It may be more than the row has.

        Args:
            cost: what a token costs in bytes.
            own: tokens of the row.
            least: tokens that must be kept.
            depth: how many compressed layers come before this one.
            layers: how many layers are compressed.

        Raises:
            BudgetTooSmallError: `bytes` holds fewer than `least` tokens. (With a share the result
                is `least` instead.)
        """
        return cost.fitting_tokens(
            self.share, self.bytes, own=own, least=least, depth=depth, layers=layers
        )


def require_tokens(policy: Any) -> None:
    """Check that the `budget` of an evicting policy is not in bytes.

    Raises:
        InvalidArgumentError: the budget is a `ByteBudget`, or a text that stands for one.
    """
    if isinstance(ByteBudget.read(policy.budget), ByteBudget):
        problem = f"the method {policy.name} needs a budget in tokens, but got {policy.budget!r}"
        raise wrong("budget", problem, "Use a number of tokens, or use SnapKV instead")


def budget_of(policy: Any) -> int | AutoBudget | ByteBudget | None:
    """Return the budget of a policy, or of the policy that it wraps.

    Returns:
        The budget as the policy holds it; None if it has no budget, or a `keep_ratio` instead.
    """
    while hasattr(policy, "policy"):
        policy = policy.policy
    return getattr(policy, "budget", None)


def largest_remainder(shares: Sequence[float], total: int) -> list[int]:
    """Round numbers to integers that add up to `total`.

    Every number is rounded down. What is left of `total` is added, one each, to the numbers with
    the largest remainders; of equal remainders to the smaller number, then to the first.

    Args:
        shares: numbers that add up to `total`; this is not checked.
        total: the sum.

    Returns:
        The integers in the order of `shares`.
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
        top: the budget of the last layer, before rounding. ``bottom + top`` must be ``2 * mean``.
        mean: the exact mean of the result.
        num_layers: how many layers there are. A single layer gets `mean`.

    Returns:
        Integers that add up to ``mean * num_layers``.
    """
    steps = max(num_layers - 1, 1)
    shares = [bottom - (bottom - top) * depth / steps for depth in range(num_layers)]
    if num_layers == 1:
        shares = [float(mean)]
    return tuple(largest_remainder(shares, mean * num_layers))


def counts_of_best(ranked: Tensor, totals: list[int]) -> Tensor:
    """Count how many of the best scores of a row belong to each head.

    Of equal scores the one in the earlier head counts, then the one at the earlier position.

    Args:
        ranked: (B, H, P) float32. Padding must be minus infinity.
        totals: how many of the best scores of each row to count, over all its heads; no more than
            the row has without padding.

    Returns:
        (B, H) int64, which add up to the row's total.
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
