"""Random attention states of one layer, with and without left padding."""

import torch
from torch import Tensor

from snapkv.ops import ScoreOptions
from snapkv.policies import DecodeStep, PromptLayer


def random_layer(
    seed: int,
    *,
    batch: int = 1,
    query_heads: int = 4,
    kv_heads: int = 2,
    prompt_tokens: int,
    query_tokens: int,
    head_dim: int = 8,
    sharpness: float = 2.0,
    dtype: torch.dtype = torch.float32,
    softcap: float | None = None,
    with_sinks: bool = False,
) -> PromptLayer:
    """A layer at the end of a prompt; `sharpness` makes attention prefer some positions."""
    source = torch.Generator().manual_seed(seed)
    tokens = min(query_tokens, prompt_tokens)
    queries = torch.randn(batch, query_heads, tokens, head_dim, generator=source) * sharpness
    keys = torch.randn(batch, kv_heads, prompt_tokens, head_dim, generator=source)
    sink_logits = torch.randn(query_heads, generator=source) * 2 if with_sinks else None
    values = torch.randn(batch, kv_heads, prompt_tokens, head_dim, generator=source)
    received = torch.rand(batch, kv_heads, prompt_tokens, generator=source)
    return PromptLayer(
        queries=queries.to(dtype),
        keys=keys.to(dtype),
        values=values.to(dtype),
        score_options=ScoreOptions(
            scaling=head_dim**-0.5, softcap=softcap, sink_logits=sink_logits
        ),
        rotation=rotate,
        output_weight=output_weight(query_heads * head_dim),
        layer_idx=0,
        received=received,
    )


def worked_layer(keys, values=None, queries=None, *, scaling: float = 1.0, **fields) -> PromptLayer:
    """A layer of these states; its values are its keys, and it has no queries, if not given."""
    return PromptLayer(
        queries=keys[:, :, :0] if queries is None else queries,
        keys=keys,
        values=keys if values is None else values,
        score_options=ScoreOptions(scaling=scaling),
        **{"layer_idx": 0} | fields,
    )


def rated_layer(received, **fields) -> PromptLayer:
    """A layer of these ratings by a second reading, lists of (H, T) or (B, H, T)."""
    ratings = torch.tensor(received)
    ratings = ratings if ratings.dim() == 3 else ratings[None]
    return worked_layer(torch.ones(*ratings.shape, 1), received=ratings, **fields)


def layer_with_scores(scores):
    """A layer whose prefix has, with one query and no pooling, lists of such votes per head."""
    votes = torch.tensor(scores)
    attention = torch.cat([votes, 1 - votes.sum(-1, keepdim=True)], -1)
    keys = torch.eye(attention.shape[1]).expand(1, len(votes), -1, -1)
    return worked_layer(keys, queries=attention.clamp(min=1e-9).log()[None, :, None])


def worked_prompt(rows: list[list[float]], slots: int, **fields) -> PromptLayer:
    """A layer of one head whose last queries pay exactly the attention of `rows`."""
    return PromptLayer(**_worked(rows, slots) | {"values": torch.eye(slots)[None, None]} | fields)


def worked_step(
    rows: list[list[float]], slots: int, columns: list[int] | None = None, **fields
) -> DecodeStep:
    """The same behind a step, where the slots hold the tokens of these columns."""
    held = torch.arange(slots) if columns is None else torch.tensor(columns)
    step = {"columns": held[None, None], "seen_tokens": int(held[-1]) + 1}
    return DecodeStep(**_worked(rows, slots) | step | fields)


def _worked(rows, slots):
    """Keys are unit vectors, and queries the logarithms of the wanted rows."""
    weights = torch.zeros(len(rows), slots)
    for index, row in enumerate(rows):
        weights[index, : len(row)] = torch.tensor(row)
    return {
        "queries": weights.clamp(min=1e-30).log()[None, None],
        "keys": torch.eye(slots)[None, None],
        "score_options": ScoreOptions(scaling=1.0),
        "layer_idx": 0,
    }


def pad_left(rows: list[PromptLayer], *, query_tokens: int, extra: int = 0) -> PromptLayer:
    """Put single-row layers of different lengths into one left-padded batch.

    Pads hold NaN, so that reading one of them anywhere poisons the result.

    Args:
        extra: pads in front of the longest row.
    """
    longest = max(row.keys.shape[2] for row in rows) + extra
    return PromptLayer(
        queries=_stack([row.queries for row in rows], min(query_tokens, longest)),
        keys=_stack([row.keys for row in rows], longest),
        values=_stack([row.values for row in rows], longest),
        score_options=rows[0].score_options,
        rotation=rows[0].rotation,
        output_weight=rows[0].output_weight,
        pad_tokens=torch.tensor([longest - row.keys.shape[2] for row in rows]),
        layer_idx=rows[0].layer_idx,
        received=_stack([row.received[..., None] for row in rows], longest)[..., 0],
    )


def rotate(states: Tensor, positions: Tensor) -> Tensor:
    """Turn (B, H, N, D) states on by (B, N) positions, the two halves of a head in pairs."""
    half = states.shape[-1] // 2
    speeds = 0.3 ** torch.arange(half)
    angles = positions[:, None, :, None] * speeds
    one, other = states.float().split(half, dim=-1)
    turned = (one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin())
    return torch.cat(turned, dim=-1)


def output_weight(inputs: int, hidden: int = 6) -> Tensor:
    """An output projection, the same for every seed: it belongs to the model."""
    return torch.randn(hidden, inputs, generator=torch.Generator().manual_seed(inputs))


def _stack(states: list[Tensor], tokens: int) -> Tensor:
    shape = (len(states), states[0].shape[1], tokens, states[0].shape[3])
    padded = torch.full(shape, float("nan"), dtype=states[0].dtype)
    for row, own in enumerate(states):
        padded[row, :, tokens - own.shape[2] :] = own[0]
    return padded
