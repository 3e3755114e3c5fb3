"""Methods that go around another one and make their choice of its scores."""

import torch
from torch import Tensor

from snapkv.errors import InvalidArgumentError, InvalidTypeError
from snapkv.policies.base import Need, Policy, PrefixPolicy
from snapkv.policies.fair import Segments
from snapkv.policies.spans import Spans
from snapkv.policies.states import LostVotes, PromptLayer, Selection


class AroundScores(Policy):
    """Asks another method for the scores of the prefix; a subclass says what it does with them."""

    policy: PrefixPolicy

    def _require_scoring(self, hint: str = "") -> None:
        """Raise unless `policy` scores a prefix and leaves the choice to the scores."""
        if not isinstance(self.policy, PrefixPolicy):
            raise InvalidTypeError(
                f"policy: expected a method that scores the prefix, such as SnapKV(budget=1024), "
                f"got {self.policy!r}; pass one of them{hint}"
            )
        if type(self.policy).select is not PrefixPolicy.select:
            raise InvalidArgumentError(
                f"policy: expected a method that keeps its best scores, got {self.policy.name}, "
                "which chooses by itself; pass SnapKV, PyramidKV, KeyDiff or another of that kind"
            )

    def _beside_window(self, layer: PromptLayer, best: Tensor, counts: Tensor) -> Selection:
        """What each head keeps of the prefix, and the window; right-aligned.

        Args:
            layer: at the end of the prompt.
            best: (B, H, max(counts)) int64, of `ops.keep_best`.
            counts: (B, H) int64, how many of them each head keeps.
        """
        tokens, window_size = layer.keys.shape[2], self.policy.window_size
        window = torch.arange(tokens - window_size, tokens, device=best.device)
        window = window.expand(*counts.shape, -1)
        if layer.pad_tokens is not None:
            window = window.masked_fill(window < layer.pad_tokens[:, None, None], -1)
        keep_indices = torch.cat([best, window], dim=-1)
        kept = counts + layer.row_tokens.clamp(max=window_size)[:, None]
        if counts.shape[1] == 1:  # one head, or one latent for all: only rows differ
            fillers = keep_indices.shape[-1] - kept[:, 0]
            return Selection(keep_indices=keep_indices, prompt_tokens=tokens, filler_tokens=fillers)
        return Selection(keep_indices=keep_indices, prompt_tokens=tokens, head_tokens=kept)

    def require_protection(self, spans: Spans) -> None:
        """Raise unless the scoring policy has room."""
        self.policy.require_protection(spans)

    def require_room(self, layer: PromptLayer) -> None:
        """Raise unless the scoring policy has room."""
        self.policy.require_room(layer)

    def require_fairness(self, segments: Segments) -> None:
        """Raise: a method around the scores shares its budget by a rule of its own."""
        Policy.require_fairness(self, segments)

    @property
    def query_tokens(self) -> int:
        """What the scoring policy wants."""
        return self.policy.query_tokens

    @property
    def parts_groups(self) -> bool:
        """What the scoring policy does."""
        return self.policy.parts_groups

    @property
    def needs(self) -> frozenset[Need]:
        """What the scoring policy needs."""
        return self.policy.needs

    def lost_votes(self, layer: PromptLayer, selection: Selection) -> LostVotes | None:
        """By the votes of the scoring policy."""
        return self.policy.lost_votes(layer, selection)
