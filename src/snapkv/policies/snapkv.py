"""SnapKV (Li et al., NeurIPS 2024): an observation window votes on the prompt before it."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

from torch import Tensor

from snapkv import ops
from snapkv.errors import UnsupportedModelError
from snapkv.policies.base import PrefixPolicy
from snapkv.policies.states import PromptLayer
from snapkv.validation import GROUP_REDUCTIONS, POOLINGS, require_choice, require_kernel


@dataclass(frozen=True)
class SnapKV(PrefixPolicy):
    """The last queries of the prompt vote; each head keeps the best-voted clusters.

    The attention of the last `window_size` queries onto the prefix is summed (Eq. 2), combined
    over the query heads that share a KV head, pooled so that neighbours of a strong position
    survive with it (Sec. 4.3), and the best positions are kept beside the window (Listing 1).
    The paper's settings: LongBench window 32, kernel 7, max; needle tests window 16, kernel 5.

    Args:
        budget: tokens kept per KV head and layer, window included; 1024 if neither is given.
        keep_ratio: instead of `budget`, the fraction of the prefix to keep beside the window.
        window_size: the last tokens of the prompt; they vote and are always kept.
        kernel_size: width of the pooling, odd; 1 switches pooling off.
        pooling: "max" or "avg".
        group_reduce: how the query heads of a KV head are combined: "mean", "max", "sum"; "none"
            lets every query head keep its own set, as the paper does, at the price of storing
            keys and values once per query head.
    """

    name: ClassVar[str] = "snapkv"
    rates_what_is_held: ClassVar[bool] = True

    _: KW_ONLY
    kernel_size: int = 7
    pooling: Literal["max", "avg"] = "max"
    group_reduce: Literal["mean", "max", "sum", "none"] = "mean"

    def __post_init__(self) -> None:
        """Check every parameter once, here."""
        super().__post_init__()
        require_kernel(self.kernel_size)
        require_choice("pooling", self.pooling, POOLINGS)
        require_choice("group_reduce", self.group_reduce, GROUP_REDUCTIONS)

    @property
    def query_tokens(self) -> int:
        """The observation window."""
        return self.window_size

    def score(self, layer: PromptLayer) -> Tensor:
        """Pooled votes of the window: (B, Hkv, P) float32, Hq instead of Hkv for "none".

        Raises:
            UnsupportedModelError: "none" on a model whose heads share one stored latent.
        """
        if self.group_reduce == "none" and layer.stored_heads is not None:
            raise UnsupportedModelError(
                "group_reduce: expected mean, max or sum for a model with latent attention, whose "
                "heads share one stored latent, got 'none'; leave group_reduce at 'mean'"
            )
        own_keys = layer.stored_heads is None  # or heads of several keys share what is stored
        votes = ops.window_votes(
            layer.queries,
            layer.keys,
            pad_tokens=layer.pad_tokens,
            group_reduce=self.group_reduce if own_keys else "none",
            score_options=layer.score_options,
        )
        if not own_keys:
            votes = ops.reduce_group(votes, layer.num_kv_heads, self.group_reduce)
        prefix_tokens = layer.keys.shape[2] - self.window_size  # fewer queries may have voted
        return ops.pool_votes(votes[..., :prefix_tokens], self.kernel_size, self.pooling)

    def summed_weights(self, layer: PromptLayer) -> int:
        """One of every query that votes; of every head of a group too where these are summed."""
        heads, queries = layer.queries.shape[1:3]
        return queries * (heads // layer.num_kv_heads if self.group_reduce == "sum" else 1)
