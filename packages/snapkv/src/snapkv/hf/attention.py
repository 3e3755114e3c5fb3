"""Attention is intercepted here: the one seam with transformers, a function around the model's own.

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

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from snapkv.cache.layer import CompressedLayer
from snapkv.errors import CacheMismatchError, UnsupportedModelError
from snapkv.hf import forward_context
from snapkv.hf.attend import Attended, AttentionCall, attend_stored, fitting
from snapkv.hf.forward_context import ForwardContext, Phase
from snapkv.hf.masks import leading_pads, mask_function, prompt_mask
from snapkv.hf.selection import (
    choose_for_whole_rows,
    evict,
    hold_for_eviction,
    keep_to_cap,
    prompt_layer,
    select,
)
from snapkv.policies import PromptLayer, Selection
from snapkv.storage.base import keep_tokens

_PREFIX = "snapkv|"


def register_attention(name: str) -> str:
    """Register the seam around an attention implementation; returns the name it has then.

    The registered functions are the same every time, so that what was compiled stays so.
    """
    if name not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise UnsupportedModelError(
            f"attn_implementation: expected one that transformers has a mask function for, got "
            f"{name!r}; load the model with attn_implementation='sdpa' or 'eager'"
        )
    seam = _PREFIX + name
    AttentionInterface.register(seam, _seam_around(name))
    AttentionMaskInterface.register(seam, _mask_function_around(name))
    return seam


def is_seam(name: str | None) -> bool:
    """Whether that is the name of a registered seam."""
    return name is not None and name.startswith(_PREFIX)


def plain_name(name: str | None) -> str | None:
    """The name of the implementation that a seam is around; any other name as it is."""
    return name if name is None else name.removeprefix(_PREFIX)


@functools.cache
def _seam_around(name: str) -> Callable[..., Attended]:
    return functools.partial(_attention, name)


@functools.cache
def _mask_function_around(name: str) -> Callable[..., Any]:
    return functools.partial(_make_mask, mask_function(name))


def _make_mask(
    make: Callable[..., Any],
    *,
    q_length: int,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Any:
    """The registered mask function: tells the cache of the padding that it makes the mask of."""
    watch = forward_context.take_padding()
    padding = attention_mask if watch is None else watch.expect(attention_mask, q_length)
    is_known_to_hide = padding is not None and padding is not attention_mask
    if is_known_to_hide and "allow_is_causal_skip" in options:
        options["allow_is_causal_skip"] = False
    return make(q_length=q_length, attention_mask=padding, **options)


def _attention(
    implementation: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> Attended:
    """The registered function: what to do depends on where in the prompt this pass lies."""
    call = AttentionCall(
        function=_wrapped_function(implementation, module),
        implementation=implementation,
        module=module,
        query=query,
        key=key,
        value=value,
        mask=attention_mask,
        options=options,
        candidates=forward_context.candidates(),
    )
    attended = attend(call)
    forward_context.hook().on_attention(call, attended)
    return attended


def attend(call: AttentionCall) -> Attended:
    """What the call returns, once the layer that was left for it has stored and kept its part."""
    context = _take_context(call)
    if context is None:
        return call.attend()
    with context.reading.attending():
        return _PHASES[context.phase](call, context)


def _read_prompt(call: AttentionCall, context: ForwardContext) -> Attended:
    """Attend to the prompt as far as it has been read, and hold what its end will need."""
    layer, reading = context.layer, context.reading
    call = fitting(call, layer)
    output = _attend_prompt(call, layer)
    keep_to_cap(call, layer, reading.cap_tokens)
    layer.remember_queries(call.query, reading.ahead_tokens)
    if type(hook := forward_context.hook()) is not forward_context.Hook:
        prompt = prompt_layer(call, layer, call.query.shape[2], layer.seen_tokens, None)
        hook.on_prompt(replace(prompt, queries=call.query))
    layer.store.finalize_step()
    if not reading.is_piecewise:
        layer.set_aside()
    return output


def _attend_prompt(call: AttentionCall, layer: CompressedLayer) -> Attended:
    """Attend to the prompt as far as it has been read, or to what is held of it."""
    holds_less = layer.slots.is_partial and layer.store.slots > call.query.shape[2]
    return attend_stored(call, layer) if holds_less else call.attend()


def _end_prompt(call: AttentionCall, context: ForwardContext) -> Attended:
    """The prompt ends in this pass: attend to all of it, then let the layer keep its part."""
    layer, drafts = context.layer, context.drafts
    call = fitting(call, layer)
    own, slots = call.query.shape[2] - drafts, layer.store.slots - drafts
    pads = leading_pads(call.mask, own - 1, slots, layer.policy.query_tokens)
    prompt = prompt_layer(call, layer, own, slots, pads)
    if context.reading.narrowing is not None:
        context.reading.narrowing.on_prompt(replace(prompt, queries=call.query))
    selection = select(layer, prompt)
    if not drafts or (selection is None and layer.storage.holds_as_it_came):
        output, weights = _attend_prompt(call, layer)
        _check_votes(call, context, prompt, output[:, own - 1])
        whole_pads = layer.slots.pads if layer.slots.is_partial else pads
        layer.end_prompt(selection, replace(prompt, pad_tokens=whole_pads))
        return output, weights
    read = replace(
        call,
        query=call.query[:, :, :own],
        key=call.key[:, :, :slots],
        value=call.value[:, :, :slots],
        mask=prompt_mask(call.implementation, call.mask, call.query[:, :, :own], slots, pads),
    )
    output, _ = read.attend()
    _check_votes(call, context, prompt, output[:, -1])
    layer.end_prompt(selection, prompt)
    behind = _drafts_of(call, selection, own)
    if layer.store.ragged is not None:  # the tail alone; the rest is with the heads
        behind = replace(behind, key=layer.store.keys, value=layer.store.values)
    verified, _ = attend_stored(behind, layer, rebuild_mask=True)
    evict(behind, layer)
    return torch.cat([output, verified], dim=1), None


def _drafts_of(call: AttentionCall, selection: Selection | None, own: int) -> AttentionCall:
    """The attention of the drafts behind a prompt's own queries, to what was selected of it."""
    behind = replace(call, query=call.query[:, :, own:])
    if selection is None or selection.head_tokens is not None:
        return behind
    indices, tokens = selection.keep_indices, selection.prompt_tokens
    return replace(
        behind,
        key=keep_tokens(call.key, indices, tokens),
        value=keep_tokens(call.value, indices, tokens),
    )


