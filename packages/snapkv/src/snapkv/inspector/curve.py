"""Quality against memory: one method at several budgets, asked the same question."""

import math
from dataclasses import dataclass

from snapkv.app.answering import Answer
from snapkv.app.likelihood import References
from snapkv.app.models import LoadedModel
from snapkv.app.prompt_end import PromptEnd


@dataclass(frozen=True, kw_only=True)
class BudgetPoint:
    """What a method answers at a budget.

    Attributes:
        budget: tokens per head and layer.
        answer: from that cache.
        likelihood: see `likelihood`.
    """

    budget: int
    answer: Answer
    likelihood: float | None


def likelihood(loaded: LoadedModel, full: Answer, ends: list[PromptEnd]) -> float | None:
    """The probability that a cache gives to a token of the full cache's answer.

    The geometric mean over its tokens, in [0, 1]; None where the model has no positions for them.

    Args:
        loaded: the model.
        full: the full cache's answer.
        ends: holds the end of the prompt, as the cache has kept it, which is let go.

    Raises:
        OutOfMemoryError: the device is full.
    """
    loss = References(token_ids=[full.token_ids]).loss(loaded, ends.pop())
    return None if loss is None else math.exp(-loss)
