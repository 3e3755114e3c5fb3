"""Choosing for some rows of a batch: those that have fitted the budget until now.

The others have chosen before, and keep what they hold. So every row chooses as it would alone.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from snapkv.policies.base import Policy
from snapkv.policies.states import PromptLayer, Selection


def select_by_rows(
    policy: Policy, layer: PromptLayer, chooses: Sequence[bool], held: Tensor
) -> Selection | None:
    """What `policy` keeps of some rows, and all that the others hold.

    Args:
        policy: the method.
        layer: the states of all rows; pads stand in front, in every tensor.
        chooses: for each row whether the policy chooses.
        held: (B, H or 1, S) bool, which slots hold a token.
    """
    rows = torch.tensor(chooses, device=held.device).nonzero()[:, 0]
    chosen = _select_without_pads(policy, _rows_of(layer, rows))
    if chosen is None:
        return None
    slots, heads = held.shape[-1], max(held.shape[1], chosen.keep_indices.shape[1])
    every = torch.arange(slots, device=held.device)
    kept = torch.where(held, every, -1).repeat_interleave(heads // held.shape[1], 1)
    missing = slots - chosen.keep_indices.shape[-1]
    kept[rows] = torch.nn.functional.pad(chosen.keep_indices, (missing, 0), value=-1)
    counts = (kept >= 0).sum(dim=-1)
    kept = kept[..., slots - int(counts.amax()) :]
    fillers, ragged = None, chosen.head_tokens is not None
    if not ragged:
        first = 0 if layer.pad_tokens is None else layer.pad_tokens[:, None]
        fillers = (kept[:, 0] < first).sum(dim=-1)
    return replace(
        chosen,
        keep_indices=kept,
        prompt_tokens=layer.keys.shape[2],
        filler_tokens=fillers,
        head_tokens=counts if ragged else None,
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


def _rows_of(layer: PromptLayer, rows: Tensor) -> PromptLayer:
    own: dict[str, Any] = {
        part.name: value.index_select(0, rows)
        for part in fields(layer)
        if isinstance(value := getattr(layer, part.name), Tensor) and part.name != "output_weight"
    }
    return replace(layer, **own)
