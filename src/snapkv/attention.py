"""The one seam with transformers: an attention function around the model's own.

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

from snapkv.cache import handoff
from snapkv.cache.candidates import current_candidates
from snapkv.cache.keeping import keep_tokens
from snapkv.cache.layer import CompressedLayer
from snapkv.calls import Attended, AttentionCall, attend_stored
from snapkv.errors import CacheMismatchError, UnsupportedModelError
from snapkv.faithfulness import doubt_scores, require_faithful
from snapkv.masks import leading_pads, mask_function, prompt_mask
from snapkv.policies import PromptLayer
from snapkv.projections import output_weight
from snapkv.selection import (
    choose_for_whole_rows,
    evict,
    hold_to_cap,
    prompt_layer,
    score_options,
    select,
)

_PREFIX = "snapkv|"


def register_attention(name: str) -> str:
    """Register the seam around an attention implementation; returns the name it has then.

    The registered functions are the same every time, so that what was compiled stays so.

    Raises:
        UnsupportedModelError: transformers has no mask function of that name.
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
    """The registered mask function: tells the cache of the padding that it makes the mask of.

    With the cache's answer at hand transformers need not ask the tensor whether it hides anything.
    """
    cache = handoff.take_asking()
    padding = None if cache is None else cache.expect_padding(attention_mask, q_length)
    if padding is not None:
        attention_mask = None if padding.hides_nothing else padding.visible
        if not padding.hides_nothing and "allow_is_causal_skip" in options:
            options["allow_is_causal_skip"] = False
    return make(q_length=q_length, attention_mask=attention_mask, **options)


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
        candidates=current_candidates(),
    )
    handed = _take_handoff(call)
    if handed is None:
        return call.attend()
    layer, end = handed.layer, handed.prompt_end
    seen, turn_tokens = layer.cumulative_length, end - handed.turn_start
    behind = seen - handed.new_tokens >= end
    compressed = layer.kept is not None and not layer.held
    if layer.compresses_turns and compressed and seen >= end and not behind:
        return _attend_turn_end(call, layer, seen - end, turn_tokens)
    if compressed or behind:
        output = attend_stored(call, layer)
        layer.absorb_pads()
        if not behind and seen <= end:
            choose_for_whole_rows(call, layer, turn_tokens, is_end=seen == end)
        evict(call, layer)
        _follow(call, layer)
        layer.settle()
        return output
    if seen < end:
        output = _attend_prompt(call, layer)
        hold_to_cap(call, layer, handed.cache.cap_tokens)
        layer.remember_queries(query, handed.cache.ahead_tokens)
        if layer.observer is not None:
            prompt = prompt_layer(call, layer, query.shape[2], seen, None)
            layer.observer(replace(prompt, queries=query))
        if not handed.cache.reads_piecewise:
            layer.set_aside()
        return output
    return _attend_prompt_end(call, handed)


def _attend_prompt(call: AttentionCall, layer: CompressedLayer) -> Attended:
    """Attend to the prompt as far as it has been read, or to what is held of it."""
    return attend_stored(call, layer) if layer.held else call.attend()


def _attend_prompt_end(call: AttentionCall, handed: handoff.Handoff) -> Attended:
    """The prompt ends in this pass: attend to all of it, then let the layer keep its part.

    Drafts behind the prompt neither vote nor see what was dropped: they attend to the kept
    tokens, as they would one by one. So verifying them gives the tokens of plain decoding.
    """
    layer = handed.layer
    drafts = layer.cumulative_length - handed.prompt_end
    own, slots = call.query.shape[2] - drafts, layer.stored_tokens - drafts
    pads = layer.pad_tokens
    if layer.gaps is None:
        pads = leading_pads(call.mask, own - 1, slots, layer.policy.query_tokens)
    prompt = prompt_layer(call, layer, own, slots, pads, drafts)
    selection = select(layer, prompt, handed.prompt_end - handed.turn_start, drafts)
    if selection is None or not drafts:
        output, weights = _attend_prompt(call, layer)
        _check_scores(call, handed, prompt, output[:, own - 1])
        layer.end_prompt(selection, prompt)
        return output, weights
    read = replace(
        call,
        query=call.query[:, :, :own],
        key=call.key[:, :, :slots],
        value=call.value[:, :, :slots],
        mask=prompt_mask(call.implementation, call.mask, call.query[:, :, :own], slots, pads),
    )
    output, _ = read.attend()
    _check_scores(call, handed, prompt, output[:, -1])
    layer.end_prompt(selection, prompt)
    behind = replace(call, query=call.query[:, :, own:], key=layer.keys, value=layer.values)
    if layer.ragged is None:  # what attention sees may be an expansion of what is stored
        behind = replace(
            behind,
            key=keep_tokens(call.key, selection),
            value=keep_tokens(call.value, selection),
        )
    verified, _ = attend_stored(behind, layer, rebuild_mask=True)
    evict(behind, layer)
    return torch.cat([output, verified], dim=1), None


