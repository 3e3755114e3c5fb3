"""The wrapper around a model's attention, which compresses a layer after it has attended.

It is registered through the official `AttentionInterface` as ``"snapkv|<name>"``, together with the
mask function of ``<name>``. The wrapper calls the attention function ``<name>``. If a prompt ends
in this forward pass, it then lets the policy select tokens and the layer evict the others. It
receives the same queries as attention does: after rotary embedding and query norm.
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
from snapkv.cache.layer_group import quantize_slots
from snapkv.cache.prompt_state import PaddingTracker, PromptState
from snapkv.cache.recall import offload_all
from snapkv.cache.spans import protected_slots
from snapkv.errors import CacheMismatchError, SnapKVError, UnsupportedModelError, wrong
from snapkv.hf import forward_context
from snapkv.hf.attend import Attended, AttentionCall, attend_stored, with_fitting_mask
from snapkv.hf.cache_argument import cache_among, passed
from snapkv.hf.forward_context import ForwardContext, Phase, Shared
from snapkv.hf.masks import leading_pads, mask_function, sees_ahead
from snapkv.hf.model_parts import has_read_image, output_weight
from snapkv.policies import (
    DecodeStep,
    EvictingPolicy,
    PromptLayer,
    checks,
)
from snapkv.policies.states import DeferredChecks

_PREFIX = "snapkv|"

# Registration with transformers.


def register_attention(name: str) -> str:
    """Register a wrapper around an attention implementation with transformers.

    Args:
        name: the name of the implementation, such as "sdpa".

    Returns:
        The name of the wrapper, such as "snapkv|sdpa".

    Raises:
        UnsupportedModelError: transformers has no mask function for this implementation.
    """
    if name not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise wrong(
            "attn_implementation",
            f"the installed version of transformers has no mask function for {name!r}",
            "Load the model with attn_implementation='sdpa' or 'eager'",
            UnsupportedModelError,
        )
    wrapped = _PREFIX + name
    attention, make_mask = _functions_around(name)
    AttentionInterface.register(wrapped, attention)
    AttentionMaskInterface.register(wrapped, make_mask)
    return wrapped


def is_wrapped(name: str | None) -> bool:
    """Return whether `name` is the name of a wrapper that `register_attention` registers."""
    return name is not None and name.startswith(_PREFIX)


def plain_name(name: str | None) -> str | None:
    """Return the name of the wrapped implementation; a name without a wrapper is unchanged."""
    return name if name is None else name.removeprefix(_PREFIX)


@functools.cache
def _functions_around(name: str) -> tuple[Callable[..., Attended], Callable[..., Any]]:
    """Return the attention function and the mask function of the wrapper around `name`."""
    # Cached, because torch.compile compiles again for a function that is another object.
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
    """Make the mask of a forward pass; for a compressed cache, check its padding first.

    Raises:
        UnsupportedModelError: the mask has padding inside a row, or tokens see later ones after a
            compressed prompt.
    """
    watch = forward_context.take_padding()
    # A model that adds to the causal mask, for example for images, does not allow skipping it.
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
    """Raise if the mask is not causal although the cache has already evicted tokens.

    For example, the tokens of an image may attend to each other in both directions.

    Raises:
        UnsupportedModelError: a layer has evicted tokens, and `mask` is not causal for the last
            `new_tokens` tokens.
    """
    is_compressed = any(
        layer.slots.is_compressed and not layer.offloaded.is_due for layer in watch.layers
    )
    if is_compressed and sees_ahead(mask, new_tokens):
        raise wrong(
            "attention_mask",
            "expected a causal mask after a compressed prompt, but got tokens that see each other "
            "in both directions, as the tokens of an image do",
            "Make the cache with recall='host', or pass all images with the first prompt",
            UnsupportedModelError,
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
    """Run the wrapped attention, and then compress the layer if its cache is a compressed one.

    Args:
        implementation: the name of the wrapped implementation.
        module: the attention module.
        query: (B, Hq, Q, D).
        key: (B, Hkv, S + Q, D).
        value: (B, Hkv, S + Q, Dv).
        attention_mask: the mask in the form of this implementation.
        options: further arguments of the implementation.

    Returns:
        (B, Q, Hq, Dv) outputs, and attention weights if the implementation returns them.

    Raises:
        CacheMismatchError: the cache belongs to another model.
        InvalidArgumentError: the policy does not work with the length of this prompt.
        UnsupportedModelError: the call cannot be compressed correctly.
    """
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
    """Return the module file that defines eager attention for an attention class, or None."""
    # A subclass that a user has derived lies in a file without it, so base classes are searched.
    files = (sys.modules.get(each.__module__) for each in kind.__mro__)
    return next((file for file in files if hasattr(file, "eager_attention_forward")), None)


def attend(call: AttentionCall) -> Attended:
    """Run an attention call, then compress the layer whose update came just before it.

    A call without such a layer runs unchanged.

    Raises:
        CacheMismatchError: the cache belongs to another model, or the model ignored it.
        InvalidArgumentError: the policy does not work with the length of this prompt.
        UnsupportedModelError: the call cannot be compressed correctly.
    """
    context = _take_context(call)
    if context is None:
        _require_cache_was_used(call)
        shared = forward_context.take_shared(call.key)
        return call.attend() if shared is None else _attend_shared(call, shared)
    prompt_state = context.forward_pass.prompt_state
    reads_end = context.forward_pass.reads_end and bool(prompt_state.chooser.unread_layers)
    if reads_end:
        prompt_state.record_end(context.layer.identity.layer_idx)
    prompt_state.is_broken = True  # stays so after an error, as in `PromptState.attending`
    if context.layer.identity.readers or forward_context.current.shared:
        forward_context.share(context, call.key)
    attended = _PHASES[context.phase](with_fitting_mask(call, context.layer), context)
    if reads_end and not prompt_state.chooser.unread_layers:  # this was the last layer
        prompt_state.chooser.finish()
        context.forward_pass.check.close()
    prompt_state.is_broken = False
    return attended


# One function for each phase of a conversation. Each runs the attention call of `context.layer`,
# changes this layer in place, and returns what the model's own attention returns.


def _read_prompt(call: AttentionCall, context: ForwardContext) -> Attended:
    """Read a piece of a prompt, and hold the queries that will vote at its end.

    Raises:
        OutOfMemoryError: the layer has recall, and there is no room for the offloaded tokens.
        UnsupportedModelError: attention has a position bias or is not causal.
    """
    layer = context.layer
    attended = attend_stored(call, layer)
    layer.queries.remember(call.query)
    if (hook := forward_context.current.hook) is not None:
        hook.on_prompt(replace(_prompt_layer(call, layer, None, None), queries=call.query))
    layer.store.finalize_step()
    if not context.forward_pass.prompt_state.is_piecewise:
        offload_all(layer)
    return attended


def _end_prompt(call: AttentionCall, context: ForwardContext) -> Attended:
    """Read the end of the first prompt, and then let the policy select which tokens to keep.

    The layer may wait for the next layers, so that a group of layers selects at once.

    Raises:
        InvalidArgumentError: the policy does not work with this prompt, or a row has no token.
        OutOfMemoryError: there is no room for the offloaded tokens.
        UnsupportedModelError: the mask, or the attention of the model, does not agree with the
            votes.
    """
    layer = context.layer
    own, slots = call.query.shape[2], call.key.shape[2]
    pads = leading_pads(call.mask, own - 1, slots, layer.policy.query_tokens)
    check, state = context.forward_pass.check, context.forward_pass.prompt_state
    prompt = _prompt_layer(call, layer, pads, check.deferred)
    attended = attend_stored(call, layer)
    check_votes = None
    # A policy that votes with queries computes attention itself, so it must agree with the model.
    if layer.policy.query_tokens:
        check_votes = functools.partial(
            check.judge, module=call.module, rounds_scores=call.implementation == "eager"
        )
    output = attended[0][:, -1]
    state.chooser.offer(layer, prompt, output, check_votes, may_wait=not state.is_piecewise)
    return attended


def _read_turn(call: AttentionCall, context: ForwardContext) -> Attended:
    """Read a piece of a later prompt, which attends to the kept tokens, and store all its tokens.

    Raises:
        InvalidArgumentError: a number cannot be quantized.
    """
    layer = context.layer
    attended = attend_stored(call, layer)
    if isinstance(policy := layer.policy, EvictingPolicy):
        turn_tokens = context.forward_pass.turn_tokens
        if context.forward_pass.reads_end:  # the same result as for a turn read in one pass
            _evict(call, layer, policy, turn_tokens)
        else:
            layer.queries.remember(call.query, turn_tokens)
    if layer.chooses_again:
        layer.queries.look_back(call.query)
    layer.store.finalize_step()
    return attended


def _end_turn(call: AttentionCall, context: ForwardContext) -> Attended:
    """Read the end of a later prompt, and then evict the tokens that its queries do not vote for.

    The queries vote on all tokens that the layer stores.

    Raises:
        InvalidArgumentError: the policy does not work with this prompt, or a number cannot be
            quantized.
        OutOfMemoryError: there is no room for the offloaded tokens.
        UnsupportedModelError: attention has a position bias or is not causal.
    """
    layer = context.layer
    attended = attend_stored(call, layer)
    deferred = context.forward_pass.check.deferred
    prompt = _prompt_layer(call, layer, layer.slots.padding_slots, deferred)
    with ops.scoring(call.key):
        selection = checks.select(layer.policy, prompt, [prompt.layer_idx])
    stored = prompt.keys.shape[2]
    if selection is None:
        layer.queries.look_back(call.query)
    else:
        layer.end_prompt(prompt, selection)
        stored = layer.slots.kept_slots(stored)
    quantize_slots([(layer, stored)], layer.codes)
    return attended


def _decode(call: AttentionCall, context: ForwardContext) -> Attended:
    """Read tokens that come after the prompt, and evict if the policy evicts during decoding.

    Raises:
        InvalidArgumentError: a number cannot be quantized.
    """
    layer = context.layer
    attended = attend_stored(call, layer)
    drafts = call.query.shape[2] if context.forward_pass.prompt_state.verifies_drafts else 0
    if isinstance(policy := layer.policy, EvictingPolicy):
        _evict(call, layer, policy, call.query.shape[2])
    if layer.chooses_again:
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
    """Attend to the keys and values of an earlier layer, in its state before it evicted tokens."""
    if (context := shared.context) is None:
        return _attend_in_place(call, shared)
    return attend_stored(with_fitting_mask(call, context.layer), context.layer)


def _attend_in_place(call: AttentionCall, shared: Shared) -> Attended:
    """Compute the attention to all tokens that a layer stores, in a captured decode step.

    The queries replace the oldest ones that the layer holds, in place.

    Raises:
        UnsupportedModelError: attention weights are requested from eager attention.
    """
    if call.implementation == "eager" and _requests_weights(call):
        with shared.prompt_state.attending():
            raise _without_weights()
    shared.layer.queries.write_over(call.query)
    return attend_stored(call, shared.layer)


# Calls of the policy.


def _evict(
    call: AttentionCall, layer: CompressedLayer, policy: EvictingPolicy, new_tokens: int
) -> None:
    """Evict the tokens that the policy does not keep after a decode step or a later turn.

    Args:
        call: the attention call that has just run.
        layer: the layer, which changes in place.
        policy: the policy of the layer.
        new_tokens: how many tokens were read since the policy last selected.

    Raises:
        InvalidArgumentError: the policy moves attention sinks, and the heads hold different numbers
            of tokens.
    """
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
    """Return the arguments that `PromptLayer` and `DecodeStep` have in common."""
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
    deferred: DeferredChecks | None,
) -> PromptLayer:
    """Build the view of a layer that the policy selects from, at the end of a prompt or a piece.

    Args:
        call: the attention call of the layer.
        layer: the layer.
        pads: (B,) int64, the number of padding tokens in front of each row; None for none.
        deferred: a list to which the policy appends checks that wait for the GPU; None if not used.

    Raises:
        UnsupportedModelError: attention has a position bias or is not causal.
    """
    options, ids, slots = call.options, layer.state.token_ids, call.key.shape[2]
    spans, output = layer.protect, layer.identity.output_projection
    if options.get("position_bias") is not None:
        raise wrong(
            "model",
            f"{type(call.module).__name__} adds a position bias to its attention scores, which is "
            "not included in the votes of the observation window",
            "Use the default cache of transformers for this model",
            UnsupportedModelError,
        )
    causal = options.get("is_causal", getattr(call.module, "is_causal", True))
    if call.mask is None and causal is False:
        raise wrong(
            "model",
            f"expected causal attention, but got {type(call.module).__name__}, whose tokens see "
            "each other in both directions",
            "Use a decoder-only model with causal attention, because only such a model stores its "
            "prompt in a key-value cache",
            UnsupportedModelError,
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
        deferred_checks=deferred,
        **_of_layer(call, layer),
    )


# Matching a call with its layer, and refusing calls.


def _take_context(call: AttentionCall) -> ForwardContext | None:
    """Return the context of the layer whose update preceded this call, and forget it.

    Returns:
        None if the call belongs to no compressed cache.

    Raises:
        CacheMismatchError: the cache belongs to another model.
        UnsupportedModelError: the call cannot be compressed correctly. The tokens of the layer's
            update have been removed again.
    """
    current = forward_context.current
    context, current.context = current.context, None
    if context is None:
        return None
    if call.key.shape[2] != context.keys.shape[2] and not _is_of_layer(call, context):
        # The call belongs to another model, so the layer's own attention did not run.
        context.forward_pass.prompt_state.is_broken = True
        return None
    refusal = _refusal(call, context)
    if refusal is not None:
        context.take_back()
        raise refusal
    return context


def _is_of_layer(call: AttentionCall, context: ForwardContext) -> bool:
    """Return whether a call with other keys is still the attention of the layer in `context`.

    Otherwise it is a call without this cache, after a forward pass that was interrupted.
    """
    layer_idx = getattr(call.module, "layer_idx", None)
    return (
        call.module in context.forward_pass.modules
        and layer_idx in (None, context.layer.identity.layer_idx)
        and call.query.shape[2] == context.forward_pass.new_tokens
    )


def _require_cache_was_used(call: AttentionCall) -> None:
    """Raise if the cache was passed to a model under a name that the model ignores.

    Releases of transformers before 5.24 ignore ``cache=``, and models that are new in 5.24 ignore
    ``past_key_values=``. They pass such an argument through to their attention.

    Raises:
        CacheMismatchError: a `CompressedCache` was passed through.
    """
    if isinstance(getattr(cache_among(call.options), "prompt_state", None), PromptState):
        (used,) = passed(None)
        raise wrong(
            "cache",
            "the model ignores the name of the argument with which the CompressedCache was passed",
            f"Pass the cache as the argument {used}=cache of the model",
            CacheMismatchError,
        )


def _refusal(call: AttentionCall, context: ForwardContext) -> SnapKVError | None:
    """Return the error of an attention call that cannot be compressed correctly, or None.

    It is a CacheMismatchError if the cache belongs to another model, otherwise an
    UnsupportedModelError.
    """
    name, layer = type(call.module).__name__, context.layer
    if call.module not in context.forward_pass.modules:
        return wrong(
            "cache",
            f"expected the model for which the cache was made, but got a different {name}",
            "Make a new CompressedCache for this model",
            CacheMismatchError,
        )
    if (keys := call.key.shape[2]) != (stored := context.keys.shape[2]):
        return wrong(
            "model",
            f"expected attention to the {stored:,} keys that the cache has returned, but got "
            f"{keys:,} in layer {layer.identity.layer_idx}, where {name} of "
            f"{type(call.module).__module__} adds keys of its own, such as a learned null key, or "
            "leaves some out",
            "Use the default cache of transformers for this model, because the votes would be "
            "wrong",
            UnsupportedModelError,
        )
    is_stored = call.key is context.keys and call.value is context.values
    if not is_stored and _rearranges(call, context):
        return wrong(
            "model",
            f"{name} rearranges the keys and values that the cache returns, which would mix up "
            "heads that keep different tokens",
            "Use the default cache of transformers for this model",
            UnsupportedModelError,
        )
    is_ragged = layer.store.ragged is not None
    if is_ragged and call.implementation == "eager" and _requests_weights(call):
        return _without_weights()
    # This check reads a number from the device, so it runs once per pass and not while decoding.
    is_checked = not layer.identity.depth and context.phase is not Phase.DECODE
    if is_checked and (refusal := _refusal_of_images(name, context)):
        return refusal
    is_own = context.forward_pass.has_own_mask and getattr(call.mask, "ndim", 0) == 4
    if is_own and layer.slots.is_compressed:
        return wrong(
            "attention_mask",
            "expected a 2-D mask after a compressed prompt, because each head keeps different "
            "tokens, but got a 4-D mask",
            "Use cache.drop(spans) to hide tokens, and read each branch into a copy of the cache",
            UnsupportedModelError,
        )
    return None


def _refusal_of_images(name: str, context: ForwardContext) -> SnapKVError | None:
    """Return the error of a policy that rotates states after an image; None for other policies."""
    layer = context.layer
    needs_rotation = "rotation" in layer.policy.needs
    if not needs_rotation or not has_read_image(context.forward_pass.modules):
        return None
    return wrong(
        "policy",
        f"the method {layer.policy.name} needs positions that count tokens, but the positions of "
        f"{name} do not count tokens after an image",
        "Use SnapKV instead, or set the `rope_deltas` of the model to None if it has not read an "
        "image",
        UnsupportedModelError,
    )


def _without_weights() -> SnapKVError:
    """Return the error of a call for attention weights that the storage cannot give."""
    return wrong(
        "output_attentions",
        "attention weights cannot be returned if heads keep different numbers of tokens or if "
        "tokens are quantized, but output_attentions is True",
        "Remove this argument, or use SnapKV without quantize",
        UnsupportedModelError,
    )


def _requests_weights(call: AttentionCall) -> bool:
    """Return whether attention weights are requested by the call or by the model's config."""
    config = getattr(call.module, "config", None)
    return bool(call.options.get("output_attentions", getattr(config, "output_attentions", False)))


def _rearranges(call: AttentionCall, context: ForwardContext) -> bool:
    """Return whether a call reads heads that keep different tokens from other tensors."""
    layer, stored = context.layer, (context.keys, context.values)
    if all(map(_is_same, (call.key, call.value), stored)):
        return False
    by_head = layer.policy.per_query_head or layer.codes is not None
    return by_head or context.keys.shape[1] > 1


def _is_same(states: Tensor, stored: Tensor) -> bool:
    return states.data_ptr() == stored.data_ptr() and states.shape == stored.shape
