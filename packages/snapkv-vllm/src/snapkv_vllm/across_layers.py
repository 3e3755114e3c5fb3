"""Selects the tokens of a prompt if the heads of all layers share one budget, as in the library."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from snapkv.policies import AcrossLayers, Policy, PromptLayer
from snapkv.policies.across_layers import best_entries
from snapkv_vllm.admission.methods import WithSpans


def find_across_layers(policy: Policy | None) -> AcrossLayers | None:
    """Return the method that shares one budget among all layers, without the spans that are wrapped
    around it. The result is None if there is no method or it is another one.
    """
    inner = policy.policy if isinstance(policy, WithSpans) else policy
    return inner if isinstance(inner, AcrossLayers) else None


def select_across(policy: Policy, layers: Iterable[PromptLayer], kept_tokens: int) -> list[Tensor]:
    """Select the tokens of a prompt in all layers at once, because the layers share one budget.

    Args:
        policy: the method, which shares its budget among all layers.
        layers: all layers, in runs that are rows of a batch. They are read one run after the other,
            so that the keys of only one run need to be in memory.
        kept_tokens: how many tokens a head keeps on average, after the request's spans were
            dropped.

    Returns:
        (layers, H, T) bool for each run, True for each token that is kept.
    """
    scores_of_runs, lost = [], []
    for layer in layers:
        if isinstance(policy, WithSpans):
            layer, gone = policy.protect_spans(layer)
            lost.append(gone)
        scores_of_runs.append(score_layers(policy, layer))
        del layer  # before the keys of the next one are read
    dropped_tokens = policy.spans.dropped_tokens if isinstance(policy, WithSpans) else 0
    kept = mask_best(scores_of_runs, kept_tokens + dropped_tokens)
    return [mask & ~gone for mask, gone in zip(kept, lost, strict=True)] if lost else kept


def score_layers(policy: Policy, layer: PromptLayer) -> Tensor:
    """Compute the scores of the tokens in a run of layers, as the shared budget compares them.

    Args:
        policy: a method that shares its budget among all layers, possibly with spans around it.
        layer: the layers of the run, as rows of a batch.

    Returns:
        (layers, H, T) float32; protected tokens have an infinite score.
    """
    shared = find_across_layers(policy)
    assert shared is not None
    even = shared.even_counts(layer)  # all layers have the same number of tokens
    return shared.score_layer(layer, [even] * layer.num_layers)


def mask_best(scores_of_runs: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """Return masks that mark the tokens with the best scores of all layers together. If scores are
    equal, the earlier layer, head and token wins.

    Args:
        scores_of_runs: the (layers, H, T) scores of each run.
        tokens: how many tokens a head keeps on average. So this number times all heads of all
            layers are marked.

    Returns:
        (layers, H, T) bool for each run, True for each of the best tokens.
    """
    shapes = [scores.shape for scores in scores_of_runs]
    best = best_entries(
        torch.cat([scores.flatten() for scores in scores_of_runs])[None],
        [tokens * sum(shape[0] * shape[1] for shape in shapes)],
    )[0]
    parts = torch.split(best, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