def _attend_turn_end(
    call: AttentionCall, layer: CompressedLayer, drafts: int, turn_tokens: int
) -> Attended:
    """A later prompt ends in this pass: read it over what is stored, then let it vote on that.

    Slots take the place of columns; drafts behind the prompt attend to what is kept, as above.
    """
    slots = call.key.shape[2] - drafts
    read = replace(
        call,
        query=call.query[:, :, : call.query.shape[2] - drafts],
        key=call.key[:, :, :slots],
        value=call.value[:, :, :slots],
    )
    output, weights = attend_stored(read, layer, rebuild_mask=drafts > 0, drafts=drafts)
    own = read.query.shape[2]
    prompt = prompt_layer(read, layer, own, slots, layer.filler_tokens, drafts)
    selection = select(layer, prompt, turn_tokens, drafts)
    if selection is not None:
        layer.end_prompt(selection, replace(prompt, pad_tokens=layer.pad_tokens))
    else:
        layer.look_back(read.query)
        layer.settle()
    if not drafts:
        return output, weights
    behind = replace(call, query=call.query[:, :, -drafts:])
    if selection is not None:
        behind = replace(
            behind,
            key=keep_tokens(call.key, selection),
            value=keep_tokens(call.value, selection),
        )
    verified, _ = attend_stored(behind, layer, rebuild_mask=True)
    return torch.cat([output, verified], dim=1), None


def _follow(call: AttentionCall, layer: CompressedLayer) -> None:
    """Hold the last queries for the next turn, or let them choose again where it is time."""
    if not layer.compresses_turns:
        return
    queries = layer.look_back(call.query)
    due = layer.refresh_every is not None and (
        layer.cumulative_length - layer.chosen_at >= layer.refresh_every
    )
    if not due or layer.kept is None:
        return
    if layer.keys.shape[1] != call.key.shape[1]:
        raise UnsupportedModelError(
            f"refresh_every: expected attention to the keys as they are stored, got "
            f"{type(call.module).__name__}, whose heads share one stored latent; leave it out"
        )
    layer.recall()
    prompt = PromptLayer(
        queries=queries.detach(),
        keys=layer.keys,
        values=layer.values,
        pad_tokens=layer.pad_tokens,
        rotation=layer.rotation,
        output_weight=output_weight(layer.output_projection),
        **score_options(replace(call, key=layer.keys), layer),
    )
    with torch.no_grad():
        layer.end_prompt(layer.policy.select(prompt), prompt)


def _check_scores(
    call: AttentionCall, handed: handoff.Handoff, prompt: PromptLayer, last_output: Tensor
) -> None:
    """Where a policy scores by attention, it must be the model's.

    A GPU is waited for at the first layer, which tells on nearly every family, and at the last.
    """
    if not handed.layer.policy.query_tokens or handed.layer.gaps is not None:
        return  # with pads between turns, an earlier prompt of the same model has passed
    eager = call.implementation == "eager"
    doubts = handed.cache.doubts
    found = doubt_scores(prompt, last_output.detach(), call.module, rounds_scores=eager)
    if found is not None:
        doubts.append(found)
    if not _is_behind(last_output) or prompt.depth in (0, prompt.num_layers - 1):
        require_faithful(doubts)
        doubts.clear()


def _is_behind(states: Tensor) -> bool:
    """Whether these are still being computed while Python goes on."""
    return states.is_cuda


def _take_handoff(call: AttentionCall) -> handoff.Handoff | None:
    """The layer whose update preceded this call, or None for a cache that is not ours."""
    handed = handoff.take()
    if handed is None or call.key.shape[2] != handed.layer.stored_tokens:
        return None
    layer = handed.layer
    if not handed.cache.owns(call.module):
        handed.cache.take_back(layer, handed.new_tokens)
        raise CacheMismatchError(
            f"past_key_values: expected the model the cache was made for, got another "
            f"{type(call.module).__name__}; make a CompressedCache for this model"
        )
    if handed.has_own_mask and layer.gaps is not None and getattr(call.mask, "ndim", 0) == 4:
        handed.cache.take_back(layer, handed.new_tokens)
        raise UnsupportedModelError(
            "attention_mask: expected a 2-D mask behind pads between turns, since every layer "
            "hides them in slots of its own, got a 4-D one; pass (batch, tokens) zeros and ones"
        )
    unchanged = _same(call.key, layer.keys) and _same(call.value, layer.values)
    if not unchanged and layer.keys.shape[1] > 1:
        handed.cache.take_back(layer, handed.new_tokens)
        raise UnsupportedModelError(
            f"model: expected attention to the keys and values as they are stored, got "
            f"{type(call.module).__name__}, which rearranges them after the cache; heads that keep "
            "different tokens would be mixed, so it cannot be compressed"
        )
    return handed


def _same(states: Tensor, stored: Tensor) -> bool:
    return states.data_ptr() == stored.data_ptr() and states.shape == stored.shape


def _wrapped_function(implementation: str, module: Any) -> Callable[..., Any]:
    """The model family's own attention function of that name."""
    family = sys.modules[type(module).__module__]
    interface = getattr(family, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    eager = getattr(family, "eager_attention_forward", None)
    function: Callable[..., Any] = interface.get_interface(implementation, eager)
    return function
