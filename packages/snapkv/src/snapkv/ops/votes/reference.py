"""The operations of SnapKV in plain torch: slow, short and the specification of every faster one.

Axes: B batch rows, Hq query heads, Hkv KV heads, G group (Hq / Hkv), T prompt tokens, W window, P
prefix (T - W), K kept, D head_dim. Scores and votes are float32 whatever the dtype of the model.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from snapkv.ops.scores import AttentionStates

LEAST_SUM = torch.finfo(torch.float32).tiny
"""The smallest sum that weights are divided by, so that nothing becomes NaN."""

CHUNK = 8
"""`Lift.pool_rows` gets a multiple of this number of positions."""


class Lift(ABC):
    """The way in which votes are pooled along the prefix.

    See `snapkv.ops.votes.lifts` for the two ways.
    """

    @abstractmethod
    def pool(self, votes: Tensor) -> Tensor:
        """Pool the votes of each head along the prefix.

        Args:
            votes: (B, H, P) float32.

        Returns:
            The pooled votes in the same shape.
        """

    @abstractmethod
    def pool_rows(self, weights: Tensor) -> Tensor:
        """Pool the weights of each query along the prefix; may change `weights` in place.

        Args:
            weights: (N, P, R) float32, none negative, P a multiple of `CHUNK`.

        Returns:
            The same shape.
        """


def window_votes(states: AttentionStates, *, group_reduce: str = "none") -> Tensor:
    """Compute the attention that each position of the prefix receives from the window.

    The softmax runs over the whole prompt, causal inside the window, exactly as in the model's own
    attention; then the rows of the window are summed (Eq. 2).

    Args:
        states: the last W queries of the prompt and all T keys of it.
        group_reduce: how the query heads of a KV head are combined, as in `reduce_group`.

    Returns:
        (B, Hkv, P) float32; (B, Hq, P) for "none".
    """
    (Hkv, T), W = states.keys.shape[1:3], states.queries.shape[2]
    votes = attention_weights(states)[..., : T - W].sum(dim=-2)
    return reduce_group(votes, Hkv, group_reduce)


def largest_votes(
    states: AttentionStates,
    lift: Lift,
    *,
    prefix_tokens: int,
    sink_tokens: int = 0,
    group_reduce: str = "none",
) -> tuple[Tensor, Tensor]:
    """Compute the largest attention weight that each position receives from any of the queries.

    Before the queries are compared, each query's weights are pooled and scaled back to their own
    sum. The arguments are those of `snapkv.ops.largest_votes`.

    Returns:
        The largest votes and the sums of unpooled weights, both (B, Hkv, P) float32; (B, Hq, P) for
        "none".
    """
    Hkv, P, pads = states.keys.shape[1], prefix_tokens, states.pad_tokens
    weights = attention_weights(states)[..., :P]
    first = sink_tokens if pads is None else pads[:, None, None, None] + sink_tokens
    stays = torch.arange(P, device=weights.device) < first
    others = weights.masked_fill(stays, 0.0)
    lifted = lift.pool(others.flatten(1, 2)).view_as(weights).masked_fill(stays, 0.0)
    own_sum, sum_now = others.sum(dim=-1, keepdim=True), lifted.sum(dim=-1, keepdim=True)
    scaled = lifted * (own_sum / sum_now.clamp(min=LEAST_SUM))
    largest = torch.where(stays, weights, scaled).amax(dim=2)
    summed = weights.sum(dim=2)
    return reduce_group(largest, Hkv, group_reduce), reduce_group(summed, Hkv, group_reduce)


def attention_weights(states: AttentionStates) -> Tensor:
    """Compute the attention weights of the last queries, in the same way as the model.

    Every query sees the keys up to its own position.

    Args:
        states: the last W queries of the prompt and all T keys of it.

    Returns:
        (B, Hq, W, T) float32; the row of a padding query is zero.
    """
    W, T, pad_tokens = states.queries.shape[2], states.keys.shape[2], states.pad_tokens
    visible = None  # the last query sees everything
    if W > 1 or pad_tokens is not None:
        visible = window_visibility(W, T, pad_tokens, device=states.keys.device)
    weights = _weights(states, visible)
    return weights if pad_tokens is None else weights.nan_to_num(0.0)  # padding sees nothing


def _weights(states: AttentionStates, visible: Tensor | None) -> Tensor:
    """Compute the attention weights of the queries to the keys that they can see.

    A query that sees nothing gets NaN, unless there are sinks.

    Args:
        states: W queries and T keys; `pad_tokens` is not used.
        visible: (B or 1, heads, W, T) bool, the heads 1 or a divisor of Hq; None if all is visible.

    Returns:
        (B, Hq, W, T) float32.
    """
    (B, Hq, W, D), (Hkv, T) = states.queries.shape, states.keys.shape[1:3]
    grouped = states.queries.float().reshape(B, Hkv, (Hq // Hkv) * W, D)
    products = (grouped @ states.keys.float().transpose(-1, -2)).view(B, Hq, W, T)
    scores, sinks = states.score_options.scores(products), states.score_options.sink_logits
    if visible is not None:
        of_heads = scores.view(B, visible.shape[1], -1, W, T)
        of_heads.masked_fill_(~visible.unsqueeze(2), float("-inf"))
    if sinks is not None:
        column = sinks.float().view(1, Hq, 1, 1).expand(B, Hq, W, 1)
        scores = torch.cat([scores, column], dim=-1)
    return torch.softmax(scores, dim=-1)[..., :T]


def attention_of_groups(states: AttentionStates, num_kv_heads: int) -> Tensor:
    """Compute the attention that each group of query heads pays to the keys.

    All queries see all keys, as in R-KV. A group's score of a key is the highest of its heads'
    scores before the softmax, and its sink is the highest of their sinks.

    Args:
        states: W queries and P keys.
        num_kv_heads: how many groups.

    Returns:
        (B, num_kv_heads, P) float32, averaged over the queries; NaN if all keys of a row are
        padding.
    """
    (B, Hq, W, D), (Hkv, P) = states.queries.shape, states.keys.shape[1:3]
    options, sinks = states.score_options, states.score_options.sink_logits
    grouped = states.queries.float().reshape(B, Hkv, (Hq // Hkv) * W, D)
    products = grouped @ states.keys.float().transpose(-1, -2)
    scores = options.scores(products).view(B, num_kv_heads, Hq // num_kv_heads, W, P)
    highest = scores.amax(dim=2)
    if states.pad_tokens is not None:
        pads = torch.arange(P, device=highest.device) < states.pad_tokens[:, None, None, None]
        highest = highest.masked_fill_(pads, float("-inf"))
    if sinks is not None:
        of_groups = sinks.float().view(1, num_kv_heads, -1, 1).amax(dim=2)
        highest = torch.cat([highest, of_groups[..., None].expand(B, -1, W, 1)], dim=-1)
    return highest.softmax(dim=-1)[..., :P].mean(dim=2)


def attention_received(states: AttentionStates, *, block_tokens: int = 256) -> Tensor:
    """Compute the total attention that each position receives from the queries.

    Args:
        states: the last N queries and all T keys.
        block_tokens: how many queries to handle at a time.

    Returns:
        (B, Hq, T) float32.
    """
    received = _no_attention(states)
    for weights in attention_weight_blocks(states, block_tokens):
        received[..., : weights.shape[-1]] += weights.sum(dim=-2)
    return received


def attention_received_by_distance(
    states: AttentionStates, near_tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the total attention that each position receives, and the part from distant queries.

    Args:
        states: N queries and T keys.
        near_tokens: (B,) int64; a query is distant if it follows the position by this or more.

    Returns:
        The sums over all queries and over the distant ones, both (B, Hq, T) float32.
    """
    received, from_afar = _no_attention(states), _no_attention(states)
    positions = torch.arange(states.keys.shape[2], device=received.device)
    for weights in attention_weight_blocks(states, 256):
        rows, seen = weights.shape[-2:]
        distance = positions[seen - rows : seen, None] - positions[:seen]
        received[..., :seen] += weights.sum(dim=-2)
        far = distance >= near_tokens[:, None, None, None]
        from_afar[..., :seen] += weights.mul_(far).sum(dim=-2)
    return received, from_afar


