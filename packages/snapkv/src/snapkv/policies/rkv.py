"""R-KV (Cai et al., NeurIPS 2025): keep attended tokens without repetitions, for long reasoning."""

from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

from torch import Tensor

from snapkv import ops
from snapkv.policies.budget import require_tokens
from snapkv.policies.recent import BestAndRecent
from snapkv.policies.spans import Spans
from snapkv.policies.states import LayerStates, PromptLayer, Selection
from snapkv.validation import (
    DEFAULT_BUDGET,
    require_budget,
    require_int,
    require_kernel,
    require_share,
)


@dataclass(frozen=True)
class RKV(BestAndRecent):
    """Keeps the tokens that the last queries attend to, unless a newer token has a similar key.

    Whenever a head holds `evict_every` tokens more than its budget, it is cut back to the budget:
    the last `window_size` tokens stay, and the best of those before them by ``mix_lambda *
    importance - (1 - mix_lambda) * redundancy``. Importance is the attention of the window's
    queries, averaged over them and max-pooled. Redundancy is how similar the keys of the other
    tokens are to a token's own, where the newest of similar tokens are exempt. A prompt that is
    longer than the budget is cut to it at its end.

    As in the authors' code, a group of query heads attends by its highest score, the softmax leaves
    out the window, and pooling comes after the average over the queries. There are two differences:
    a token that no other is similar to exempts nothing, where the code exempts the first slot; and
    the prompt is compressed too. The similarities of a long prompt cost the square of its length;
    `PromptThenDecode` leaves the prompt to another method.

    Args:
        budget: tokens kept per KV head and layer right after an eviction, window included.
        window_size: the last tokens, which are never dropped and whose queries score the others;
            the layer keeps these queries (the paper's alpha).
        evict_every: how many tokens come between two evictions; 1 keeps to the budget at every step
            (the paper's buffer).
        kernel_size: width of the max pooling of the importance, odd; 1 for none.
        mix_lambda: the weight of importance against redundancy, in [0, 1]; 1 leaves redundancy out.
        threshold: keys are similar if their cosine is above it, in [0, 1].
        exempt: how many of the newest tokens that are similar to a token do not count as its
            repetitions (the paper's beta).

    Raises:
        InvalidTypeError: a value has the wrong type.
        InvalidArgumentError: a value is out of range, or the budget is in bytes.
    """

    name: ClassVar[str] = "r-kv"

    budget: int = DEFAULT_BUDGET
    _: KW_ONLY
    window_size: int = 8
    evict_every: int = 128
    kernel_size: int = 7
    mix_lambda: float = 0.1
    threshold: float = 0.5
    exempt: int = 1

    def __post_init__(self) -> None:
        require_tokens(self)
        require_budget(self.budget, None, self.window_size)
        require_int("evict_every", self.evict_every, minimum=1)
        require_int("kernel_size", self.kernel_size, minimum=1)
        require_kernel(self.kernel_size)
        require_share("mix_lambda", self.mix_lambda, "0.1")
        require_share("threshold", self.threshold, "0.5")
        require_int("exempt", self.exempt, minimum=0)

    @property
    def query_tokens(self) -> int:
        return self.window_size

    @property
    def history_tokens(self) -> int:
        return self.window_size

    @property
    def recent_tokens(self) -> int:
        return self.window_size

    @property
    def max_decode_tokens(self) -> int:
        """The largest number of tokens that a layer can hold, right before the next eviction."""
        return self.budget + self.evict_every - 1

    def of_prompt(self, tokens: int, states: LayerStates) -> int:
        return min(tokens, self.budget)

    def of_step(self, tokens: int, states: LayerStates) -> int:
        return tokens if tokens <= self.max_decode_tokens else self.budget

    def select(self, layer: PromptLayer) -> Selection:
        if layer.keys.shape[2] <= self.budget:
            return Selection.keep_all(layer)
        return super().select(layer)

    def rate(self, states: LayerStates) -> Tensor:
        """Compute the importance of each slot minus its redundancy, both weighted.

        Returns:
            (B, num_kv_heads, S) float32.
        """
        repeated = ops.redundancy(
            states.keys,
            threshold=self.threshold,
            exempt=self.exempt,
            pad_tokens=states.leading_padding,
        )
        repeated = ops.reduce_group(repeated, states.num_kv_heads, "mean")
        scores = -(1 - self.mix_lambda) * repeated
        voting = replace(
            states.without_empty_slots,
            queries=states.queries[:, :, -self.window_size :],
            keys=states.keys[:, :, : -self.window_size],
        )
        received = ops.attention_of_groups(voting, states.num_kv_heads)
        importance = ops.pool_votes(received, self.kernel_size, "max")
        scores[..., : -self.window_size] += self.mix_lambda * importance
        return scores

    def require_protection(self, spans: Spans) -> None:
        beside = f"next to its window of {self.window_size}"
        self._require_all_spans(spans, self.budget - self.window_size, beside)
