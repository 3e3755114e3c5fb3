"""Checks of what a method chooses, which one of somebody's own may get wrong.

What only the device knows is asked behind the last layer, since a GPU is waited for then.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from snapkv.errors import InvalidArgumentError
from snapkv.policies.base import Policy
from snapkv.policies.states import PromptLayer, Selection, require_answers

_LIBRARY = "snapkv."
"""How the names of the library's own modules begin."""

_SORT = "sort keep_indices along the last axis"
_PADDING = (
    "let -1 stand only in front, and say in padding_slots or head_tokens how many there are, "
    "or make the selection with Selection.of_mask"
)
_FAULTS = (
    ("negative indices among those to keep", _PADDING),
    (
        "indices of {tokens} or more, where the prompt has {tokens} tokens",
        "choose among the last axis of layer.keys",
    ),
    ("an index twice in one head", "name each position once"),
    ("indices that do not ascend", _SORT),
    (
        "indices of padding among those to keep",
        "choose behind layer.pad_tokens, and say in padding_slots or head_tokens how many entries "
        "hold no token",
    ),
    (
        "padding_slots or head_tokens that are negative or larger than the last axis of "
        "keep_indices",
        "count the leading entries that hold no token, or those that do",
    ),
    (
        "less than the window of the last {window} tokens",
        "keep them, or subclass Policy, which promises no window",
    ),
)
"""What can be wrong with the numbers of a selection, and what to do; by `_faults_of`."""


def select(policy: Policy, layer: PromptLayer, layers: Sequence[int]) -> Selection | None:
    """Return what a policy selects of a layer, checked if its class is not the library's own.

    The library's own methods are checked by tests instead, because the check costs a GPU some
    thirty launches for each group of layers. If something is wrong, the first positions replace the
    policy's indices, which would cause a fault of the device before they are refused.

    Args:
        policy: decides.
        layer: one layer, or several that are stacked as rows.
        layers: the indices of those layers.

    Raises:
        InvalidArgumentError: the policy returns something else than a selection of this layer, or,
            where `layer.unasked` is None, its numbers are wrong. Else whoever asks for those does.
    """
    selection = policy.select(layer)
    if selection is None or type(policy).__module__.startswith(_LIBRARY):
        return selection
    if (problem := _problem_of(policy, layer, selection)) is not None:
        raise _refusal(policy, layers[0], *problem)
    faults = _faults_of(policy.promised_window, layer, selection)
    judge = functools.partial(_judge, policy, list(layers), layer.keys.shape[2])
    asked = [(faults.view(len(_FAULTS), len(layers), -1).any(dim=-1), judge)]
    require_answers(asked) if layer.unasked is None else layer.unasked.extend(asked)
    indices, counts = selection.keep_indices, selection.head_tokens
    kept, tokens = indices.shape[2], layer.keys.shape[2]
    first = torch.arange(kept, device=indices.device).clamp(max=tokens - 1)
    indices = torch.where(faults.any(), first, indices)
    if counts is not None:
        counts = counts.clamp(0, kept)
        widest = int(counts.max())  # before it stand entries that no head keeps
        places = torch.arange(widest, device=indices.device)
        unkept = places < (widest - counts.to(indices.device))[..., None]
        indices = indices[..., kept - widest :].masked_fill(unkept, -1)
    return replace(selection, keep_indices=indices, head_tokens=counts)


