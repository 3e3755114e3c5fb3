"""A draft of the answer votes on the prompt: generated from what was kept, then thrown away."""

import copy
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.cache.layer import CompressedLayer
from snapkv.cache.reading import DraftCost, Undecided
from snapkv.errors import CacheMismatchError
from snapkv.hf.attention import choose
from snapkv.hf.cache_argument import passed
from snapkv.hf.placement import device_of


@torch.no_grad()
def vote_by_draft(
    model: PreTrainedModel,
    cache: Any,
    logits: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
) -> None:
    """Generate the draft greedily, and let every layer choose again with its queries, too.

    Args:
        model: whose prompt the cache has just read.
        cache: a `CompressedCache`.
        logits: (B, any, vocabulary), of which the last ones are those behind the prompt.
        attention_mask: (B, T) zeros and ones, or None where no row has padding.
        position_ids: (..., T) of the prompt, the draft's follow; None for those the mask says.

    Raises:
        CacheMismatchError: no prompt has just been read whose layers wait for a draft.
    """
    reading = cache.reading
    if not reading.undecided:
        raise CacheMismatchError(
            "logits: expected a prompt that has just been read with a policy such as "
            "DraftVotes(SnapKV(1024)) and was compressed, got none; leave the call out"
        )
    # Layers that hold something else than tokens cannot all take them back.
    others = {
        index: copy.deepcopy(layer)
        for index, layer in enumerate(cache.layers)
        if not isinstance(layer, CompressedLayer)
    }
    beside = {index: copy.deepcopy(each.layer.beside) for index, each in reading.undecided.items()}
    kept = [
        (layer, copy.copy(layer))  # those that dropped nothing do not wait, but read the draft, too
        for layer in reading.layers
        if layer.identity.layer_idx not in reading.undecided
    ]
    end, tokens, started = reading.prompt_end, reading.policy.draft_tokens, time.perf_counter()
    reading.is_drafting = True
    try:
        _generate(model, cache, logits[:, -1], attention_mask, position_ids, tokens)
    finally:
        reading.is_drafting = False
        held, reading.undecided = reading.undecided, {}
        for layer, before in kept:
            vars(layer).update(vars(before))
        for index, each in held.items():
            vars(each.layer).update(vars(each.whole) | beside[index])
        for index, layer in others.items():
            cache.layers[index] = layer
        reading.prompt_end = end
    for each in held.values():
        _choose_again(each)
    if logits.device.type == "cuda":  # whoever generates waits for it now, too
        torch.cuda.synchronize(logits.device)
    reading.draft_cost = DraftCost(
        tokens=tokens,
        ms=1000 * (time.perf_counter() - started),
        held_bytes=sum(each.nbytes for each in held.values()),
    )


def _generate(
    model: Any,
    cache: Any,
    logits: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    tokens: int,
) -> None:
    if position_ids is None and attention_mask is not None:
        position_ids = attention_mask.cumsum(-1) - 1
    for _ in range(tokens):
        ids = logits.argmax(dim=-1, keepdim=True)
        told: dict[str, Any] = {}
        if attention_mask is not None:
            seen = torch.ones_like(attention_mask[:, :1])
            attention_mask = torch.cat([attention_mask, seen], dim=1)
            told["attention_mask"] = attention_mask
        if position_ids is not None:
            told["position_ids"] = position_ids = position_ids[..., -1:] + 1
        output = model(ids.to(device_of(model)), **passed(cache), use_cache=True, **told)
        logits = output.logits[:, -1]


def _choose_again(held: Undecided) -> None:
    queries, keys, values = (torch.cat(states, dim=2) for states in zip(*held.draft, strict=True))
    choose(held.layer, replace(held.prompt, draft=(queries, keys, values)))
