"""Checks of what a policy selects, for policies that do not belong to the library.

Numbers on the device are checked after the last layer, because reading them waits for a GPU.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from snapkv.errors import SnapKVError, wrong
from snapkv.policies.base import Policy
from snapkv.policies.states import PromptLayer, Selection, run_checks

_LIBRARY = "snapkv."
"""The prefix of the names of the library's own modules."""

_SORT = "Sort keep_indices along the last dimension"
_PADDING = (
    "Use -1 only at the beginning, and pass the number of these entries in padding_slots or "
    "head_tokens, or make the selection with Selection.of_mask"
)
_FAULTS = (
    ("negative indices among those to keep", _PADDING),
    (
        "indices of {tokens} or more, but the prompt has {tokens} tokens",
        "Select positions of the last axis of layer.keys",
    ),
    ("the same index twice in one head", "Return each position only once for each head"),
    ("indices that are not in ascending order", _SORT),
    (
        "indices of padding among those to keep",
        "Select positions after layer.pad_tokens, and pass in padding_slots or head_tokens how "
        "many entries hold no token",
    ),
    (
        "padding_slots or head_tokens that are negative or larger than the last axis of "
        "keep_indices",
        "In padding_slots, count the first entries that do not hold a token; in head_tokens, "
        "count the entries that hold a token",
    ),
    (
        "fewer tokens than the window of the last {window} tokens",
        "Keep these tokens, or inherit from Policy, which does not require a window",
    ),
)
"""What can be wrong with the numbers of a selection, each with its remedy, in the order of
`_faults_of`."""


def select(policy: Policy, layer: PromptLayer, layers: Sequence[int]) -> Selection | None:
    """Select positions with a policy, and check the result if the policy is a user's own.

    The library's own methods are checked by tests instead, because the check costs a GPU some
    thirty launches for each group of layers. If a user's policy returned wrong indices, the result
    has the first positions in their place: the wrong ones would cause a fault of the device before
    they are refused.

    Args:
        policy: the policy that selects.
        layer: one layer, or several that are stacked as rows.
        layers: the indices of those layers.

    Returns:
        The selection, or None to keep everything.

    Raises:
        InvalidArgumentError: the policy returned anything but None or a selection of this layer.
            Wrong numbers are refused here too if `layer.deferred_checks` is None; otherwise the
            check is appended to that list and raises later.
    """
    selection = policy.select(layer)
    if selection is None or type(policy).__module__.startswith(_LIBRARY):
        return selection
    if (problem := _problem_of(policy, layer, selection)) is not None:
        raise _refusal(policy, layers[0], *problem)
    faults = _faults_of(policy.promised_window, layer, selection)
    judge = functools.partial(_judge, policy, list(layers), layer.keys.shape[2])
    asked = [(faults.view(len(_FAULTS), len(layers), -1).any(dim=-1), judge)]
    run_checks(asked) if layer.deferred_checks is None else layer.deferred_checks.extend(asked)
    indices, counts = selection.keep_indices, selection.head_tokens
    kept, tokens = indices.shape[2], layer.keys.shape[2]
    first = torch.arange(kept, device=indices.device).clamp(max=tokens - 1)
    indices = torch.where(faults.any(), first, indices)
    if counts is not None:
        counts = counts.clamp(0, kept)
        widest = int(counts.max())  # no head keeps the entries before it
        places = torch.arange(widest, device=indices.device)
        unkept = places < (widest - counts.to(indices.device))[..., None]
        indices = indices[..., kept - widest :].masked_fill(unkept, -1)
    return replace(selection, keep_indices=indices, head_tokens=counts)


def _problem_of(policy: Policy, layer: PromptLayer, made: object) -> tuple[str, str] | None:
    """Describe the first problem with a selection that can be found without waiting for a GPU.

    These are problems with types, dtypes and shapes.

    Returns:
        The problem and its remedy, or None if there is no problem.
    """
    if not isinstance(made, Selection):
        kind = type(made).__name__
        return f"a {kind}", "Return a Selection, or None to keep everything"
    B, tokens, indices = layer.keys.shape[0], layer.keys.shape[2], made.keep_indices
    if not isinstance(indices, Tensor) or indices.dtype != torch.int64:
        kind = getattr(indices, "dtype", type(indices).__name__)
        return f"keep_indices of {kind}", "Pass an int64 tensor"
    heads = {1, layer.num_kv_heads, *([layer.queries.shape[1]] if policy.per_query_head else [])}
    if indices.ndim != 3 or indices.shape[0] != B or indices.shape[1] not in heads:
        return (
            f"keep_indices of shape {tuple(indices.shape)} for {B} rows and {layer.num_kv_heads} "
            "heads",
            f"Return ({B}, {layer.num_kv_heads}, kept), or ({B}, 1, kept) if all heads keep the "
            "same positions",
        )
    if made.prompt_tokens != tokens:
        return (
            f"prompt_tokens={made.prompt_tokens}, but the prompt has {tokens}",
            "Pass layer.keys.shape[2]",
        )
    counts, padding_slots = made.head_tokens, made.padding_slots
    if counts is not None and not _is_count(counts, indices.shape[:2]):
        return (
            f"head_tokens of {_shown(counts)}",
            f"Pass a {tuple(indices.shape[:2])} tensor of integers, how many entries each head "
            "keeps",
        )
    if padding_slots is not None and not _is_count(padding_slots, (B,)):
        return (
            f"padding_slots of {_shown(padding_slots)} for {B} rows",
            f"Pass a ({B},) tensor of integers, the leading entries of each row that hold no token",
        )
    return None


def _is_count(made: object, shape: Sequence[int]) -> bool:
    """Return whether an object is a tensor of integers (no bool) with the given shape."""
    if not isinstance(made, Tensor) or made.is_floating_point() or made.dtype == torch.bool:
        return False
    return tuple(made.shape) == tuple(shape)


def _shown(made: object) -> str:
    if not isinstance(made, Tensor):
        return type(made).__name__
    return f"shape {tuple(made.shape)} and {made.dtype}"


def _faults_of(window: int, layer: PromptLayer, made: Selection) -> Tensor:
    """Return which faults each row of the selection has.

    Args:
        window: how many tokens at the end of the prompt every head must keep.
        layer: the layer that was selected from.
        made: the selection, whose shapes are right.

    Returns:
        (faults, B) bool on the device, in the order of `_FAULTS`.
    """
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
    """Raise an error for the first fault that was found in any layer.

    Args:
        policy: the policy that selected.
        layers: the indices of the layers.
        tokens: tokens of the prompt.
        faults: one number per fault and layer, fault by fault; not 0 if the layer has the fault.

    Raises:
        InvalidArgumentError: there is a fault.
    """
    for place, is_fault in enumerate(faults):
        if is_fault:
            fault, remedy = _FAULTS[place // len(layers)]
            fault = fault.format(tokens=tokens, window=policy.promised_window)
            raise _refusal(policy, layers[place % len(layers)], fault, remedy)


def _refusal(policy: Policy, layer_idx: int, fault: str, remedy: str) -> SnapKVError:
    made = f"ascending and different positions from {type(policy).__name__} in layer {layer_idx}"
    return wrong("select", f"expected {made}, but got {fault}", remedy)