def _end_turn(call: AttentionCall, context: ForwardContext) -> Attended:
    """A later prompt ends in this pass: read it over what is stored, then let it vote on that."""
    layer, drafts = context.layer, context.drafts
    slots, own = call.key.shape[2] - drafts, call.query.shape[2] - drafts
    read = replace(
        call,
        query=call.query[:, :, :own],
        key=call.key[:, :, :slots],
        value=call.value[:, :, :slots],
    )
    output, weights = attend_stored(read, layer, rebuild_mask=drafts > 0, drafts=drafts)
    prompt = prompt_layer(read, layer, own, slots, layer.slots.fillers)
    selection = select(layer, prompt)
    if selection is not None:
        layer.end_prompt(selection, replace(prompt, pad_tokens=layer.slots.pads))
    else:
        layer.look_back(read.query)
        layer.store.finalize_step()
    if not drafts:
        return output, weights
    verified, _ = attend_stored(_drafts_of(call, selection, own), layer, rebuild_mask=True)
    return torch.cat([output, verified], dim=1), None


def _read_turn(call: AttentionCall, context: ForwardContext) -> Attended:
    """A later prompt is read over what was kept; rows that fitted until now choose at its end."""
    return _attend_behind(call, context.layer, context)


def _decode(call: AttentionCall, context: ForwardContext) -> Attended:
    """Tokens behind the prompt attend to what is stored, and may make a method evict."""
    return _attend_behind(call, context.layer, None)


def _attend_behind(
    call: AttentionCall, layer: CompressedLayer, turn: ForwardContext | None
) -> Attended:
    """Attend to what is stored; `turn` where the tokens belong to a later prompt."""
    output = attend_stored(call, layer)
    if turn is not None and turn.drafts <= 0:
        choose_for_whole_rows(call, layer, is_end=turn.drafts == 0)
    if turn is not None and turn.drafts < 0:
        hold_for_eviction(call, layer, turn.turn_tokens)
    else:
        evict(call, layer, None if turn is None else turn.turn_tokens + turn.drafts)
    _follow(call, layer)
    layer.store.finalize_step()
    return output


