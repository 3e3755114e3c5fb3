"""Attention is wrapped here, and nowhere else: a function around the model's own.

Registered through the official `AttentionInterface` under ``"snapkv|<name>"``, with the mask
function of ``<name>``. It calls the wrapped function and, where a prompt ends in this forward
pass, asks the policy what to keep and lets the layer keep it. Queries arrive after rotary
embedding, query norm and scaling: exactly what attention saw.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from snapkv import ops
from snapkv.cache.evicting import absorb_tail, apply_eviction
from snapkv.cache.layer import CompressedLayer
from snapkv.cache.layer_group import encode
from snapkv.cache.prompt_state import PaddingTracker, PromptState
from snapkv.cache.recall import set_aside
from snapkv.cache.spans import protected_slots
from snapkv.errors import CacheMismatchError, UnsupportedModelError
from snapkv.hf import forward_context
from snapkv.hf.attend import Attended, AttentionCall, attend_stored, with_fitting_mask
from snapkv.hf.forward_context import ForwardContext, Phase, Shared
from snapkv.hf.masks import leading_pads, mask_function, sees_ahead
from snapkv.hf.model_parts import has_images_positions, output_weight
from snapkv.policies import (
    DecodeStep,
    EvictingPolicy,
    PromptLayer,
    checks,
)
from snapkv.policies.states import DeferredChecks

_PREFIX = "snapkv|"

# The registered functions.


def register_attention(name: str) -> str:
    """Wrap an attention implementation; returns the name under which it is registered then."""
    if name not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise UnsupportedModelError(
            f"attn_implementation: expected one that transformers has a mask function for, got "
            f"{name!r}; load the model with attn_implementation='sdpa' or 'eager'"
        )
    wrapped = _PREFIX + name
    attention, make_mask = _functions_around(name)
    AttentionInterface.register(wrapped, attention)
    AttentionMaskInterface.register(wrapped, make_mask)
    return wrapped


def is_wrapped(name: str | None) -> bool:
    """Whether an implementation of that name is a wrapped one."""
    return name is not None and name.startswith(_PREFIX)


def plain_name(name: str | None) -> str | None:
    """The name of the implementation that is wrapped; any other name as it is."""
    return name if name is None else name.removeprefix(_PREFIX)


@functools.cache
def _functions_around(name: str) -> tuple[Callable[..., Attended], Callable[..., Any]]:
    """The same every time, so that what was compiled stays so."""
    return (
        functools.partial(_attention, name),
        functools.partial(_make_mask, mask_function(name)),
    )


def _make_mask(
    make: Callable[..., Any],
    *,
    q_length: int,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Any:
    """The registered mask function: tells the cache of the padding that it makes the mask of."""
    watch = forward_context.take_padding()
    # Where a model lays more over the mask, such as images, it says that it must be made.
    may_be_bidirectional = not options.get("allow_is_causal_skip", True)
    padding = attention_mask if watch is None else watch.expect(attention_mask, q_length)
    is_known_to_hide = padding is not None and padding is not attention_mask
    if is_known_to_hide and "allow_is_causal_skip" in options:
        options["allow_is_causal_skip"] = False
    made = make(q_length=q_length, attention_mask=padding, **options)
    if watch is not None and may_be_bidirectional and q_length > 1:
        _require_causal(watch, made, q_length)
    return made


def _require_causal(watch: PaddingTracker, mask: Any, new_tokens: int) -> None:
    """Refuse tokens, such as an image's, that see later ones behind a compressed prompt."""
    is_over_kept = any(one.slots.is_compressed and not one.recall_due for one in watch.layers)
    if is_over_kept and sees_ahead(mask, new_tokens):
        raise UnsupportedModelError(
            "attention_mask: expected a causal mask after a compressed prompt, got tokens that "
            "see each other in both directions, as those of an image do; pass recall='host', or "
            "read all images with the first prompt"
        )


