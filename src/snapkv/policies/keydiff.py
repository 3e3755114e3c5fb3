"""KeyDiff (Park et al., 2025): keys that differ from the others carry what the others do not."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from snapkv.policies.base import PrefixPolicy
from snapkv.policies.states import PromptLayer


@dataclass(frozen=True)
class KeyDiff(PrefixPolicy):
    """Keeps the positions whose keys are least like the average key; needs no attention.

    The score of a position is minus the cosine between its key and the mean of all normalised keys
    of the head. The paper also evicts while it reads the prompt in blocks; here, as in kvpress,
    the prompt is read once and cut at its end. The window is kept as in SnapKV, which neither does.

    Args:
        budget: tokens kept per KV head and layer, window included; 1024 if neither is given.
        keep_ratio: instead of `budget`, the fraction of the prefix to keep beside the window.
        window_size: the last tokens of the prompt, always kept.
        sink_tokens: first tokens that every head keeps; 0, since neither paper nor kvpress has any.
    """

    name: ClassVar[str] = "keydiff"
    rates_what_is_held: ClassVar[bool] = True

    _: KW_ONLY
    sink_tokens: int = 0

    @property
    def query_tokens(self) -> int:
        """None: nothing is scored by attention."""
        return 0

    def score(self, layer: PromptLayer) -> Tensor:
        """Minus the cosine to the mean key: (B, Hkv, P) float32."""
        directions = F.normalize(layer.keys.float(), dim=-1)
        if layer.pad_tokens is not None:
            slots = torch.arange(directions.shape[2], device=directions.device)
            pads = (slots < layer.pad_tokens[:, None])[:, None, :, None]
            directions = directions.masked_fill(pads, 0.0)
        anchor = F.normalize(directions.sum(dim=2, keepdim=True), dim=-1)
        scores = -(directions * anchor).sum(dim=-1)[..., : layer.keys.shape[2] - self.window_size]
        if layer.stored_heads is None:
            return scores
        return scores.mean(dim=1, keepdim=True).expand(-1, layer.num_kv_heads, -1)
