"""TOVA (Oren et al., 2024): a transformer as a multi-state RNN; the last query decides."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from snapkv import ops
from snapkv.policies.base import EvictingPolicy
from snapkv.policies.recent import keep_best_and_recent
from snapkv.policies.spans import Spans
from snapkv.policies.states import DecodeStep, Eviction, LayerStates, PromptLayer, Selection
from snapkv.validation import DEFAULT_BUDGET, require_int


@dataclass(frozen=True)
class TOVA(EvictingPolicy):
    """Drops the tokens to which the last query attends least, the same ones in all heads.

    The attention of the newest query is averaged over all query heads of the layer, and the
    `budget` best tokens stay, at the end of the prompt and after every generated token. Nothing is
    protected, neither the first tokens nor the newest, as in the authors' code. Where several
    tokens are read at once only the last one's attention counts.

    Args:
        budget: tokens kept per layer.
    """

    name: ClassVar[str] = "tova"
    query_tokens: ClassVar[int] = 1
    """The last one."""

    budget: int = DEFAULT_BUDGET

    def __post_init__(self) -> None:
        """Check the budget."""
        require_int("budget", self.budget, minimum=1)

    @property
    def max_decode_tokens(self) -> int:
        """The budget."""
        return self.budget

    def select(self, layer: PromptLayer) -> Selection:
        """Keep what the prompt's last query attends to most."""
        return Selection.of(layer, self._keep(layer))

    def evict(self, step: DecodeStep) -> Eviction:
        """Drop what this step's last query attends to least."""
        if step.keys.shape[2] <= self.budget:
            return Eviction()
        return Eviction(keep_indices=self._keep(step))

    def require_protection(self, spans: Spans) -> None:
        """Raise unless they leave room for the token that is being generated."""
        self._require_whole_spans(spans, self.budget - 1, "beside its newest token")

    def _keep(self, states: LayerStates) -> Tensor:
        weights = ops.attention_weights(
            states.queries[:, :, -1:],
            states.keys,
            pad_tokens=states.leading_fillers,
            score_options=states.score_options,
        )
        shared = weights[:, :, -1].mean(dim=1, keepdim=True)
        return keep_best_and_recent(
            shared, self.budget, 0, states.leading_fillers, states.protected
        )
