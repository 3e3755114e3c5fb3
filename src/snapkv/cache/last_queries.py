"""The last queries that a layer holds: the observation window may begin before its last pass."""

from dataclasses import replace

import torch
from torch import Tensor

from snapkv.cache.layer import CompressedLayer
from snapkv.cache.slots import pads_first, put_in_order


def last_tokens(queries: Tensor, tokens: int) -> Tensor:
    """The last of (B, Hq, N, D), all where there are no more than that."""
    return queries[..., max(0, queries.shape[-2] - max(tokens, 0)) :, :]


def remember_queries(layer: CompressedLayer, queries: Tensor, ahead_tokens: int) -> None:
    """Hold on to the last queries of a chunk: the window may begin in it.

    And to those of tokens that will be forgotten, which `crop` takes away.
    """
    _hold(layer, with_remembered(layer, queries, ahead_tokens).clone())


def with_remembered(
    layer: CompressedLayer, queries: Tensor, ahead_tokens: int = 0, drafts: int = 0
) -> Tensor:
    """(B, Hq, up to `query_tokens` + ahead, D): the last queries of the prompt so far.

    Behind the queries' own tokens stand as many drafts; of pads only some in front are left.
    """
    queries = _with_tail(layer, queries, drafts)
    return last_tokens(queries, layer.policy.query_tokens + ahead_tokens)


def forget_queries(layer: CompressedLayer) -> None:
    """A turn has ended, in which no later one begins."""
    if not layer.history_tokens:
        _hold(layer, None)


def look_back(layer: CompressedLayer, queries: Tensor) -> Tensor:
    """(B, Hq, N, D): a step's queries, or as many of the last ones as the policy wants to see.

    Holds on to those for the steps to come. Of a turn in parts the step has the queries of all.
    """
    history, tail = layer.history_tokens, layer.notes.last_queries
    if not history:
        queries = _with_tail(layer, queries)
        if tail is not None:
            forget_queries(layer)
        return queries
    if layer.slots.gaps is None and tail is not None:  # of no pads, so no more is needed
        _hold(layer, last_tokens(tail, history - queries.shape[-2]))
    queries = last_tokens(_with_tail(layer, queries), history)
    _hold(layer, queries)
    return queries


def own_queries(layer: CompressedLayer, turn_tokens: int, drafts: int = 0) -> list[int]:
    """For each row how many of the last queries are its own; 0 if none of its turn's is.

    Args:
        layer: the layer that has read them.
        turn_tokens: how many tokens the turn has, whether it came in pieces or not.
        drafts: how many tokens stand behind them.
    """
    slots, store = layer.slots, layer.store
    own = slots.visible_columns(store, turn_tokens, drafts).sum(dim=-1)
    if layer.history_tokens:  # those of the turns before count, too
        before = layer.seen_tokens - drafts
        seen = slots.visible_columns(store, before, drafts).sum(dim=-1)
        own = torch.where(own > 0, seen, own)
    counts: list[int] = own.tolist()
    return counts


def _hold(layer: CompressedLayer, queries: Tensor | None) -> None:
    layer.notes = replace(layer.notes, last_queries=queries)


def _with_tail(layer: CompressedLayer, queries: Tensor, drafts: int = 0) -> Tensor:
    """The queries held on to and behind them new ones, those of pads in front of each row."""
    new, tail = queries.shape[-2], layer.notes.last_queries
    if tail is not None:
        queries = torch.cat([tail, queries.detach()], dim=-2)
    if layer.slots.gaps is None:
        return queries
    visible = torch.ones_like(queries[:, 0, :, 0], dtype=torch.bool)
    visible[:, visible.shape[1] - new :] = layer.slots.visible_columns(layer.store, new, drafts)
    return put_in_order(queries, pads_first(visible))
