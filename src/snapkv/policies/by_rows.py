"""Choosing row by row where the rows of a batch have read different numbers of tokens.

A turn may be shorter in one row than in another, whose tokens are behind pads then. Pads must not
vote: rows that have read as many tokens choose together, by their own queries only, and a row that
has read none keeps what it holds. So every row chooses as it would alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from snapkv.policies.base import EvictingPolicy, Policy
from snapkv.policies.states import DecodeStep, Eviction, PromptLayer, Selection

States = TypeVar("States", PromptLayer, DecodeStep)


def select_by_rows(
    policy: Policy, layer: PromptLayer, new_tokens: Sequence[int], held: Tensor
) -> Selection | None:
    """What `policy` keeps, where the last queries of some rows are not theirs.

    Args:
        policy: the method.
        layer: the states of all rows; pads stand in front, in every tensor.
        new_tokens: for each row how many of the last queries are its own; 0 keeps all it holds.
        held: (B, H or 1, S) bool, which slots hold a token.
    """
    groups = list(_groups(new_tokens))
    chosen = [
        _select_without_pads(policy, _rows_of(layer, *group)) if group[1] else None
        for group in groups
    ]
    if all(selection is None for selection in chosen):
        return None
    found = next(selection for selection in chosen if selection is not None)
    ragged = any(one is not None and one.head_tokens is not None for one in chosen)
    whole = _held(held, found.keep_indices.shape[1])
    parts = [
        whole[rows] if selection is None else selection.keep_indices
        for (rows, _), selection in zip(groups, chosen, strict=True)
    ]
    keep_indices = _one_below_the_other(groups, parts)
    fillers = _fillers(keep_indices, layer.pad_tokens)
    return replace(
        found,
        keep_indices=keep_indices,
        prompt_tokens=layer.keys.shape[2],
        filler_tokens=None if ragged else fillers,
        head_tokens=(keep_indices >= 0).sum(dim=-1) if ragged else None,
    )


def _select_without_pads(policy: Policy, layer: PromptLayer) -> Selection | None:
    """What `policy` keeps of rows that may all begin with pads, which it must not count."""
    pads = 0 if layer.pad_tokens is None else int(layer.pad_tokens.min())
    if not pads:
        return policy.select(layer)
    assert layer.pad_tokens is not None
    ids, protected = layer.token_ids, layer.protected
    selection = policy.select(
        replace(
            layer,
            keys=layer.keys[:, :, pads:],
            values=layer.values[:, :, pads:],
            pad_tokens=layer.pad_tokens - pads,
            token_ids=None if ids is None else ids[:, pads:],
            protected=None if protected is None else protected[..., pads:],
        )
    )
    if selection is None:
        return None
    kept = selection.keep_indices
    return replace(selection, keep_indices=torch.where(kept < 0, kept, kept + pads))


def evict_by_rows(policy: EvictingPolicy, step: DecodeStep, new_tokens: Sequence[int]) -> Eviction:
    """What `policy` evicts, where some rows have read fewer tokens than others.

    Args:
        policy: the method.
        step: the states of all rows; pads stand in front, in every tensor.
        new_tokens: how many tokens of this step are each row's own; a row without any stays as it
            is.
    """
    groups = list(_groups(new_tokens))
    evictions = [
        policy.evict(_rows_of(step, rows, count, policy.history_tokens)) if count else Eviction()
        for rows, count in groups
    ]
    scores = None if step.scores is None else step.scores.clone()
    for (rows, _), eviction in zip(groups, evictions, strict=True):
        if scores is not None and eviction.scores is not None:
            scores[rows] = eviction.scores
    kept = [eviction.keep_indices for eviction in evictions if eviction.keep_indices is not None]
    if not kept:
        return Eviction(scores=scores)
    pads = 0 if step.pad_tokens is None else step.pad_tokens[:, None, None]
    whole = _held(step.columns >= pads, max(part.shape[1] for part in kept))
    parts = [
        whole[rows] if eviction.keep_indices is None else eviction.keep_indices
        for (rows, _), eviction in zip(groups, evictions, strict=True)
    ]
    keep_indices = _one_below_the_other(groups, parts)
    return Eviction(
        keep_indices=keep_indices,
        scores=scores,
        sink_tokens=max(eviction.sink_tokens for eviction in evictions),
        filler_tokens=_fillers(keep_indices, step.filler_tokens),
        parts_heads=any(eviction.parts_heads for eviction in evictions),
    )


def _groups(new_tokens: Sequence[int]) -> Iterator[tuple[Tensor, int]]:
    """The rows that have read as many tokens, and how many."""
    for count in sorted(set(new_tokens)):
        yield torch.tensor([row for row, n in enumerate(new_tokens) if n == count]), count


def _rows_of(states: States, rows: Tensor, new_tokens: int, history_tokens: int = 0) -> States:
    """Some rows of a layer, with the last queries and token ids that are theirs."""
    own: dict[str, Any] = {
        name: value.index_select(0, rows.to(value.device))
        for name in (part.name for part in fields(states))
        if isinstance(value := getattr(states, name), Tensor) and name != "output_weight"
    }
    own["queries"] = own["queries"][:, :, -(history_tokens or new_tokens) :]
    if isinstance(states, DecodeStep) and "token_ids" in own:
        own["token_ids"] = own["token_ids"][:, -new_tokens:]
    return replace(states, **own)


def _held(held: Tensor, heads: int) -> Tensor:
    """(B, H, S) int64: every slot that holds a token, -1 for the others."""
    slots = torch.arange(held.shape[-1], device=held.device)
    return torch.where(held, slots, -1).expand(-1, max(heads, held.shape[1]), -1)


def _one_below_the_other(groups: list[tuple[Tensor, int]], parts: list[Tensor]) -> Tensor:
    """(B, H, K): what groups of rows keep, in the order of the rows, -1 in front where fewer."""
    most = max(part.shape[-1] for part in parts)
    wide = [torch.nn.functional.pad(part, (most - part.shape[-1], 0), value=-1) for part in parts]
    heads = max(part.shape[1] for part in wide)
    order = torch.cat([rows for rows, _ in groups]).argsort()
    merged = torch.cat([part.expand(-1, heads, -1) for part in wide])[order.to(parts[0].device)]
    used = int((merged >= 0).sum(dim=-1).amax())
    return merged[..., most - used :]


def _fillers(keep_indices: Tensor, pads: Tensor | None) -> Tensor:
    """(B,) int64: how many of the entries in front of each row hold no token."""
    first = keep_indices[:, 0]
    hidden = first < 0 if pads is None else first < pads[:, None]
    return hidden.sum(dim=-1)
