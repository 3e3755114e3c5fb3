"""A check at run time that the votes agree with the attention of the model.

A model family may change its attention scores in a way that the votes do not contain (a bias, a
temperature). So at the end of every prompt, the attention output of the last query is computed from
the states that the policy sees, and compared with the output of the model's own attention. Reading
the result makes the program wait for the GPU, so the results of several layers are read together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from snapkv.cache.layer_group import LayerGroup
from snapkv.errors import UnsupportedModelError, wrong
from snapkv.policies import PromptLayer
from snapkv.policies.states import DeferredCheck, DeferredChecks, run_checks

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_LOW_PRECISION_TOLERANCE = 0.1
_BLOCK_TOKENS = 8192
_SMALLEST = 1e-12  # norm of an output
_MOST_ROUNDING = 100.0  # limits the exponent; rounding errors this large explain any difference


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """The measured difference between a layer's attention and that of its votes, not judged yet.

    Attributes:
        found: (layers, 3) float32: for each layer the norm of the difference between both outputs,
            the norm of the expected output, and the largest score of the query.
        tolerance: the largest relative difference that rounding of the outputs explains.
        epsilon: the relative rounding error of the scores.
        attention: the name of the attention class, for the error message.
        layers: the indices of the layers in the model.
    """

    found: Tensor
    tolerance: float
    epsilon: float
    attention: str
    layers: Sequence[int]

    def judge(self, numbers: Sequence[float]) -> None:
        """Raise unless rounding explains the difference in every layer.

        Attention that rounds its scores has an error of their size times `epsilon`.

        Args:
            numbers: the values of `found`, flattened, on the host.

        Raises:
            UnsupportedModelError: a difference is not finite or too large.
        """
        for layer_idx, at in zip(self.layers, range(0, len(numbers), 3), strict=True):
            difference, size, largest = numbers[at : at + 3]
            difference /= max(size, _SMALLEST)
            if not math.isfinite(difference):
                raise wrong(
                    "model",
                    f"the attention of {self.attention} in layer {layer_idx} has returned NaN or "
                    "infinity",
                    "If float16 overflows, load the model in bfloat16 or float32; otherwise repair "
                    "its weights",
                    UnsupportedModelError,
                )
            explained = self.tolerance + math.expm1(min(self.epsilon * largest, _MOST_ROUNDING))
            if not difference <= explained:
                raise wrong(
                    "model",
                    "expected attention whose scores depend only on scaling, soft-cap and sinks, "
                    f"but got {self.attention}, whose output differs by {difference:.1%} in layer "
                    f"{layer_idx}",
                    "Use the default cache of transformers for this model, because the votes "
                    "would be wrong",
                    UnsupportedModelError,
                )


class VoteCheck:
    """Checks that the votes in a cache agree with the attention of its model.

    Attributes:
        doubts: the comparisons of this forward pass whose results have not been read yet.
        deferred: the checks that policies have deferred; see `PromptLayer`.
    """

    def __init__(self) -> None:
        self.doubts: list[Doubt] = []
        self.deferred: DeferredChecks = []

    def close(self) -> None:
        """Read the results of all comparisons and checks after the last layer of a forward pass.

        Raises:
            UnsupportedModelError: the votes of a layer do not agree with the model's attention.
        """
        require_faithful(self.doubts, self.deferred)
        self.doubts.clear()
        self.deferred.clear()

    def judge(self, group: LayerGroup, module: Any, *, rounds_scores: bool) -> None:
        """Compare the attention of a group of layers with their votes; see `doubt_scores`.

        The result of the first group is read at once, because it shows the problem in nearly every
        unsupported family. The other results are read in `close`, so that a GPU rarely has to be
        waited for.

        Args:
            group: the layers that are about to select tokens.
            module: an attention module, named in the error.
            rounds_scores: whether attention rounds its scores to the dtype of its outputs.

        Raises:
            UnsupportedModelError: the votes of the first group do not agree with attention.
        """
        doubt = doubt_scores(group.stack, group.outputs, module, rounds_scores=rounds_scores)
        if doubt is not None:
            layers = [prompt.layer_idx for prompt in group.prompts]
            self.doubts.append(replace(doubt, layers=layers))
        if not group.stack.depth:
            require_faithful(self.doubts)
            self.doubts.clear()


@torch.no_grad()
def doubt_scores(
    layer: PromptLayer, output: Tensor, module: Any, *, rounds_scores: bool = False
) -> Doubt | None:
    """Compare the model's attention output for the last query with that of the votes.

    Does not wait for a GPU.

    Args:
        layer: the states of the layer, or of several stacked layers, at the end of the prompt.
        output: (B, Hq, Dv), the model's attention output for the last query of the prompt; for
            stacked layers, B counts the rows of all of them.
        module: the attention module, named in the error.
        rounds_scores: whether the model's attention rounds its scores to the dtype of `output`, as
            eager attention does; fused attention computes them in float32.

    Returns:
        The difference for `require_faithful`; None in training, because dropout is random.
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


def require_faithful(doubts: Sequence[Doubt], deferred: Sequence[DeferredCheck] = ()) -> None:
    """Raise if a difference is too large to be a rounding error, and run the deferred checks.

    Waits for a GPU once.

    Args:
        doubts: the differences.
        deferred: checks that policies have deferred.

    Raises:
        UnsupportedModelError: a difference is too large.
    """
    run_checks([*((doubt.found, doubt.judge) for doubt in doubts), *deferred])


def _epsilon(output: Tensor, rounds_scores: bool) -> float:
    epsilon = torch.finfo(output.dtype if rounds_scores else torch.float32).eps
    if output.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        return max(epsilon, 2.0**-10)  # TF32 rounds float32 products to 10 bits
    return epsilon


def _last_query_scores(layer: PromptLayer) -> Tensor:
    """Compute the attention scores of the last query of the prompt.

    Returns:
        (B, Hkv, Hq / Hkv, T) float32.
    """
    B, Hq, _, D = layer.queries.shape
    Hkv = layer.keys.shape[1]
    grouped = layer.queries[:, :, -1].reshape(B, Hkv, Hq // Hkv, D).float()
    blocks = torch.split(layer.keys, _BLOCK_TOKENS, dim=2)  # a float32 copy of all keys may not fit
    products = [grouped @ block.float().transpose(-1, -2) for block in blocks]
    scores = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
    return layer.score_options.scores(scores)


def _attend(layer: PromptLayer, scores: Tensor) -> Tensor:
    """Compute the attention output of a query from its scores.

    Args:
        layer: the layer, for its values and sink logits.
        scores: the scores that `_last_query_scores` returned, with padding hidden.

    Returns:
        (B, Hq, Dv) float32.
    """
    logits = layer.score_options.sink_logits
    if logits is None:
        weights = scores.softmax(dim=-1)
    else:
        logits = logits.float().view(1, scores.shape[1], -1, 1)
        total = torch.logaddexp(scores.logsumexp(dim=-1, keepdim=True), logits)
        weights = (scores - total).exp()
    return (weights.to(layer.values.dtype) @ layer.values).flatten(1, 2).float()
