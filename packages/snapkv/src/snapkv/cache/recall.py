"""Recall: evicted tokens wait off the device until a later prompt votes on all that was seen."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from snapkv.cache.layer import CompressedLayer


def schedule_recall(layers: Iterable[CompressedLayer], *, is_prompt_next: bool) -> None:
    """Let layers restore what they have offloaded before the next tokens, or let them not.

    Args:
        layers: those of one cache. Layers without recall stay as they are.
        is_prompt_next: whether the next tokens are of a prompt, whose end votes on everything. A
            layer with nothing on the device restores its tokens in any case.
    """
    for layer in layers:
        if layer.offloaded.is_enabled:
            is_needed = is_prompt_next or layer.store.slots == 0
            layer.offloaded.is_due = is_needed and not layer.holds_all


def set_aside(layer: CompressedLayer) -> None:
    """Hold nothing on the device between two pieces of a prompt, if the layer has recall."""
    offloaded, store, columns = layer.offloaded, layer.store, layer.columns
    if not offloaded.is_enabled:
        return
    offloaded.append_up_to(columns, store)
    none = torch.empty(*store.keys.shape[:2], 0, dtype=torch.int64, device=store.keys.device)
    layer.replace_tokens(store.select(none, store.slots), layer.slots.chosen(none, columns))
    offloaded.is_due = True


def begin_behind(
    layer: CompressedLayer, columns: int, pads: Tensor, *, forget_queries: bool
) -> None:
    """Move the offloaded tokens of each row behind pads of its own, with none on the device.

    Args:
        layer: a layer that has set all its tokens aside.
        columns: how many columns it has seen from now on, the same number in every row.
        pads: (B,) int64, how many of them are leading pads.
        forget_queries: whether the last queries no longer vote.
    """
    layer.offloaded.shift(pads, columns)
    layer.replace_tokens(layer.store, replace(layer.slots, start=columns))
    if forget_queries:
        layer.queries.held = None