def _attention(
    implementation: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> Attended:
    """The registered attention function."""
    family = _family_of(type(module))  # type: ignore[arg-type] # classes are hashable
    interface = getattr(family, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    eager = getattr(family, "eager_attention_forward", None)
    call = AttentionCall(
        function=interface.get_interface(implementation, eager),
        implementation=implementation,
        module=module,
        query=query,
        key=key,
        value=value,
        mask=attention_mask,
        options=options,
        branches=forward_context.current.branches,
    )
    attended = attend(call)
    if (hook := forward_context.current.hook) is not None:
        hook.on_attention(call, attended)
    return attended


@functools.cache
def _family_of(kind: type[Any]) -> Any:
    """The file of a class of attention that has eager attention; None where there is none.

    A class that somebody derives from a family's stands in a file that has none.
    """
    files = (sys.modules.get(each.__module__) for each in kind.__mro__)
    return next((file for file in files if hasattr(file, "eager_attention_forward")), None)


def attend(call: AttentionCall) -> Attended:
    """What the call returns, once the layer that was left for it has stored and kept its part."""
    context = _take_context(call)
    if context is None:
        _require_taken(call)
        shared = forward_context.take_shared(call.key)
        return call.attend() if shared is None else _attend_shared(call, shared)
    prompt_state = context.forward_pass.prompt_state
    reads_end = context.forward_pass.reads_end and bool(prompt_state.chooser.unread_layers)
    if reads_end:
        prompt_state.record_end(context.layer.identity.layer_idx)
    prompt_state.is_broken = True  # until it comes to its end, as in `PromptState.attending`
    if context.layer.identity.readers or forward_context.current.shared:
        forward_context.share(context, call.key)
    attended = _PHASES[context.phase](with_fitting_mask(call, context.layer), context)
    if reads_end and not prompt_state.chooser.unread_layers:  # in every layer
        prompt_state.chooser.finish()
        context.forward_pass.check.close()
    prompt_state.is_broken = False
    return attended


# What a call does, by where in the conversation it lies.


def _read_prompt(call: AttentionCall, context: ForwardContext) -> Attended:
    """Attend to the prompt as far as it has been read, and hold what its end will need."""
    layer = context.layer
    attended = attend_stored(call, layer)
    layer.queries.remember(call.query)
    if (hook := forward_context.current.hook) is not None:
        hook.on_prompt(replace(_prompt_layer(call, layer, None, None), queries=call.query))
    layer.store.finalize_step()
    if not context.forward_pass.prompt_state.is_piecewise:
        set_aside(layer)
    return attended


def _end_prompt(call: AttentionCall, context: ForwardContext) -> Attended:
    """The prompt ends in this pass: attend to all of it, then let the layer keep its part."""
    layer = context.layer
    own, slots = call.query.shape[2], call.key.shape[2]
    pads = leading_pads(call.mask, own - 1, slots, layer.policy.query_tokens)
    check, state = context.forward_pass.check, context.forward_pass.prompt_state
    prompt = _prompt_layer(call, layer, pads, check.unasked)
    attended = attend_stored(call, layer)
    check_votes = None
    if layer.policy.query_tokens:  # it scores by attention, which must be the model's
        check_votes = functools.partial(
            check.judge, module=call.module, rounds_scores=call.implementation == "eager"
        )
    output = attended[0][:, -1]
    state.chooser.offer(layer, prompt, output, check_votes, may_wait=not state.is_piecewise)
    return attended


def _read_turn(call: AttentionCall, context: ForwardContext) -> Attended:
    """A later prompt is read over what was kept, and stored whole."""
    layer = context.layer
    attended = attend_stored(call, layer)
    if isinstance(policy := layer.policy, EvictingPolicy):
        turn_tokens = context.forward_pass.turn_tokens
        if context.forward_pass.reads_end:  # as if the turn came at once
            _evict(call, layer, policy, turn_tokens)
        else:
            layer.queries.remember(call.query, turn_tokens)
    if layer.turns != "append":
        layer.queries.look_back(call.query)
    layer.store.finalize_step()
    return attended


def _end_turn(call: AttentionCall, context: ForwardContext) -> Attended:
    """A later prompt ends in this pass: read it over what is stored, then let it vote on that."""
    layer = context.layer
    attended = attend_stored(call, layer)
    unasked = context.forward_pass.check.unasked
    prompt = _prompt_layer(call, layer, layer.slots.padding_slots, unasked)
    with ops.scoring(call.key):
        selection = checks.select(layer.policy, prompt, [prompt.layer_idx])
    stored = prompt.keys.shape[2]
    if selection is None:
        layer.queries.look_back(call.query)
    else:
        layer.end_prompt(selection, prompt)
        stored = layer.kept_slots(stored)
    encode([(layer, stored)], layer.codes)
    return attended


def _decode(call: AttentionCall, context: ForwardContext) -> Attended:
    """Tokens behind the prompt attend to what is stored, and may make a method evict."""
    layer = context.layer
    attended = attend_stored(call, layer)
    drafts = call.query.shape[2] if context.forward_pass.prompt_state.verifies_drafts else 0
    if isinstance(policy := layer.policy, EvictingPolicy):
        _evict(call, layer, policy, call.query.shape[2])
    if layer.turns != "append":
        layer.queries.look_back(call.query, drafts)
    layer.store.finalize_step(drafts)
    return attended


_PHASES: dict[Phase, Callable[[AttentionCall, ForwardContext], Attended]] = {
    Phase.READ_PROMPT: _read_prompt,
    Phase.END_PROMPT: _end_prompt,
    Phase.READ_TURN: _read_turn,
    Phase.END_TURN: _end_turn,
    Phase.DECODE: _decode,
}


def _attend_shared(call: AttentionCall, shared: Shared) -> Attended:
    """Attend to what an earlier layer has stored, as it did before it chose what to keep."""
    if (context := shared.context) is None:
        return _attend_in_place(call, shared)
    return attend_stored(with_fitting_mask(call, context.layer), context.layer)


def _attend_in_place(call: AttentionCall, shared: Shared) -> Attended:
    """Attend to what heads hold, and to the tail after it that has room."""
    if call.implementation == "eager" and _asks_for_weights(call):
        with shared.prompt_state.attending():
            raise _without_weights()
    shared.layer.queries.write_over(call.query)
    return attend_stored(call, shared.layer)


# What the policy is shown and asked.


def _evict(
    call: AttentionCall, layer: CompressedLayer, policy: EvictingPolicy, new_tokens: int
) -> None:
    """Let a policy that evicts while generating see these last tokens and drop what it will."""
    absorb_tail(layer)
    store, slots, state = layer.store, layer.slots, layer.state
    if store.ragged is not None:
        keys, scores = store.ragged.decoded().padded_keys(), state.slot_scores
    else:
        keys, scores = call.key, state.scores_with(new_tokens)
    columns, pads = layer.stored_columns(), slots.pads
    spans = layer.protect
    positions = columns if pads is None else columns - pads[:, None, None]
    step = DecodeStep(
        queries=layer.queries.look_back(call.query),
        keys=keys,
        scores=scores,
        head_notes=state.head_notes,
        token_ids=state.token_ids,
        padding_slots=slots.padding_slots,
        columns=columns,
        pad_tokens=pads,
        protected=None if spans is None else spans.cover(positions),
        seen_tokens=layer.seen_tokens,
        **_of_layer(call, layer),
    )
    with ops.scoring(call.key):
        eviction = policy.evict(step)
    apply_eviction(layer, eviction)


def _of_layer(call: AttentionCall, layer: CompressedLayer) -> dict[str, Any]:
    """What every view of a layer says: what attention does to scores, and which layer it is."""
    stored = layer.store.keys.shape[1]
    return {
        "score_options": call.score_options,
        "stored_heads": None if stored == call.key.shape[1] else stored,
        "layer_idx": layer.identity.layer_idx,
        "depth": layer.identity.depth,
        "num_layers": layer.identity.num_layers,
    }


def _prompt_layer(
    call: AttentionCall,
    layer: CompressedLayer,
    pads: Tensor | None,
    unasked: DeferredChecks | None,
) -> PromptLayer:
    """The states of a layer at the end of the prompt, or of a part of it, for the policy."""
    options, ids, slots = call.options, layer.state.token_ids, call.key.shape[2]
    spans, output = layer.protect, layer.identity.output_projection
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
        queries=layer.queries.window(call.query).detach(),
        keys=call.key,
        values=call.value,
        pad_tokens=pads,
        token_ids=None if ids is None else ids[:, :slots],
        rotation=layer.identity.rotation,
        output_weight=None if output is None else output_weight(output, call.value.dtype),
        protected=None if spans is None else protected_slots(layer, spans, slots, pads),
        token_cost=functools.partial(layer.token_cost, call.query.shape[1]),
        deferred_checks=unasked,
        **_of_layer(call, layer),
    )


# Whose call it is, and what is refused.


def _take_context(call: AttentionCall) -> ForwardContext | None:
    """The layer whose update preceded this call, or None for a cache that is not ours."""
    current = forward_context.current
    context, current.context = current.context, None  # it is left only once
    if context is None:
        return None
    if call.key.shape[2] != context.keys.shape[2] and not _is_of_layer(call, context):
        # This is another model's call: the layer has missed its own.
        context.forward_pass.prompt_state.is_broken = True
        return None
    refusal = _refusal(call, context)
    if refusal is not None:
        context.take_back()
        raise refusal
    return context


def _is_of_layer(call: AttentionCall, context: ForwardContext) -> bool:
    """Whether a call to other keys is the attention of the layer whose context was left.

    It may also be a call without this cache, after a forward pass that was interrupted.
    """
    layer_idx = getattr(call.module, "layer_idx", None)
    return (
        call.module in context.forward_pass.modules
        and layer_idx in (None, context.layer.identity.layer_idx)
        and call.query.shape[2] == context.forward_pass.new_tokens
    )


def _require_taken(call: AttentionCall) -> None:
    """Refuse a cache under the name of transformers 5.24 where an older one passes it through."""
    if isinstance(getattr(call.options.get("cache"), "prompt_state", None), PromptState):
        raise CacheMismatchError(
            "cache: expected no such argument before transformers 5.24, whose models leave it "
            "unused, got a CompressedCache; pass past_key_values=cache"
        )


def _refusal(call: AttentionCall, context: ForwardContext) -> Exception | None:
    """Why this call cannot be compressed correctly; None where it can."""
    name, layer = type(call.module).__name__, context.layer
    if call.module not in context.forward_pass.modules:
        return CacheMismatchError(
            f"cache: expected the model the cache was made for, got another {name}; make "
            "a CompressedCache for this model"
        )
    if (keys := call.key.shape[2]) != (stored := context.keys.shape[2]):
        return UnsupportedModelError(
            f"model: expected attention to the {stored:,} keys that the cache has returned, got "
            f"{keys:,} in layer {layer.identity.layer_idx}, where {name} of "
            f"{type(call.module).__module__} adds keys of its own, such as a learned null key, or "
            "leaves some out; its votes would be wrong, so use transformers' own cache for it"
        )
    is_stored = call.key is context.keys and call.value is context.values
    if not is_stored and _rearranges(call, context):
        return UnsupportedModelError(
            f"model: expected attention to the keys and values as they are stored, got {name}, "
            "which rearranges them after the cache; heads that keep different tokens would be "
            "mixed, so it cannot be compressed"
        )
    is_ragged = layer.store.ragged is not None
    if is_ragged and call.implementation == "eager" and _asks_for_weights(call):
        return _without_weights()
    is_asked = not layer.identity.depth and context.phase is not Phase.DECODE  # once a pass
    if is_asked and (refusal := _refusal_of_images(name, context)):
        return refusal
    is_own = context.forward_pass.has_own_mask and getattr(call.mask, "ndim", 0) == 4
    if is_own and layer.slots.is_compressed:
        return UnsupportedModelError(
            "attention_mask: expected a 2-D one after a compressed prompt, whose heads keep "
            "tokens of their own, got a 4-D one; drop tokens with cache.drop(spans), read "
            "each branch after a copy of the cache"
        )
    return None


def _refusal_of_images(name: str, context: ForwardContext) -> UnsupportedModelError | None:
    """Return the error of a policy that rotates states after an image; None for other policies."""
    layer = context.layer
    needs_rotation = "rotation" in layer.policy.needs
    if not needs_rotation or not has_images_positions(context.forward_pass.modules):
        return None
    return UnsupportedModelError(
        f"policy: expected one that does not ask for positions after an image, whose "
        f"positions in {name} count no tokens, got {layer.policy.name}; use SnapKV, or set the "
        "model's `rope_deltas` to None if it has read no image"
    )


def _without_weights() -> UnsupportedModelError:
    return UnsupportedModelError(
        "output_attentions: expected False where attention gives no weights, as for heads "
        "of different length or codes, got True; leave it out, or use SnapKV without quantize"
    )


def _asks_for_weights(call: AttentionCall) -> bool:
    config = getattr(call.module, "config", None)
    asked = call.options.get("output_attentions", getattr(config, "output_attentions", False))
    return bool(asked)


def _rearranges(call: AttentionCall, context: ForwardContext) -> bool:
    """Whether heads that keep different tokens are not read where they are stored."""
    layer, stored = context.layer, (context.keys, context.values)
    if all(map(_is_same, (call.key, call.value), stored)):
        return False
    by_head = layer.policy.per_query_head or layer.codes is not None
    return by_head or context.keys.shape[1] > 1


def _is_same(states: Tensor, stored: Tensor) -> bool:
    return states.data_ptr() == stored.data_ptr() and states.shape == stored.shape
