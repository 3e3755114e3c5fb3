"""Asking the policy: what it sees of a layer after an attention call, and its choice moved in."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from snapkv.cache.layer import CompressedLayer
from snapkv.errors import UnsupportedModelError
from snapkv.hf.attend import AttentionCall
from snapkv.hf.model_parts import output_weight
from snapkv.policies import DecodeStep, EvictingPolicy, PromptLayer, Selection
from snapkv.policies.by_rows import select_by_rows


def keep_to_cap(call: AttentionCall, layer: CompressedLayer, cap_tokens: int | None) -> None:
    """Drop what is over the cap of a prompt that is still coming in."""
    slots = layer.store.slots
    if cap_tokens is None or slots <= cap_tokens:
        return
    read = prompt_layer(call, layer, call.query.shape[2], slots, None)
    with torch.no_grad():
        layer.keep_part(layer.policy.select_under_cap(read, cap_tokens))


def select(layer: CompressedLayer, prompt: PromptLayer) -> Selection | None:
    """What the policy keeps of a prompt; None for all."""
    with torch.no_grad():
        return layer.policy.select(prompt)


def choose_for_whole_rows(call: AttentionCall, layer: CompressedLayer, *, is_end: bool) -> None:
    """At the end of a later turn, compress the rows that fitted the budget until now.

    Alone such a row would have been read as one prompt. The others keep all that they hold.
    """
    if isinstance(layer.policy, EvictingPolicy) or layer.turns is not None:
        return
    whole = layer.slots.whole_rows(layer.store)
    if not any(whole):
        return
    new_tokens, slots = call.query.shape[2], call.key.shape[2]
    if not is_end:
        layer.remember_queries(call.query)
        return
    layer.absorb_tail()
    store = layer.store
    prompt = prompt_layer(call, layer, new_tokens, slots, layer.slots.fillers)
    if store.ragged is not None:
        held, (keys, values) = layer.slots.columns(store) >= 0, store.padded()
        prompt = replace(
            prompt,
            keys=keys,
            values=values,
            pad_tokens=(~held).sum(dim=-1).amax(dim=-1),
            protected=layer.protected_slots(store.slots, None),
        )
    else:
        held = layer.slots.visible(store, slots)[:, None]
    layer.forget_queries()
    with torch.no_grad():
        selection = select_by_rows(layer.policy, prompt, whole, held)
    if selection is not None:
        layer.keep_of_rows(selection)


def hold_for_eviction(call: AttentionCall, layer: CompressedLayer, turn_tokens: int) -> None:
    """Hold the queries of a part of a turn, at whose end a policy evicts as if it came at once."""
    if isinstance(layer.policy, EvictingPolicy):
        layer.remember_queries(call.query, turn_tokens)


def evict(call: AttentionCall, layer: CompressedLayer, tokens: int | None = None) -> None:
    """Let a policy that evicts while generating see this step and drop what it will."""
    policy = layer.policy
    if not isinstance(policy, EvictingPolicy):
        return
    new_tokens = call.query.shape[2] if tokens is None else tokens
    layer.absorb_tail()
    store, slots, notes = layer.store, layer.slots, layer.notes
    if store.ragged is not None:
        keys, scores = store.ragged.padded_keys(), notes.slot_scores
    else:
        keys, scores = call.key, notes.scores_with(new_tokens)
    columns, pads = slots.columns(store), slots.pads
    spans = layer.spans.protect
    positions = columns if pads is None else columns - pads[:, None, None]
    step = DecodeStep(
        queries=layer.look_back(call.query),
        keys=keys,
        scores=scores,
        head_notes=notes.head_notes,
        token_ids=notes.token_ids,
        filler_tokens=slots.fillers,
        columns=columns,
        pad_tokens=pads,
        protected=None if spans is None else spans.cover(positions),
        seen_tokens=layer.seen_tokens,
        **of_layer(call, layer),
    )
    with torch.no_grad():
        layer.apply_eviction(policy.evict(step))


def of_layer(call: AttentionCall, layer: CompressedLayer) -> dict[str, Any]:
    """What every view of a layer says: what attention does to scores, and which layer it is."""
    stored = layer.store.keys.shape[1]
    return {
        "score_options": call.score_options,
        "stored_heads": None if stored == call.key.shape[1] else stored,
        "layer_idx": layer.identity.layer_idx,
        "depth": layer.identity.depth,
        "num_layers": layer.identity.num_layers,
    }


def prompt_layer(
    call: AttentionCall,
    layer: CompressedLayer,
    own: int,
    slots: int,
    pads: Tensor | None,
) -> PromptLayer:
    """The states of a layer at the end of the prompt, or of a part of it, for the policy."""
    options, ids = call.options, layer.notes.token_ids
    if options.get("position_bias") is not None:
        raise UnsupportedModelError(
            f"model: expected attention without a position bias, got {type(call.module).__name__}, "
            "whose bias the votes do not see; it cannot be compressed correctly"
        )
    causal = options.get("is_causal", getattr(call.module, "is_causal", True))
    if call.mask is None and causal is False:
        raise UnsupportedModelError(
            f"model: expected causal attention, got {type(call.module).__name__}, whose tokens see "
            "each other in both directions; only a causal decoder has a prompt to compress"
        )
    return PromptLayer(
        queries=layer.with_remembered(call.query[:, :, :own]).detach(),
        keys=call.key[:, :, :slots],
        values=call.value[:, :, :slots],
        pad_tokens=pads,
        token_ids=None if ids is None else ids[:, :slots],
        rotation=layer.identity.rotation,
        output_weight=output_weight(layer.identity.output_projection),
        protected=layer.protected_slots(slots, pads),
        fair=layer.spans.fair,
        **of_layer(call, layer),
    )