def _no_attention(states: AttentionStates) -> Tensor:
    shape = *states.queries.shape[:2], states.keys.shape[2]
    return states.queries.new_zeros(shape, dtype=torch.float32)


def attention_weight_blocks(states: AttentionStates, block_tokens: int) -> Iterator[Tensor]:
    """Yield the attention weights of one block of queries at a time.

    Each block holds weights to the keys up to its last query only.

    Args:
        states: as in `attention_weights`.
        block_tokens: how many queries a block has, at most.

    Yields:
        (B, Hq, queries of the block, keys up to its last query) float32.
    """
    N, T = states.queries.shape[2], states.keys.shape[2]
    for start in range(0, N, block_tokens):
        stop = min(start + block_tokens, N)
        block = states.queries[:, :, start:stop], states.keys[:, :, : T - N + stop]
        yield attention_weights(AttentionStates(*block, states.score_options, states.pad_tokens))


def attention_to_stored(states: AttentionStates, columns: Tensor, seen_tokens: int) -> Tensor:
    """Compute the total attention that each stored token receives from the queries.

    Other tokens may have been dropped.

    The arguments are those of `count_above`.

    Returns:
        (B, Hq, S) float32; zero if a slot holds no token.
    """
    received = _no_attention(states)
    for weights in _stored_weight_blocks(states, columns, seen_tokens, 64):
        received += weights.nan_to_num(0.0).sum(dim=-2)  # padding sees nothing
    return received


