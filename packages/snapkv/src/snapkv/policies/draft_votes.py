"""Votes of a drafted answer: what the answer will look for is asked of its own first tokens."""

from dataclasses import KW_ONLY, dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from snapkv.errors import InvalidArgumentError
from snapkv.policies.around import AroundScores
from snapkv.policies.base import OfHeads, PrefixPolicy
from snapkv.policies.snapkv import SnapKV
from snapkv.policies.states import PromptLayer
from snapkv.validation import require_int


@dataclass(frozen=True)
class DraftVotes(AroundScores, PrefixPolicy):
    """Lets the queries of a drafted answer vote on the prompt beside those of the window.

    The prompt is compressed by the window's votes, a few tokens are generated from what was kept,
    and their queries vote on the whole prompt, too; a position counts by the higher of both shares
    of attention (as lookahead queries in Wang et al. 2025, arXiv 2505.20334). The draft is thrown
    away: its tokens attended to what the window alone chose, and taking over those that stay the
    likeliest would need a pass of verification inside `generate`'s own loop. Until the draft has
    voted the device holds the whole prompt. It costs as many steps of decoding as it has tokens,
    before the first token; `CompressedCache.report` says how long they took, and the bytes.

    Args:
        policy: the method whose votes these are, with its budget: SnapKV or PyramidKV.
        draft_tokens: length of the draft.

    Raises:
        InvalidTypeError: `policy` does not score a prefix, or `draft_tokens` is no integer.
        InvalidArgumentError: a method without votes, or `draft_tokens` below 1 or with no room in
            the budget.
    """

    name: ClassVar[str] = "draft-votes"

    budget: int | None = field(init=False)
    keep_ratio: float | None = field(init=False)
    window_size: int = field(init=False)
    policy: PrefixPolicy = field(default_factory=SnapKV, kw_only=False)
    _: KW_ONLY
    draft_tokens: int = 8

    def __post_init__(self) -> None:
        self._require_scoring(" (AdaKV goes around DraftVotes)")
        require_int("draft_tokens", self.draft_tokens, minimum=1)
        if not isinstance(self.policy, SnapKV):
            raise InvalidArgumentError(
                f"policy: expected a method whose window votes, such as SnapKV(budget=1024), got "
                f"{self.policy.name}; put other methods around DraftVotes"
            )
        for limit in ("budget", "keep_ratio", "window_size"):
            object.__setattr__(self, limit, getattr(self.policy, limit))
        replace(self.policy, window_size=self.draft_tokens)  # which must have room as well

    @property
    def sink_tokens(self) -> int:
        """What the voting policy keeps in every head."""
        return self.policy.sink_tokens

    def kept_prefix_tokens(self, layer: PromptLayer, of_heads: OfHeads = "max") -> list[int]:
        """B numbers: what the voting policy keeps."""
        return self.policy.kept_prefix_tokens(layer, of_heads)

    def score(self, layer: PromptLayer) -> Tensor:
        """The higher share of the window's and of the draft's attention: (B, H, P) float32."""
        window = self.policy.score(layer) / self.policy.summed_weights(layer)
        if layer.draft is None:
            return window
        queries, keys, values = layer.draft
        behind = replace(
            layer,
            queries=queries,
            keys=torch.cat([layer.keys, keys], dim=2),
            values=torch.cat([layer.values, values], dim=2),
            protected=None,
            draft=None,
        )
        drafter = replace(self.policy, window_size=queries.shape[2])
        drafted = drafter.score(behind) / drafter.summed_weights(behind)
        return window.maximum(drafted[..., : window.shape[-1]])
