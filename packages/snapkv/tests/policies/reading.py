"""Layers of a cache that read a prompt one after the other, without a model."""

import functools
from dataclasses import replace

from snapkv.cache.layer import CompressedLayer, LayerIdentity
from snapkv.cache.prompt_state import PromptState


def ended(policy, prompts, codes=None):
    """Layers that have read these prompts in order, and hold what they keep."""
    count = len(prompts)
    layers = [
        CompressedLayer(policy, LayerIdentity(layer_idx=at, depth=at, num_layers=count), codes)
        for at in range(count)
    ]
    prompt_state = PromptState(layers=layers)
    for layer, prompt in zip(layers, prompts, strict=True):
        layer.update(prompt.keys, prompt.values)
        at, cost = layer.identity.depth, functools.partial(layer.token_cost, prompt.keys.shape[1])
        shown = replace(prompt, depth=at, num_layers=count, token_cost=cost)
        prompt_state.chooser.offer(layer, shown, may_wait=True)
    prompt_state.require_chosen()
    return layers


def columns_kept(policy, prompts):
    """Of each layer (B, H, K) int64, those of the prompt's tokens; negative for none."""
    return [layer.stored_columns() for layer in ended(policy, prompts)]
