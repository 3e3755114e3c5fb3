"""SnapKV written as loops over Python floats (float64): slow, and meant to be right at a glance.

Nothing is imported from the package under test. One row of a batch is one prompt without padding:
lists ``queries[head][window][D]``, ``keys[kv_head][T][D]``. A padded row must behave as if its
pads were not there, so the oracle never sees any.
"""

import math
from decimal import Decimal
from itertools import pairwise

Row = list[float]


def dot(left: Row, right: Row) -> float:
    total = 0.0
    for a, b in zip(left, right, strict=True):
        total += a * b
    return total


def attention_weights(
    query: Row,
    visible_keys: list[Row],
    scaling: float,
    softcap: float | None = None,
    sink: float | None = None,
) -> Row:
    """Softmax of one query over the keys it sees; a sink takes its share and is dropped."""
    logits = []
    for key in visible_keys:
        logit = dot(query, key) * scaling
        if softcap is not None:
            logit = softcap * math.tanh(logit / softcap)
        logits.append(logit)
    largest = max(logits) if sink is None else max([*logits, sink])
    powers = [math.exp(logit - largest) for logit in logits]
    total = 0.0
    for power in powers:
        total += power
    if sink is not None:
        total += math.exp(sink - largest)
    return [power / total for power in powers]


def head_votes(
    queries: list[Row],
    keys: list[Row],
    scaling: float,
    softcap: float | None = None,
    sink: float | None = None,
) -> Row:
    """What each prefix position receives from the window's queries, each of which is causal."""
    window_tokens, prompt_tokens = len(queries), len(keys)
    prefix_tokens = prompt_tokens - window_tokens
    votes = [0.0] * prefix_tokens
    for index, query in enumerate(queries):
        position = prefix_tokens + index
        weights = attention_weights(query, keys[: position + 1], scaling, softcap, sink)
        for prefix_position in range(prefix_tokens):
            votes[prefix_position] += weights[prefix_position]
    return votes


def reduce_group(group: list[Row], how: str) -> Row:
    """Combine the votes of the query heads of one KV head."""
    reduced = []
    for position in range(len(group[0])):
        received = [votes[position] for votes in group]
        if how == "max":
            reduced.append(max(received))
        elif how == "sum":
            reduced.append(sum(received))
        elif how == "mean":
            reduced.append(sum(received) / len(received))
        else:
            raise AssertionError(how)
    return reduced


def pool(votes: Row, kernel_size: int | tuple[int, int], how: str) -> Row:
    """Stride 1, half a kernel of padding: -inf for the maximum, counted zeros for the mean.

    Of a pair, every vote reaches so many positions before its own and so many behind it.
    """
    before, behind = (kernel_size // 2,) * 2 if isinstance(kernel_size, int) else kernel_size
    pooled = []
    for position in range(len(votes)):
        reached_by = []
        for other in range(position - behind, position + before + 1):
            if 0 <= other < len(votes):
                reached_by.append(votes[other])
            else:
                reached_by.append(-math.inf if how == "max" else 0.0)
        if how == "max":
            pooled.append(max(reached_by))
        elif how == "avg":
            pooled.append(sum(reached_by) / (before + behind + 1))
        else:
            raise AssertionError(how)
    return pooled


def fade(votes: Row, decay: float) -> Row:
    """The best of all votes up to a position, each less by the factor for every step from it."""
    faded = []
    for position in range(len(votes)):
        arriving = []
        for other in range(position + 1):
            arriving.append(votes[other] * decay ** (position - other))
        faded.append(max(arriving))
    return faded


def best_positions(scores: Row, count: int) -> list[int]:
    """Take the best position `count` times; of equal scores the lowest position. Ascending."""
    taken: list[int] = []
    for _ in range(count):
        best = None
        for position, score in enumerate(scores):
            if position in taken:
                continue
            if best is None or score > scores[best]:
                best = position
        assert best is not None, "more positions asked for than there are"
        taken.append(best)
    return sorted(taken)


def pooled_scores(
    queries: list[list[Row]],
    keys: list[list[Row]],
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Row | None = None,
    kernel_size: int | tuple[int, int] | None,
    pooling: str,
    decay: float | None = None,
    group_reduce: str,
    window_reduce: str = "mean",
    first_tokens: int = 0,
) -> list[Row]:
    """Pooled votes of every KV head, or of every query head for "none".

    The votes of the first tokens are not pooled: they stay where they are and lift nothing. For
    "max" every query's are pooled, scaled back to what they were in sum, and the largest taken.
    """
    group_size = len(queries) // len(keys)

    def lifted(votes: Row) -> Row:
        first, zeros = votes[:first_tokens], [0.0] * len(votes[:first_tokens])
        others = zeros + votes[first_tokens:]
        if pooling == "fading":
            assert decay is not None
            return first + fade(others, decay)[first_tokens:]
        assert kernel_size is not None
        return first + pool(others, kernel_size, pooling)[first_tokens:]

    votes = []
    for head, head_queries in enumerate(queries):
        sink = None if sinks is None else sinks[head]
        head_keys, prefix = keys[head // group_size], len(keys[0]) - len(head_queries)
        if window_reduce == "mean":
            votes.append(head_votes(head_queries, head_keys, scaling, softcap, sink))
            continue
        largest = [0.0] * prefix
        for index, query in enumerate(head_queries):
            seen = head_keys[: prefix + index + 1]
            weights = attention_weights(query, seen, scaling, softcap, sink)[:prefix]
            others, now = sum(weights[first_tokens:]), lifted(weights)
            scale = others / sum(now[first_tokens:])
            scaled = now[:first_tokens] + [vote * scale for vote in now[first_tokens:]]
            largest = [max(pair) for pair in zip(largest, scaled, strict=True)]
        votes.append(largest)
    if group_reduce != "none":
        votes = [
            reduce_group(votes[first : first + group_size], group_reduce)
            for first in range(0, len(votes), group_size)
        ]
    return votes if window_reduce == "max" else [lifted(head) for head in votes]


def kept_prefix_tokens(
    prompt_tokens: int, window_size: int, budget: int | None, keep_ratio: float | None
) -> int:
    """How many positions before the window survive."""
    prefix_tokens = max(0, prompt_tokens - window_size)
    if keep_ratio is not None:
        return math.floor(Decimal(str(keep_ratio)) * prefix_tokens)
    assert budget is not None
    return min(prefix_tokens, budget - window_size)


def kept_positions(scores: Row, prompt_tokens: int, keep_tokens: int) -> list[int]:
    """The best of the prefix, then the window."""
    prefix_tokens = len(scores)
    window = list(range(prefix_tokens, prompt_tokens))
    return best_positions(scores, keep_tokens) + window


def cut_gap(scores: Row, keep_tokens: int) -> float:
    """How far the score at the cut is from the nearest other score.

    Equal scores (the plateaus of max pooling) stay equal under rounding, so a selection can only
    depend on rounding where this gap is of its size.
    """
    if not 0 < keep_tokens < len(scores):
        return math.inf
    at_cut = sorted(scores, reverse=True)[keep_tokens - 1]
    distinct = sorted(set(scores))
    gaps = [high - low for low, high in pairwise(distinct) if at_cut in (low, high)]
    return min(gaps, default=math.inf)