def _problem_of(policy: Policy, layer: PromptLayer, made: object) -> tuple[str, str] | None:
    """What is wrong that the host knows, and what to do; None where nothing is."""
    if not isinstance(made, Selection):
        kind = type(made).__name__
        return f"a {kind}", "return a Selection, or None to keep everything"
    B, tokens, indices = layer.keys.shape[0], layer.keys.shape[2], made.keep_indices
    if not isinstance(indices, Tensor) or indices.dtype != torch.int64:
        kind = getattr(indices, "dtype", type(indices).__name__)
        return f"keep_indices of {kind}", "pass an int64 tensor"
    heads = {1, layer.num_kv_heads, *([layer.queries.shape[1]] if policy.per_query_head else [])}
    if indices.ndim != 3 or indices.shape[0] != B or indices.shape[1] not in heads:
        return (
            f"keep_indices of shape {tuple(indices.shape)} for {B} rows and {layer.num_kv_heads} "
            "heads",
            f"make them ({B}, {layer.num_kv_heads}, kept), or ({B}, 1, kept) where heads share a "
            "set",
        )
    if made.prompt_tokens != tokens:
        return (
            f"prompt_tokens={made.prompt_tokens}, where the prompt has {tokens}",
            "pass layer.keys.shape[2]",
        )
    counts, padding_slots = made.head_tokens, made.padding_slots
    if counts is not None and not _is_count(counts, indices.shape[:2]):
        return (
            f"head_tokens of {_shown(counts)}",
            f"pass a {tuple(indices.shape[:2])} tensor of integers, the entries that each head "
            "keeps",
        )
    if padding_slots is not None and not _is_count(padding_slots, (B,)):
        return (
            f"padding_slots of {_shown(padding_slots)} for {B} rows",
            f"pass a ({B},) tensor of integers, the leading entries of each row that hold no token",
        )
    return None


def _is_count(made: object, shape: Sequence[int]) -> bool:
    """Whether it is a tensor of integers of that shape."""
    if not isinstance(made, Tensor) or made.is_floating_point() or made.dtype == torch.bool:
        return False
    return tuple(made.shape) == tuple(shape)


def _shown(made: object) -> str:
    if not isinstance(made, Tensor):
        return type(made).__name__
    return f"shape {tuple(made.shape)} and {made.dtype}"


def _faults_of(window: int, layer: PromptLayer, made: Selection) -> Tensor:
    """(faults, B) bool: which of `_FAULTS` each row has."""
    indices, tokens, none = made.keep_indices, layer.keys.shape[2], made.keep_indices.new_zeros(1)
    kept, device = indices.shape[2], indices.device
    padding = none if made.padding_slots is None else made.padding_slots.to(device)
    first = padding[:, None]
    if made.head_tokens is not None:
        first = kept - made.head_tokens.to(device, non_blocking=True)
    pads = none if layer.pad_tokens is None else layer.pad_tokens.to(device)
    pads = pads[:, None, None]
    is_kept = torch.arange(kept, device=device) >= first[..., None]
    steps, both = indices.diff(dim=-1), is_kept[..., :-1]
    last = indices[..., kept - min(window, tokens, kept) :]
    expected = torch.arange(tokens - last.shape[2], tokens, device=device)
    lacks = (last != expected) & (expected >= pads)
    faults = [
        is_kept & (indices < 0),
        is_kept & (indices >= tokens),
        both & (steps == 0),
        both & (steps < 0),
        is_kept & (indices >= 0) & (indices < pads),
        (first < 0) | (first > kept),
        lacks if last.shape[2] == min(window, tokens) else torch.ones_like(first, dtype=torch.bool),
    ]
    found = [fault.flatten(1).any(dim=-1).expand(len(indices)) for fault in faults]
    return torch.stack(found)


def _judge(policy: Policy, layers: Sequence[int], tokens: int, faults: Sequence[float]) -> None:
    """Raise for the first of `_FAULTS`; numbers are those of its layers, fault by fault."""
    for place, is_fault in enumerate(faults):
        if is_fault:
            said, remedy = _FAULTS[place // len(layers)]
            said = said.format(tokens=tokens, window=policy.promised_window)
            raise _refusal(policy, layers[place % len(layers)], said, remedy)


def _refusal(policy: Policy, layer_idx: int, said: str, remedy: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"select: expected ascending and different positions of the prompt from "
        f"{type(policy).__name__}, got {said} in layer {layer_idx}; {remedy}"
    )