def count_above(
    states: AttentionStates,
    threshold: Tensor,
    columns: Tensor,
    seen_tokens: int,
    *,
    block_tokens: int = 32,
) -> Tensor:
    """Count the queries that pay more attention to a token than a given threshold.

    Queries attend to the tokens that are stored now and came before them.

    Args:
        states: the queries of the last N tokens seen, whether or not those are stored, and the keys
            of the S stored tokens.
        threshold: (B,) float32.
        columns: (B, H, S) int64, column of every stored token in the whole sequence, padding
            counted; -1 for a slot that holds none. H is 1 or a divisor of Hq.
        seen_tokens: columns seen so far; the last query is in the last of them.
        block_tokens: queries at a time.

    Returns:
        (B, Hq, S) float32, whole numbers.
    """
    counts = _no_attention(states)
    for weights in _stored_weight_blocks(states, columns, seen_tokens, block_tokens):
        # In place, as 0 and 1. The NaN of a padding query is not above the threshold.
        counts += weights.gt_(threshold.view(-1, 1, 1, 1)).sum(dim=-2)
    return counts


def _stored_weight_blocks(
    states: AttentionStates, columns: Tensor, seen_tokens: int, block_tokens: int
) -> Iterator[Tensor]:
    """Yield the attention weights of stored tokens for one block of queries at a time.

    A query that sees nothing gets NaN. The arguments are those of `count_above`.

    Yields:
        (B, Hq, queries of the block, S) float32.
    """
    N, pads, options = states.queries.shape[2], states.pad_tokens, states.score_options
    first = 0 if pads is None else pads[:, None, None]
    columns = columns.masked_fill(columns < first, seen_tokens)  # after every query: never seen
    for start in range(0, N, block_tokens):
        block = states.queries[:, :, start : start + block_tokens]
        own = torch.arange(block.shape[2], device=columns.device) + (seen_tokens - N + start)
        visible = columns[:, :, None] <= own[:, None]
        yield _weights(AttentionStates(block, states.keys, options), visible)


def window_visibility(
    window_tokens: int, prompt_tokens: int, pad_tokens: Tensor | None, *, device: torch.device
) -> Tensor:
    """Return a mask of the tokens that the last queries of a prompt can see.

    Args:
        window_tokens: W, the number of queries.
        prompt_tokens: T, the number of tokens.
        pad_tokens: (B,) int64, leading padding of each row, or None.
        device: the device of the result.

    Returns:
        (B or 1, 1, W, T) bool.
    """
    positions = torch.arange(prompt_tokens, device=device)
    visible = positions <= positions[prompt_tokens - window_tokens :, None]
    if pad_tokens is None:
        return visible[None, None]
    return (visible & (positions >= pad_tokens[:, None, None])).unsqueeze(1)


