"""KeyDiff (Park et al., 2025): keep the keys that are least like the other keys."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from snapkv.policies.prefix_policy import PrefixPolicy, of_any_layer
from snapkv.policies.states import PromptLayer


@dataclass(frozen=True)
class KeyDiff(PrefixPolicy):
    """Keeps the positions whose keys are least similar to the average key.

    No attention is computed. The score of a position is minus the cosine between its key and the
    mean of all normalised keys of the head. The paper also evicts while it reads the prompt in
    blocks; here, as in kvpress, the whole prompt is read and compressed at its end. The window is
    kept as in SnapKV, which neither of them does.

    Args:
        budget, keep_ratio, window_size: as in `PrefixPolicy`.
        sink_tokens: first tokens that every head keeps; 0, since neither paper nor kvpress has any.

    Raises:
        InvalidTypeError: a value has the wrong type.
        InvalidArgumentError: a value is out of range.
    """

    name: ClassVar[str] = "keydiff"
    query_tokens: ClassVar[int] = 0
    scores_after_drops: ClassVar[bool] = True

    _: KW_ONLY
    sink_tokens: int = 0

    @of_any_layer
    def score(self, layer: PromptLayer) -> Tensor:
        """Compute how different each key is from the average key of its head.

        Returns:
            (B, Hkv, P) float32, minus the cosine, in [-1, 1]. If all heads share one latent, it is
            the mean over the heads.
        """
        directions = F.normalize(layer.keys.float(), dim=-1)
        if layer.pads is not None:
            directions = directions.masked_fill(layer.pads[..., None], 0.0)
        anchor = F.normalize(directions.sum(dim=2, keepdim=True), dim=-1)
        scores = -(directions * anchor).sum(dim=-1)[..., : layer.keys.shape[2] - self.window_size]
        if layer.stored_heads is None:
            return scores
        return scores.mean(dim=1, keepdim=True).expand(-1, layer.num_kv_heads, -1)
