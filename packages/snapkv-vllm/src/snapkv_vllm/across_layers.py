"""What stays of a prompt where the heads of all layers share one budget, as in the library."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from snapkv.policies import AcrossLayers, Policy, PromptLayer
from snapkv.policies.across_layers import best_entries
from snapkv_vllm.admission.methods import WithSpans


def across_layers(policy: Policy | None) -> AcrossLayers | None:
    """The method inside another one that shares a budget out among all layers, if there is one."""
    inner = policy.policy if isinstance(policy, WithSpans) else policy
    return inner if isinstance(inner, AcrossLayers) else None


def kept_across(policy: Policy, layers: Iterable[PromptLayer], kept_tokens: int) -> list[Tensor]:
    """What stays in all layers of a prompt, of which every head keeps so many on average.

    Args:
        policy: shares its budget, in tokens, among all layers.
        layers: all of them, in runs of layers that are rows of a batch; looked at one after the
            other, so that the keys of one run need to be there at a time.
        kept_tokens: without those that the request's spans take away.

    Returns:
        (layers, H, T) bool of each run.
    """
    ranked, lost = [], []
    for layer in layers:
        if isinstance(policy, WithSpans):
            layer, gone = policy.named_in(layer)
            lost.append(gone)
        ranked.append(scores_across(policy, layer))
        del layer  # before the keys of the next one are read
    lost_tokens = policy.spans.lost_tokens if isinstance(policy, WithSpans) else 0
    kept = best_across(ranked, kept_tokens + lost_tokens)
    return [mask & ~gone for mask, gone in zip(kept, lost, strict=True)] if lost else kept


def scores_across(policy: Policy, layer: PromptLayer) -> Tensor:
    """(layers, H, T) float32 of a run of layers, infinite for what must stay."""
    shared = across_layers(policy)
    assert shared is not None
    even = shared.even_counts(layer)  # of tokens all layers have as many
    return shared.score_layer(layer, [even] * layer.num_layers)


def best_across(ranked: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """Which of the (layers, H, T) scores of each run are the best so many per head, together."""
    shapes = [scores.shape for scores in ranked]
    best = best_entries(
        torch.cat([scores.flatten() for scores in ranked])[None],
        [tokens * sum(shape[0] * shape[1] for shape in shapes)],
    )[0]
    parts = torch.split(best, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
