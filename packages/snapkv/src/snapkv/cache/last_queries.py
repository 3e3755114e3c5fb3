"""The last queries that a layer holds: the observation window may begin before its last pass."""

from dataclasses import replace

import torch
from torch import Tensor

from snapkv.cache.layer import CompressedLayer


def last_tokens(queries: Tensor, tokens: int) -> Tensor:
    """The last of (B, Hq, N, D), all where there are no more than that."""
    return queries[..., max(0, queries.shape[-2] - max(tokens, 0)) :, :]


def remember_queries(layer: CompressedLayer, queries: Tensor, ahead_tokens: int) -> None:
    """Hold on to the last queries of a chunk: the window may begin in it.

    And to those of tokens that will be forgotten, which `crop` takes away.
    """
    _hold(layer, with_remembered(layer, queries, ahead_tokens).clone())


def with_remembered(layer: CompressedLayer, queries: Tensor, ahead_tokens: int = 0) -> Tensor:
    """(B, Hq, up to `query_tokens` + ahead, D): the last queries of the prompt so far."""
    return last_tokens(_with_tail(layer, queries), layer.policy.query_tokens + ahead_tokens)


def forget_queries(layer: CompressedLayer) -> None:
    """A turn has ended, in which no later one begins."""
    if not layer.history_tokens:
        _hold(layer, None)


def look_back(layer: CompressedLayer, queries: Tensor) -> Tensor:
    """(B, Hq, N, D): a step's queries, or as many of the last ones as the policy wants to see.

    Holds on to those for the steps to come. Of a turn in parts the step has the queries of all.
    """
    history = layer.history_tokens
    if not history:
        queries = _with_tail(layer, queries)
        forget_queries(layer)
        return queries
    if (tail := layer.notes.last_queries) is not None:  # no more of it than stays
        _hold(layer, last_tokens(tail, history - queries.shape[-2]))
    queries = last_tokens(_with_tail(layer, queries), history)
    _hold(layer, queries)
    return queries


def _hold(layer: CompressedLayer, queries: Tensor | None) -> None:
    if queries is not layer.notes.last_queries:
        layer.notes = replace(layer.notes, last_queries=queries)


def _with_tail(layer: CompressedLayer, queries: Tensor) -> Tensor:
    """The queries held on to, and new ones behind them."""
    tail = layer.notes.last_queries
    return queries if tail is None else torch.cat([tail, queries.detach()], dim=-2)
