"""Compactor (Chari and Van Durme, 2025): keys unlike the rest, and what text nearby attends to."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from snapkv.errors import InvalidArgumentError
from snapkv.policies.base import ALL_QUERIES, Need, PrefixPolicy
from snapkv.policies.states import PromptLayer
from snapkv.validation import require_int, require_share

_RIDGE = 1e-2
"""Added to the diagonal of the sketched keys' products, as in kvpress."""

_SMOOTHED_TOKENS = 3


@dataclass(frozen=True)
class Compactor(PrefixPolicy):
    """Keeps keys that others cannot make up for, and what is attended to; asks no question.

    The score is `blending` times a key's leverage, plus the attention it receives, each brought to
    mean 0 and deviation 1 over all heads (arXiv 2507.08143, Sec. 3). Leverage is how far a key
    stands out among all keys of its head as they were before rotary embedding, their mean taken
    off: the diagonal of ``X (X'X + 0.01 I)^-1 X'``, with X the keys times a random matrix of
    `sketch_dimension` columns. Attention is that of all queries of a chunk of `chunk_tokens` to all
    its keys, later ones too, of unscaled products: summed over the queries, averaged over the query
    heads of a KV head, times the norm of the value and averaged with both neighbours.

    As in kvpress, but: the sinks and the window, which are kept, take no part, where there the last
    four tokens are left out; a last chunk that is not full has no fillers in it; the draw depends
    on `seed` and the layer alone; a row of a batch is normalised by itself; what blends is a number
    of its own, where there it is the ratio of compression (the authors' engine has 0.5).

    Args:
        budget, keep_ratio, window_size: as in `PrefixPolicy`.
        sketch_dimension: columns of the random matrix; from the head's size on leverage is exact,
            the ridge aside.
        chunk_tokens: tokens that attend to each other.
        blending: weight of the leverage, in [0, 1].
        seed: of the draw.
        sink_tokens: first tokens that every head keeps, 8 as in kvpress.
    """

    name: ClassVar[str] = "compactor"
    query_tokens: ClassVar[int] = ALL_QUERIES
    needs: ClassVar[frozenset[Need]] = frozenset({"rotation", "queries"})

    _: KW_ONLY
    sketch_dimension: int = 48
    chunk_tokens: int = 256
    blending: float = 0.35
    seed: int = 0
    sink_tokens: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("sketch_dimension", self.sketch_dimension, minimum=1)
        require_int("chunk_tokens", self.chunk_tokens, minimum=1)
        require_share("blending", self.blending, "0.35")
        require_int("seed", self.seed, minimum=0, maximum=None)

    def score(self, layer: PromptLayer) -> Tensor:
        """Leverage and attention, blended: (B, Hkv, P) float32; zero for the sinks."""
        B, H, T, _ = layer.keys.shape
        scores = layer.keys.new_zeros(B, H, T - self.window_size, dtype=torch.float32)
        if layer.queries.shape[2] < max(layer.row_lengths):
            raise InvalidArgumentError(
                f"policy: expected the queries of all {T} tokens with {self.name}, since earlier "
                "turns it would choose from are not read again, got "
                f"{layer.queries.shape[2]}; read the conversation into a new cache, or use LagKV "
                "or KeyDiff"
            )
        for row, tokens in enumerate(layer.row_lengths):
            first = T - tokens + self.sink_tokens
            if first < T - self.window_size:
                own = slice(first, T - self.window_size)
                leverage = _standardised(self._leverage(layer, row, own))
                received = _standardised(self._received(layer, row, own))
                scores[row, :, own] = self.blending * leverage + received
        return scores

    def _leverage(self, layer: PromptLayer, row: int, own: slice) -> Tensor:
        """Approximate leverage of the keys of some slots, (H, N) float64, each head by itself."""
        assert layer.rotation is not None
        H, T, D = layer.keys.shape[1:]
        positions = torch.arange(own.start, own.stop, device=layer.keys.device)
        positions = positions - (T - layer.row_lengths[row])
        keys = layer.rotation(layer.keys[row, None, :, own], -positions[None])[0]
        seed = (self.seed * 100_003 + layer.layer_idx) % 2**63  # what a generator accepts
        sketch = torch.randn(
            (H, D, self.sketch_dimension),
            generator=torch.Generator().manual_seed(seed),
            dtype=torch.float32,
        )
        sketch = sketch.to(keys.device) / self.sketch_dimension**0.5
        sketched = ((keys - keys.mean(dim=1, keepdim=True)) @ sketch).double()
        products = sketched.mT @ sketched
        ridge = _RIDGE * torch.eye(self.sketch_dimension, device=keys.device, dtype=torch.float64)
        factor = torch.linalg.cholesky(products + ridge)
        whitened: Tensor = torch.linalg.solve_triangular(factor, sketched.mT, upper=False)
        return whitened.square().sum(dim=1)

    def _received(self, layer: PromptLayer, row: int, own: slice) -> Tensor:
        """Attention within chunks of some slots, weighed by the values: (H, N) float32."""
        H, T, _ = layer.keys.shape[1:]
        ahead = T - layer.queries.shape[2]
        parts = []
        for start in range(own.start, own.stop, self.chunk_tokens):
            stop = min(start + self.chunk_tokens, own.stop)
            keys = layer.keys[row, :, start:stop].float()
            queries = layer.queries[row, :, start - ahead : stop - ahead].float()
            grouped = queries.reshape(H, -1, queries.shape[-1])  # the query heads of a KV head
            weights = (grouped @ keys.transpose(1, 2)).softmax(dim=-1)
            parts.append(weights.sum(dim=1) * (H / len(queries)))
        norms = torch.linalg.vector_norm(layer.values[row, :, own].float(), dim=-1)
        weighed = torch.cat(parts, dim=1) * norms
        return F.avg_pool1d(weighed, _SMOOTHED_TOKENS, stride=1, padding=_SMOOTHED_TOKENS // 2)


def _standardised(scores: Tensor) -> Tensor:
    """Mean 0 and deviation 1 over all heads and tokens; all 0 where they are alike."""
    centred = scores - scores.mean()
    return (centred / centred.square().mean().sqrt().clamp(min=1e-6)).float()
