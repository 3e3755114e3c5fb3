"""LagKV (Liang et al., 2025): what stands out beside the piece of text that comes right behind."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from snapkv.policies.prefix_policy import PrefixPolicy, of_any_layer
from snapkv.policies.states import PromptLayer
from snapkv.validation import require_int


@dataclass(frozen=True)
class LagKV(PrefixPolicy):
    """Keeps the tokens that vary most, measured by the piece behind theirs; needs no attention.

    Behind the sinks a prompt is cut into pieces of `lag_size` tokens. The channels of a piece are
    scaled by the lowest and the highest value that each has in the next piece, the lag. The
    standard deviation over the channels of a token, as a softmax over its piece, rates its key,
    and likewise its value; the mean of both is the token's rating, and every piece keeps as many
    of its best as any other (arXiv 2504.04704, Sec. 3). The last piece has no lag: it stays, with
    what fills no piece; where the budget has no room for all of that, the newest of it.

    As in kvpress, but: of tokens of the same rank in their pieces the better rating goes first, as
    far as float32 tells them apart beside the rank, where there any may; a channel that does not
    vary in the lag counts 0, where there it is divided by zero; the window is kept as in SnapKV.
    The paper goes on evicting while it generates; here, as in kvpress, the prompt is cut at its
    end. Behind joined documents the pieces are those of what is held.

    Args:
        budget, keep_ratio, window_size: as in `PrefixPolicy`.
        lag_size: tokens of a piece, at least 2. What has no lag is up to two pieces less a token.
        sink_tokens: first tokens that every head keeps, 4 as in kvpress.
        cross_scoring: choose by ratings alone, so that pieces, and in `AdaKV` heads, compete.
    """

    name: ClassVar[str] = "lagkv"
    query_tokens: ClassVar[int] = 0
    rates_what_is_held: ClassVar[bool] = True

    _: KW_ONLY
    lag_size: int = 128
    sink_tokens: int = 4
    cross_scoring: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("lag_size", self.lag_size, minimum=2)

    @of_any_layer
    def score(self, layer: PromptLayer) -> Tensor:
        """Rank or rating within [0, 1], above 1 where there is no lag: (B, Hkv, P) float32."""
        B, T = layer.keys.shape[0], layer.keys.shape[2]
        scores = layer.keys.new_zeros(B, layer.num_kv_heads, T, dtype=torch.float32)
        for row, tokens in enumerate(layer.row_lengths):
            ratings = self._ratings(layer.keys[row, :, T - tokens :])
            ratings = (ratings + self._ratings(layer.values[row, :, T - tokens :])) / 2
            if layer.stored_heads is not None:
                ratings = ratings.mean(dim=0, keepdim=True)
            in_order = ratings if self.cross_scoring else _ranked(ratings)
            ages = torch.arange(1, tokens + 1, device=scores.device).float() / tokens
            own = scores[row, :, T - tokens :]
            own[:, self.sink_tokens :] = 1 + ages[self.sink_tokens :]
            own[:, self.sink_tokens :][:, : in_order[0].numel()] = in_order.flatten(1)
        return scores[..., : T - self.window_size]

    def _ratings(self, states: Tensor) -> Tensor:
        """How much tokens stand out in their pieces: (H, pieces, lag_size) of (H, T, D)."""
        whole = max(0, states.shape[1] - self.sink_tokens) // self.lag_size
        if whole < 2:
            return states.new_zeros(states.shape[0], 0, self.lag_size, dtype=torch.float32)
        behind = states[:, self.sink_tokens :][:, : whole * self.lag_size].float()
        pieces = behind.reshape(states.shape[0], whole, self.lag_size, -1)
        lag = pieces[:, 1:]
        lowest = lag.amin(dim=2, keepdim=True)
        reach = lag.amax(dim=2, keepdim=True) - lowest
        scaled = (pieces[:, :-1] - lowest) / reach.where(reach > 0, torch.inf)
        return torch.softmax(scaled.std(dim=-1), dim=-1)


def _ranked(ratings: Tensor) -> Tensor:
    """Ranks in the last axis as fractions, in order of the rating where ranks are equal."""
    order = ratings.argsort(dim=-1, descending=True, stable=True)
    rank = ratings.shape[-1] - 1 - order.argsort(dim=-1)
    return (rank + ratings) / ratings.shape[-1]
