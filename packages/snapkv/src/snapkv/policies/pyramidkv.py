"""PyramidKV (Cai et al., 2024): more budget for the lower layers, less for the upper ones."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

from snapkv.errors import wrong
from snapkv.policies.budget import Budget, ByteBudget, Votes, linear_budgets
from snapkv.policies.prefix import Prefix
from snapkv.policies.snapkv import SnapKV
from snapkv.validation import require_int


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV inside each layer, with budgets that decrease linearly from layer to layer.

    The mean over the layers is the budget: the top layer keeps ``(budget - window) / beta`` of the
    prefix, the bottom layer what the mean then requires, and no layer more than there is. The
    authors' code rounds every step down, which gives away up to 15 % more than the budget at small
    budgets; here the layers' budgets add up exactly. ``published=True`` is the authors' rule, with
    plain SnapKV if the prompt is shorter than twice the budget.

    Args:
        budget: mean tokens kept per KV head and layer, window included; 1024 if neither is given.
        keep_ratio: instead of `budget`, the mean fraction of the prefix to keep.
        window_size, voters, kernel_size, pooling, decay, sink_tokens: as in `SnapKV`.
        group_reduce, window_reduce: as in `SnapKV`.
        beta: how steep the pyramid is; 1 gives every layer the same budget.
        published: the authors' rounding instead of exact budgets.

    Raises:
        InvalidTypeError: a value has the wrong type.
        InvalidArgumentError: a value is out of range, or `published` with a budget in bytes.
    """

    name: ClassVar[str] = "pyramidkv"
    scores_are_votes: ClassVar[bool] = False  # it gives the layers their budgets by itself
    compares_layers: ClassVar[bool] = False

    _: KW_ONLY
    beta: int = 20
    published: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("beta", self.beta, minimum=1)
        if self.published and isinstance(self.budget, ByteBudget):
            problem = f"published=True needs a budget in tokens, but got {self.budget!r}"
            raise wrong("budget", problem, "Use a number of tokens, or remove published=True")

    @property
    def most_tokens(self) -> int | None:
        """The largest number of tokens that the bottom layer can keep: almost twice the budget.

        It is None if the budget is not a number of tokens.
        """
        mean = super().most_tokens
        return None if mean is None else self.window_size + 2 * (mean - self.window_size)

    @property
    def allocation(self) -> Budget:
        return LayerBudget(super().allocation, self.beta, self.published)


@dataclass(frozen=True)
class LayerBudget(Budget):
    """A budget that decreases linearly from the bottom layer to the top layer.

    Attributes:
        mean: the mean over all layers.
        beta: how steep the decrease is, as in `PyramidKV`.
        published: whether to round as the authors do.
    """

    mean: Budget
    beta: int
    published: bool = False

    @property
    def most_tokens(self) -> int | None:
        """The number of tokens that a layer can keep on average, window included.

        Lower layers keep more. It is None if the mean budget is not a number of tokens.
        """
        return self.mean.most_tokens

    def require_valid(self, window_size: int, sink_tokens: int) -> None:
        self.mean.require_valid(window_size, sink_tokens)

    def counts(self, prefix: Prefix, votes: Votes | None) -> list[int]:
        """Return the number of positions that each row keeps before its window in its own layer.

        Each is at most what the row has.

        Raises:
            InvalidArgumentError: the size of a token is not known, for a budget in bytes.
            BudgetTooSmallError: a budget in bytes cannot hold the window and the sinks.
        """
        layer = prefix.layer
        last = layer.at_depth(layer.num_layers - 1)  # the layer whose bytes are rounded down
        means = self.mean.counts(replace(prefix, layer=last, per_head_budget=True), votes)
        rows = zip(means, prefix.lengths, prefix.sinks, layer.depths, strict=True)
        return [
            min(own, self._of_layers(mean, own, prefix, sinks)[depth])
            for mean, own, sinks, depth in rows
        ]

    def _of_layers(self, mean: int, own: int, prefix: Prefix, sinks: int) -> Sequence[int]:
        """Return the budget of each layer for one row, from the bottom to the top.

        These are positions before the window. With `published` they may be more than the row has.

        Args:
            mean: the mean over the layers.
            own: how many positions before the window the row has.
            prefix: the positions before the window.
            sinks: how many attention sinks the row has.
        """
        layers = prefix.layer.num_layers
        if not self.published:
            return exact_budgets(mean, own, layers, self.beta, sinks)
        if own + prefix.window_size < 2 * mean:
            return [mean] * layers
        return published_budgets(mean, own, layers, self.beta)


def exact_budgets(
    mean: int, prefix_tokens: int, num_layers: int, beta: int, least: int = 0
) -> tuple[int, ...]:
    """Return linear budgets whose average over all layers is exactly `mean`.

    The top layer gets ``mean / beta`` or `least`, whichever is more. If the bottom layer would
    exceed the prefix, it gets the whole prefix, and the top layer gets as much more.

    Args:
        mean: the mean over the layers, in positions before the window, at most `prefix_tokens`.
        prefix_tokens: how many positions come before the window.
        num_layers: how many layers there are.
        beta: how steep the pyramid is.
        least: how many positions every layer must keep, at most `mean`.
    """
    bottom = min(2 * mean - max(mean / beta, least), prefix_tokens)
    return linear_budgets(bottom, 2 * mean - bottom, mean, num_layers)


def published_budgets(mean: int, prefix_tokens: int, num_layers: int, beta: int) -> list[int]:
    """Return the budget of each layer, computed as in the code of PyramidKV's authors.

    Every step from layer to layer is rounded down, so the budgets may add up to more than ``mean *
    num_layers``.

    Args:
        mean: the mean over the layers, in positions before the window.
        prefix_tokens: how many positions come before the window.
        num_layers: how many layers there are.
        beta: how steep the pyramid is.
    """
    if num_layers == 1:
        return [mean]
    top = mean // beta
    bottom = 2 * mean - top
    if bottom >= prefix_tokens:
        bottom = prefix_tokens
        top = 2 * mean - bottom
    step = (bottom - top) // (num_layers - 1)
    return [bottom - depth * step for depth in range(num_layers)]