def reduce_group(votes: Tensor, num_kv_heads: int, how: str) -> Tensor:
    """Combine the votes of all query heads that share a KV head.

    Args:
        votes: (B, Hq, P).
        num_kv_heads: Hkv.
        how: "mean", "max" or "sum"; "none" returns `votes`.

    Returns:
        (B, Hkv, P), or `votes` for "none".
    """
    if how == "none":
        return votes
    B, Hq, P = votes.shape
    grouped = votes.view(B, num_kv_heads, Hq // num_kv_heads, P)
    if how == "max":
        return grouped.amax(dim=2)
    return grouped.mean(dim=2) if how == "mean" else grouped.sum(dim=2)


def pool_votes(votes: Tensor, kernel_size: int | tuple[int, int], pooling: str) -> Tensor:
    """Pool the votes, so that the neighbours of a position with many votes are kept as well.

    Stride 1, ``kernel_size // 2`` of padding on each side (Listing 1, line 13). Average pooling
    divides by the width at the edges too, as ``avg_pool1d`` does by default.

    Args:
        votes: (B, H, P) float32.
        kernel_size: width of the kernel, odd and centred; 1 leaves the votes unchanged. Or a pair
            ``(before, after)``: how many positions a vote reaches before and after its own.
        pooling: "max" or "avg".

    Returns:
        (B, H, P) float32.
    """
    if not votes.shape[-1]:
        return votes
    pool = F.max_pool1d if pooling == "max" else F.avg_pool1d
    if isinstance(kernel_size, int) and kernel_size >= 2 * votes.shape[-1]:
        kernel_size = (kernel_size // 2, kernel_size // 2)
    if isinstance(kernel_size, int):
        return pool(votes, kernel_size, stride=1, padding=kernel_size // 2)
    before, behind = (min(reach, votes.shape[-1]) for reach in kernel_size)
    outside = float("-inf") if pooling == "max" else 0.0
    width = before + behind + 1
    pooled = pool(F.pad(votes, (behind, before), value=outside), width, stride=1)
    return pooled if pooling == "max" else pooled * (width / (sum(kernel_size) + 1))


def fade_votes(votes: Tensor, decay: float) -> Tensor:
    """Increase the votes of the positions that follow a position with many votes.

    A vote falls by the factor `decay` with every position, so a strong vote raises more positions
    than a weak one: ``s[j] = max(v[j], decay * s[j - 1])``.

    Args:
        votes: (B, H, P) float32, which stay unchanged.
        decay: the factor, in (0, 1).

    Returns:
        (B, H, P) float32.
    """
    faded = accumulate(votes.unbind(-1), lambda last, vote: torch.maximum(vote, decay * last))
    return torch.stack(list(faded), dim=-1) if votes.shape[-1] else votes


def gather_tokens(states: Tensor, keep_indices: Tensor) -> Tensor:
    """Copy the keys or values of the selected tokens.

    The numbers do not change.

    Args:
        states: (B, Hs, T, D).
        keep_indices: (B, H, K) int64. H is Hs usually; Hq to store one copy per query head; 1 if
            all heads keep the same tokens. An entry of -1 copies an arbitrary token.

    Returns:
        (B, max(H, Hs), K, D).
    """
    B, Hs, _, D = states.shape
    heads, K = max(keep_indices.shape[1], Hs), keep_indices.shape[2]
    kept = keep_indices.clamp(min=0).expand(-1, heads, -1).reshape(B, Hs, heads // Hs, K, 1)
    grouped = states.unsqueeze(2).expand(-1, -1, heads // Hs, -1, -1)  # a view, not a copy
    return grouped.gather(3, kept.expand(-1, -1, -1, -1, D)).flatten(1, 2)
