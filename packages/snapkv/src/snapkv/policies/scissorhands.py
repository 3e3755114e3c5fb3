"""Scissorhands (Liu et al., NeurIPS 2023): tokens that were pivotal lately stay pivotal."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from snapkv import ops
from snapkv.errors import wrong
from snapkv.policies.budget import linear_budgets, require_tokens
from snapkv.policies.recent import BestAndRecent
from snapkv.policies.spans import Spans
from snapkv.policies.states import DecodeStep, LayerStates
from snapkv.validation import DEFAULT_BUDGET, require_choice, require_int, require_share


@dataclass(frozen=True)
class Scissorhands(BestAndRecent):
    """A policy that drops many tokens at once, namely those that seldom received much attention.

    Whenever a head holds more than its budget, it counts for every token how many of the last
    `history` queries paid it more attention than the uniform level. It keeps the `recent` last
    tokens and drops the `drop` older ones with the lowest counts (Alg. 2), of equal counts the
    oldest first. So it holds between ``budget - drop + 1`` and ``budget`` tokens; ``drop=1`` keeps
    to the budget at every step. A prompt read in one pass is cut to the budget once.

    The paper leaves some choices open. The printed Alg. 2 contradicts itself; this is the reading
    in which pivotal tokens stay. The counts are computed again at every eviction, by the last
    queries over the tokens that are left, so the layer keeps `history` queries. A small `drop` is
    slow, because every eviction compares all of these with all tokens. Heads that share a KV head
    add their counts. The authors' code hides tokens inside the prompt instead and has no budget.

    Args:
        budget: tokens kept per KV head and layer, at most, on average over the layers.
        history: how many of the last queries count.
        recent: how many of the last tokens are never dropped, at least 1.
        drop: how many to drop at once; half of the layer's budget by default, as in the paper, or
            what `recent` leaves of it.
        threshold: the uniform level: 1 over the "tokens" of the sequence so far, as in the paper,
            or over the "slots" held before the eviction.
        gamma: how much more the upper layers keep than the lower ones: budgets rise linearly from
            ``budget * (1 - gamma)`` to ``budget * (1 + gamma)``. The paper gives no formula.

    Raises:
        InvalidTypeError: a value has the wrong type.
        InvalidArgumentError: a value is out of range, the budget is in bytes, or the lowest layer
            cannot hold its `recent` tokens and those to drop.
    """

    name: ClassVar[str] = "scissorhands"

    budget: int = DEFAULT_BUDGET
    _: KW_ONLY
    history: int = 400
    recent: int = 10
    drop: int | None = None
    threshold: Literal["tokens", "slots"] = "tokens"
    gamma: float = 0.0

    def __post_init__(self) -> None:
        require_tokens(self)
        for name in ("budget", "history", "recent"):
            require_int(name, getattr(self, name), minimum=1)
        if self.drop is not None:
            require_int("drop", self.drop, minimum=1)
        require_choice("threshold", self.threshold, ("tokens", "slots"))
        require_share("gamma", self.gamma, "0.5")
        self._check_room(self.recent + (self.drop or 1))

    def _check_room(self, least: int) -> None:
        """Check that the lowest layer, which has the smallest budget, can hold enough tokens.

        Args:
            least: how many tokens it must hold.

        Raises:
            InvalidArgumentError: its budget is smaller.
        """
        parts = f"more than recent={self.recent} tokens"
        if self.drop is not None:
            parts = f"at least recent={self.recent} + drop={self.drop} tokens"
        if self.budget < least:
            problem = f"expected a budget of {parts}, but got {self.budget}"
            raise wrong("budget", problem, f"Use a budget of at least {least}")
        if self.max_decode_tokens < least:
            lowest = f"with gamma={self.gamma}, a layer keeps only {self.max_decode_tokens} tokens"
            problem = f"{lowest} of budget={self.budget}, but it needs {parts}"
            raise wrong("gamma", problem, "Reduce gamma, or increase the budget")

    @property
    def query_tokens(self) -> int:
        return self.history

    @property
    def history_tokens(self) -> int:
        return self.history

    @property
    def max_decode_tokens(self) -> int:
        # The budget of the lowest layer, which is the smallest.
        return math.floor(self.budget * (1 - self.gamma) + 1e-9)

    @property
    def recent_tokens(self) -> int:
        return self.recent

    def of_prompt(self, tokens: int, states: LayerStates) -> int:
        return min(tokens, self._layer_budget(states))

    def of_step(self, tokens: int, states: LayerStates) -> int:
        budget = self._layer_budget(states)
        return tokens if tokens <= budget else min(tokens - self._layer_drop(budget), budget)

    def rate(self, states: LayerStates) -> Tensor:
        """Rank the tokens by how often they received more attention than the uniform level.

        If two counts are equal, the newer token ranks higher.

        Returns:
            (B, num_kv_heads, S) float32, the ranks from 0.
        """
        tokens, pads, seen_tokens = states.row_tokens, states.pad_tokens, states.keys.shape[2]
        columns = torch.arange(seen_tokens, device=tokens.device)[None, None]
        if isinstance(states, DecodeStep):
            columns, seen_tokens = states.columns, states.seen_tokens
        if self.threshold == "tokens":
            tokens = seen_tokens - (torch.zeros_like(tokens) if pads is None else pads)
        counts = ops.count_above(
            states, 1.0 / tokens.float(), columns=columns, seen_tokens=seen_tokens
        )
        counts = ops.reduce_group(counts, states.num_kv_heads, "sum")
        return counts.argsort(dim=-1, stable=True).argsort(dim=-1).float()

    def require_protection(self, spans: Spans) -> None:
        """Check that the lowest layer can hold all protected tokens right after an eviction.

        Raises:
            InvalidArgumentError: the spans have more tokens than fit beside the recent tokens.
        """
        budget = self.max_decode_tokens
        room = budget + 1 - self._layer_drop(budget) - self.recent
        beside = f"next to its {self.recent} recent tokens when it has dropped"
        self._require_all_spans(spans, room, beside)

    def _layer_budget(self, layer: LayerStates) -> int:
        return layer_budgets(self.budget, self.gamma, layer.num_layers)[layer.depth]

    def _layer_drop(self, budget: int) -> int:
        return min(budget // 2, budget - self.recent) if self.drop is None else self.drop


def layer_budgets(budget: int, gamma: float, num_layers: int) -> tuple[int, ...]:
    """Return a budget for each layer, which increases from the bottom layer to the top layer.

    Args:
        budget: the mean over the layers.
        gamma: as in `Scissorhands`; 0 gives every layer the same budget.
        num_layers: how many layers there are.

    Returns:
        Integers that add up to ``budget * num_layers``.
    """
    return linear_budgets(budget * (1 - gamma), budget * (1 + gamma), budget, num_layers)
