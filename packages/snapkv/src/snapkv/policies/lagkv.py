"""LagKV (Liang et al., 2025): score tokens by how much they vary compared with the next piece."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from snapkv.policies.prefix_policy import PrefixPolicy, of_any_layer
from snapkv.policies.states import PromptLayer
from snapkv.validation import require_int


@dataclass(frozen=True)
class LagKV(PrefixPolicy):
    """Keeps the tokens that vary most compared with the next piece of the text.

    No attention is computed.

    After the sinks a prompt is cut into pieces of `lag_size` tokens. The channels of a piece are
    scaled by the lowest and the highest value that each has in the next piece, the lag. The
    standard deviation over the channels of a token, as a softmax over its piece, rates its key, and
    likewise its value. The mean of both is the token's rating, and every piece keeps the same
    number of its best tokens (arXiv 2504.04704, Sec. 3). The last piece has no lag, so it is kept
    together with the tokens that fill no piece; if the budget cannot hold all of these, the newest
    are kept.

    This follows kvpress with three differences. If tokens of different pieces have the same rank,
    the one with the better rating is kept first, unless the ratings are too close for float32 to
    tell them apart when the rank is added; in kvpress any of them may be kept. A channel that does
    not vary in the lag counts 0, where kvpress divides by zero. The window is kept as in SnapKV.
    The paper also evicts during decoding; here, as in kvpress, the prompt is compressed at its end.
    After documents were joined, the pieces consist of the tokens that are held.

    Args:
        budget, keep_ratio, window_size: as in `PrefixPolicy`.
        lag_size: tokens of a piece, at least 2. The part without lag is up to two pieces less one
            token.
        sink_tokens: first tokens that every head keeps, 4 as in kvpress.
        cross_scoring: compare the ratings themselves and not the ranks, so that one piece may keep
            more tokens than another, and inside `AdaKV` one head more than another.

    Raises:
        InvalidTypeError: a value has the wrong type.
        InvalidArgumentError: a value is out of range.
    """

    name: ClassVar[str] = "lagkv"
    query_tokens: ClassVar[int] = 0
    scores_after_drops: ClassVar[bool] = True

    _: KW_ONLY
    lag_size: int = 128
    sink_tokens: int = 4
    cross_scoring: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("lag_size", self.lag_size, minimum=2)

    @of_any_layer
    def score(self, layer: PromptLayer) -> Tensor:
        """Compute the rank of each token in its piece, or its rating with `cross_scoring`.

        Tokens without a lag, which are those after the last piece that has one, get more than 1:
        the newer, the higher.

        Returns:
            (B, Hkv, P) float32, in [0, 1] for tokens with a lag. If all heads share one latent,
            their mean is ranked.
        """
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
        """Compute how much each token varies over its channels, compared with the next piece.

        The attention sinks, the last whole piece and the tokens after it get no rating.

        Args:
            states: (H, T, D) keys or values of one row.

        Returns:
            (H, pieces, lag_size) float32, a softmax over each piece, so its ratings add up to 1.
            There are 0 pieces if fewer than two whole ones follow the sinks.
        """
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
    """Convert ratings to ranks within each piece, as fractions of the piece's size.

    If two ranks in different pieces are equal, the better rating is higher.

    Args:
        ratings: (H, pieces, lag_size) float32 in [0, 1].

    Returns:
        A tensor of the same shape; the best token of a piece has the highest number, at most 1.
    """
    order = ratings.argsort(dim=-1, descending=True, stable=True)
    rank = ratings.shape[-1] - 1 - order.argsort(dim=-1)
    return (rank + ratings) / ratings.shape[-1]
