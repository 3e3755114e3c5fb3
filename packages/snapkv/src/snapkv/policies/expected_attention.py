"""Expected Attention (Devoto et al., 2025): score keys by the queries that will come."""

import functools
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from snapkv import ops
from snapkv.policies.base import ALL_QUERIES, Need
from snapkv.policies.prefix_policy import PrefixPolicy
from snapkv.policies.states import PromptLayer
from snapkv.validation import require_int

_POSITIONS_AT_ONCE = 64


@dataclass(frozen=True)
class ExpectedAttention(PrefixPolicy):
    """Keeps the positions that future queries are expected to attend to.

    The queries of a head before rotary embedding are taken as normally distributed, with the mean
    and the covariance of the prompt's queries; the rotary embedding is averaged over the next
    `future_tokens` positions. A key then expects ``exp(k.mu s + k'Sigma k s^2 / 2)`` of attention,
    where s is the scaling. Its score is its share of the sum over all keys, averaged over the query
    heads of a KV head, times the norm of its value. The first `sink_tokens` do not take part and
    are kept.

    This follows kvpress, except that the queries are taken from attention and rotated back, so that
    query norms and scalings are the model's own, and that the window is kept as in SnapKV, where
    kvpress has none. Soft-caps and learned sinks are left out of the expectation, as there. A
    conversation must be read into a new cache: queries of earlier turns are not held, so recall and
    documents refuse this method.

    Args:
        budget, keep_ratio, window_size: as in `PrefixPolicy`.
        future_tokens: how many positions after the prompt to average over.
        sink_tokens: first tokens that are always kept and whose queries do not count.

    Raises:
        InvalidTypeError: a value has the wrong type.
        InvalidArgumentError: a value is out of range.
    """

    name: ClassVar[str] = "expected-attention"
    query_tokens: ClassVar[int] = ALL_QUERIES
    needs: ClassVar[frozenset[Need]] = frozenset({"rotation", "queries"})

    _: KW_ONLY
    future_tokens: int = 512
    sink_tokens: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("future_tokens", self.future_tokens, minimum=1)

    def score(self, layer: PromptLayer) -> Tensor:
        """Compute the expected attention of each position, times the norm of its value.

        Returns:
            (B, Hkv, P) float32; zero for the sinks and padding, unless a row has no other tokens.
        """
        prefix_tokens = layer.keys.shape[2] - self.window_size
        slots = torch.arange(layer.keys.shape[2], device=layer.keys.device)
        own = slots - (layer.keys.shape[2] - layer.row_tokens)[:, None]
        left_out = (own < self.sink_tokens)[:, None]
        lowest = torch.finfo(torch.float32).min  # a row may have no others
        expected = self._expected_logits(layer).masked_fill(left_out, lowest)
        shares = ops.reduce_group(expected.softmax(dim=-1), layer.keys.shape[1], "mean")
        scores: Tensor = shares * torch.linalg.vector_norm(layer.values.float(), dim=-1)
        return scores[..., :prefix_tokens]

    def _expected_logits(self, layer: PromptLayer) -> Tensor:
        """Compute the logarithm of the attention that each key is expected to receive.

        The attention is not normalised. Padding gets a number, too, which means nothing.

        Returns:
            (B, Hq, T) float32.
        """
        mean, covariance = self._future_queries(layer)
        group, scaling = mean.shape[1] // layer.keys.shape[1], layer.score_options.scaling
        logits = []
        for head in range(mean.shape[1]):
            keys = layer.keys[:, head // group].float()
            linear = (keys @ mean[:, head, :, None])[..., 0]
            quadratic = ((keys @ covariance[:, head]) * keys).sum(dim=-1)
            logits.append(linear * scaling + quadratic * scaling**2 / 2)
        return torch.stack(logits, dim=1)

    def _future_queries(self, layer: PromptLayer) -> tuple[Tensor, Tensor]:
        """Return the mean and the covariance of the queries that are expected after the prompt.

        They are rotated to the positions after the prompt, averaged over `future_tokens` of them.

        Returns:
            (B, Hq, D) and (B, Hq, D, D) float32.
        """
        assert layer.rotation is not None
        mean, covariance = self._raw_queries(layer)
        size = mean.shape[-1]
        average = _average_rotation(layer.rotation, self.future_tokens, size, mean.device)
        mean, covariance = mean @ average, average.T @ covariance @ average
        ahead = layer.row_tokens[:, None]
        mean = layer.rotation(mean[:, :, None], ahead)[:, :, 0]
        for _ in range(2):  # rows, then columns
            covariance = layer.rotation(covariance, ahead.expand(-1, size)).transpose(-1, -2)
        return mean, covariance

    def _raw_queries(self, layer: PromptLayer) -> tuple[Tensor, Tensor]:
        """Return the mean and the covariance of the queries of the prompt before rotary embedding.

        Padding and the first `sink_tokens` of each row do not count. Both results are zero for a
        row that has no other tokens.

        Returns:
            (B, Hq, D) and (B, Hq, D, D) float32.
        """
        assert layer.rotation is not None
        count = layer.queries.shape[2]
        behind = torch.arange(count, device=layer.queries.device) - count
        positions = layer.row_tokens[:, None] + behind
        counted = (positions >= self.sink_tokens)[:, None, :, None]
        queries = layer.rotation(layer.queries.masked_fill(~counted, 0.0), -positions)
        total = counted.sum(dim=2).clamp(min=1)
        mean = queries.sum(dim=2) / total
        centred = (queries - mean[:, :, None]).masked_fill(~counted, 0.0)
        return mean, centred.transpose(-1, -2) @ centred / total[..., None]


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
@torch.no_grad()
def _average_rotation(
    rotation: Callable[[Tensor, Tensor], Tensor], tokens: int, size: int, device: torch.device
) -> Tensor:
    """Return the average rotation over the first `tokens` positions as a matrix.

    Row i is the i-th unit vector, rotated and averaged. The result is cached, and the layers of a
    model share it, so it must not be changed.

    Args:
        rotation: as `PromptLayer.rotation`.
        tokens: over how many positions to average, from 0.
        size: D, the size of a head.
        device: where the matrix is made.

    Returns:
        (D, D) float32.
    """
    basis = torch.eye(size, dtype=torch.float32, device=device)
    total = torch.zeros_like(basis)
    for block in torch.split(torch.arange(tokens, device=device), _POSITIONS_AT_ONCE):
        states = basis.expand(len(block), 1, -1, -1)
        total += rotation(states, block[:, None].expand(-1, size)).sum(dim=(0, 1))
    return total / tokens
