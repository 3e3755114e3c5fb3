"""A check at run time that the votes are computed as the model's attention is.

A family may do something to its scores that the votes do not know of (a bias, a temperature). So at
the end of every prompt the attention of the last query is computed once from the states the policy
sees, and compared with what the model's own attention returned for it. It is judged later, since on
a GPU to ask is to wait.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from snapkv.cache.layer_group import LayerGroup
from snapkv.errors import UnsupportedModelError
from snapkv.policies import PromptLayer
from snapkv.policies.states import DeferredCheck, DeferredChecks, run_checks

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_LOW_PRECISION_TOLERANCE = 0.1
_BLOCK_TOKENS = 8192
_SMALLEST = 1e-12  # norm of an output
_MOST_ROUNDING = 100.0  # where scores err by more, anything is explained


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """How far a layer's attention is from what the votes take it for.

    Attributes:
        found: (layers, 3) float32: the norms of the difference between both outputs and of the
            expected one, and the largest score of the query.
        layers: their indices in the model.
    """

    found: Tensor
    tolerance: float  # what the dtype explains of the relative difference
    epsilon: float  # how far scores are rounded, relative to their size
    attention: str
    layers: Sequence[int]

    def judge(self, numbers: Sequence[float]) -> None:
        """Raise unless rounding explains the numbers of `found`.

        Attention that rounds its scores errs by their size times epsilon.
        """
        for layer_idx, at in zip(self.layers, range(0, len(numbers), 3), strict=True):
            difference, size, largest = numbers[at : at + 3]
            difference /= max(size, _SMALLEST)
            if not math.isfinite(difference):
                raise UnsupportedModelError(
                    f"model: expected attention that gives numbers, got NaN or infinity from "
                    f"{self.attention} in layer {layer_idx}; load the model in bfloat16 or "
                    "float32 if float16 overflows, else mend its weights"
                )
            explained = self.tolerance + math.expm1(min(self.epsilon * largest, _MOST_ROUNDING))
            if not difference <= explained:
                raise UnsupportedModelError(
                    f"model: expected attention that scaling, soft-cap and sinks describe, got "
                    f"{self.attention}, whose output differs by {difference:.1%} in layer "
                    f"{layer_idx}; its votes would be wrong, so it cannot be compressed"
                )


class VoteCheck:
    """Whether the votes of one cache are what its model's attention computes."""

    def __init__(self) -> None:
        self.doubts: list[Doubt] = []  # what layers have left open in this forward pass
        self.unasked: DeferredChecks = []  # of all layers, see `PromptLayer`

    def close(self) -> None:
        """Ask for all that layers have left open, once the last one has read a pass."""
        require_faithful(self.doubts, self.unasked)
        self.doubts.clear()
        self.unasked.clear()

    def judge(self, group: LayerGroup, module: Any, *, rounds_scores: bool) -> None:
        """Compare the attention of layers that are to choose with their votes; see `doubt_scores`.

        It is asked at the first layers, which tell on nearly every family, and at the last: on a
        GPU to ask is to wait.
        """
        found = doubt_scores(group.stack, group.outputs, module, rounds_scores=rounds_scores)
        if found is not None:
            layers = [prompt.layer_idx for prompt in group.prompts]
            self.doubts.append(replace(found, layers=layers))
        if not group.stack.depth:
            require_faithful(self.doubts)
            self.doubts.clear()


@torch.no_grad()
def doubt_scores(
    layer: PromptLayer, output: Tensor, module: Any, *, rounds_scores: bool = False
) -> Doubt | None:
    """Compare the model's attention of the last query with what the policy would compute.

    Args:
        layer: the states of the layer at the end of the prompt.
        output: (B, Hq, Dv), the model's attention output of the prompt's last query; all rows of
            layers that are stacked.
        module: the attention module, to name it in the error.
        rounds_scores: whether the model's attention rounds its scores to the dtype of `output`, as
            eager attention does; fused attention holds them in float32.

    Returns:
        What `require_faithful` judges; None in training, where dropout makes the output random.
    """
    if getattr(module, "training", False):
        return None
    seen = scores = _last_query_scores(layer)
    if (pads := layer.pads) is not None:
        seen, scores = (scores.masked_fill(pads[:, :, None], each) for each in (0.0, -math.inf))
    expected, layers = _attend(layer, scores), layer.stacked
    norms = torch.stack([expected - output, expected], dim=-1).view(layers, -1, 2).norm(dim=1)
    largest = torch.linalg.vector_norm(seen.view(layers, -1), math.inf, dim=-1, keepdim=True)
    return Doubt(
        found=torch.cat([norms, largest], dim=-1),
        tolerance=_TOLERANCE.get(output.dtype, _LOW_PRECISION_TOLERANCE),
        epsilon=_epsilon(output, rounds_scores),
        attention=type(module).__name__,
        layers=[layer.layer_idx],
    )


def require_faithful(doubts: Sequence[Doubt], unasked: Sequence[DeferredCheck] = ()) -> None:
    """Raise unless every difference is one that rounding explains, and ask for what is `unasked`.

    A GPU is waited for once.
    """
    run_checks([*((doubt.found, doubt.judge) for doubt in doubts), *unasked])


def _epsilon(output: Tensor, rounds_scores: bool) -> float:
    epsilon = torch.finfo(output.dtype if rounds_scores else torch.float32).eps
    if output.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        return max(epsilon, 2.0**-10)  # float32 products are rounded to 10 bits there
    return epsilon


def _last_query_scores(layer: PromptLayer) -> Tensor:
    """Scores of the prompt's last query: (B, Hkv, G, T) float32."""
    B, Hq, _, D = layer.queries.shape
    Hkv = layer.keys.shape[1]
    grouped = layer.queries[:, :, -1].reshape(B, Hkv, Hq // Hkv, D).float()
    blocks = torch.split(layer.keys, _BLOCK_TOKENS, dim=2)  # a float32 copy of all keys may not fit
    products = [grouped @ block.float().transpose(-1, -2) for block in blocks]
    scores = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
    return layer.score_options.scores(scores)


def _attend(layer: PromptLayer, scores: Tensor) -> Tensor:
    """Attention output of the prompt's last query, from the states alone: (B, Hq, Dv) float32."""
    logits = layer.score_options.sink_logits
    if logits is None:
        weights = scores.softmax(dim=-1)
    else:
        logits = logits.float().view(1, scores.shape[1], -1, 1)
        total = torch.logaddexp(scores.logsumexp(dim=-1, keepdim=True), logits)
        weights = (scores - total).exp()
    return (weights.to(layer.values.dtype) @ layer.values).flatten(1, 2).float()
