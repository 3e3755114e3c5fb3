"""What a policy makes of the slots that a layer stores, between two turns."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.cache.layer import CompressedLayer
from snapkv.errors import UnsupportedModelError
from snapkv.hf import forward_context
from snapkv.hf.placement import device_of
from snapkv.ops import ScoreOptions
from snapkv.policies import PrefixPolicy, PromptLayer


class _Calls(forward_context.Hook):
    """Notes what attention does to its scores in every layer, and to how many heads of keys."""

    def __init__(self) -> None:
        self.options: dict[int | None, ScoreOptions] = {}
        self.heads: dict[int | None, int] = {}

    def on_attention(self, call: Any, attended: Any) -> None:
        del attended
        index = getattr(call.module, "layer_idx", None)
        self.options[index], self.heads[index] = call.score_options, call.key.shape[1]


@torch.no_grad()
def score_options(
    model: PreTrainedModel, layers: Sequence[CompressedLayer]
) -> dict[int | None, ScoreOptions]:
    """What the model's attention does to the scores of each layer: it reads one token, and no more.

    Raises:
        UnsupportedModelError: attention is to other heads than are stored.
    """
    calls = _Calls()
    with forward_context.hooked(calls):
        token = torch.zeros(1, 1, dtype=torch.int64, device=device_of(model))
        model(input_ids=token, use_cache=False)
    for layer in layers:
        if calls.heads.get(layer.identity.layer_idx) != layer.store.num_kv_heads:
            raise UnsupportedModelError(
                "compress: expected attention to the keys as they are stored, got the latent "
                "attention of a model whose heads share one; drop the spans instead"
            )
    return calls.options


@torch.no_grad()
def slot_scores(
    layer: CompressedLayer, scorer: PrefixPolicy, options: ScoreOptions, held: Tensor
) -> Tensor:
    """(B, H, S) float32: the scores of what a layer stores, by its last queries; the window's inf.

    Every head is scored by itself, as they may hold different numbers of tokens: (B, H, S) bool
    `held` says which slots hold one.
    """
    store, queries = layer.store, layer.last_queries
    keys, values = store.padded() if store.ragged is not None else (store.keys, store.values)
    (B, H, S), scores = held.shape, held.new_full(held.shape, float("inf"), dtype=torch.float32)
    if queries is None:
        queries = keys.new_empty(B, H, 0, keys.shape[-1])
    prefix = S - max(scorer.window_size, queries.shape[2])
    group = queries.shape[1] // H
    for head in range(H if prefix > 0 else 0):
        own, sinks = slice(head * group, (head + 1) * group), options.sink_logits
        alone = PromptLayer(
            queries=queries[:, own],
            keys=keys[:, head : head + 1],
            values=values[:, head : head + 1],
            pad_tokens=S - held[:, head].sum(dim=-1),
            score_options=replace(options, sink_logits=None if sinks is None else sinks[own]),
            layer_idx=layer.identity.layer_idx,
            depth=layer.identity.depth,
            num_layers=layer.identity.num_layers,
        )
        scores[:, head, :prefix] = scorer.score(alone).mean(dim=1)[..., :prefix]
    return scores