def _follow(call: AttentionCall, layer: CompressedLayer) -> None:
    """Hold the last queries for the next turn, or let them choose again where it is time."""
    if layer.turns is None:
        return
    layer.look_back(call.query)
    every = layer.turns.refresh_every
    if every is None or layer.seen_tokens - layer.slots.chosen_at < every:
        return
    layer.recall()
    whole = replace(call, key=layer.store.keys, value=layer.store.values)
    prompt = prompt_layer(whole, layer, 0, layer.store.slots, layer.slots.pads)
    layer.end_prompt(select(layer, prompt), prompt)


_PHASES: dict[Phase, Callable[..., Attended]] = {
    Phase.READ_PROMPT: _read_prompt,
    Phase.END_PROMPT: _end_prompt,
    Phase.READ_TURN: _read_turn,
    Phase.END_TURN: _end_turn,
    Phase.DECODE: _decode,
}


def _check_votes(
    call: AttentionCall, context: ForwardContext, prompt: PromptLayer, last_output: Tensor
) -> None:
    """Where a policy scores by attention, it must be the model's."""
    if not context.layer.policy.query_tokens:
        return
    eager = call.implementation == "eager"
    context.check.judge(prompt, last_output, call.module, rounds_scores=eager)


def _take_context(call: AttentionCall) -> ForwardContext | None:
    """The layer whose update preceded this call, or None for a cache that is not ours."""
    context = forward_context.take()
    store = None if context is None else context.layer.store
    if context is None or store is None or call.key.shape[2] != store.keys.shape[2]:
        return None
    if call.module not in context.modules:
        context.take_back()
        raise CacheMismatchError(
            f"past_key_values: expected the model the cache was made for, got another "
            f"{type(call.module).__name__}; make a CompressedCache for this model"
        )
    unchanged = _same(call.key, store.keys) and _same(call.value, store.values)
    if not unchanged and store.keys.shape[1] > 1:
        context.take_back()
        raise UnsupportedModelError(
            f"model: expected attention to the keys and values as they are stored, got "
            f"{type(call.module).__name__}, which rearranges them after the cache; heads that keep "
            "different tokens would be mixed, so it cannot be compressed"
        )
    if not unchanged:
        _require_own_keys_unasked(call, context)
    if context.layer.turns is not None and context.layer.turns.pages is not None:
        _require_pages_fit(call, context)
    return context


def _require_own_keys_unasked(call: AttentionCall, context: ForwardContext) -> None:
    """Refuse what needs keys of every head, where all heads share one stored latent."""
    turns, policy = context.layer.turns, context.layer.policy
    for option, is_asked, remedy in (
        ("group_reduce", policy.parts_groups, "leave it at 'mean'"),
        ("refresh_every", turns is not None and turns.refresh_every, "leave it out"),
        ("recall", turns is not None and turns.pages is not None, "pass recall='host'"),
        ("quantize", not context.layer.storage.holds_as_it_came, "leave it out"),
    ):
        if is_asked:
            context.take_back()
            raise UnsupportedModelError(
                f"{option}: expected attention to the keys as they are stored, got the latent "
                f"attention of {type(call.module).__name__}, whose heads share one; {remedy}"
            )


def _require_pages_fit(call: AttentionCall, context: ForwardContext) -> None:
    """Refuse what attention to pages, which are no columns of the model's mask, would get wrong."""
    if context.has_own_mask and context.drafts > 0 and getattr(call.mask, "ndim", 0) == 4:
        context.take_back()
        raise UnsupportedModelError(
            "attention_mask: expected a 2-D mask behind a prompt with recall=PageRecall(...), "
            "whose pages have no columns in a 4-D one, got a 4-D one; pass (batch, tokens) zeros "
            "and ones"
        )


def _same(states: Tensor, stored: Tensor) -> bool:
    return states.data_ptr() == stored.data_ptr() and states.shape == stored.shape


def _wrapped_function(implementation: str, module: Any) -> Callable[..., Any]:
    """The model family's own attention function of that name."""
    family = sys.modules[type(module).__module__]
    interface = getattr(family, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    eager = getattr(family, "eager_attention_forward", None)
    function: Callable[..., Any] = interface.get_interface(implementation, eager)
    return function
