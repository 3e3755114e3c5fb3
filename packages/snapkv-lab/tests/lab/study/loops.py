"""The paper's measures as plain loops over Python numbers, without tensors and shared code."""

import math


def attention(queries, keys, scaling, position):
    """Return the attention of the query at a position to every token up to itself."""
    scores = [
        scaling * sum(q * k for q, k in zip(queries[position], key, strict=True))
        for key in keys[: position + 1]
    ]
    weights = [math.exp(score - max(scores)) for score in scores]
    return [weight / sum(weights) for weight in weights]


def top(numbers, count):
    """Return the indices of the largest numbers; of equal ones the lower comes first."""
    return set(sorted(range(len(numbers)), key=lambda i: (-numbers[i], i))[:count])


def summed(rows, tokens):
    """Return the attention of several queries, summed for each of the first tokens."""
    return [sum(row[i] for row in rows if i < len(row)) for i in range(tokens)]


def hit_rate(heads, scaling, *, prompt, window, keep_ratio, threshold, answer, first, sinks=None):
    """Compute Eq. 4-8 over all heads and some tokens of the answer, from position `first` on.

    `heads` has queries and keys for every query head: lists over positions of lists over channels.
    With `sinks`, this number of first positions and the last ones are kept, instead of those voted
    for. It also returns how many positions are important per token and head.
    """
    prefix = prompt - window
    count = math.floor(keep_ratio * prefix)
    hits = important = 0
    for queries, keys in heads:
        voters = [attention(queries, keys, scaling, i) for i in range(prefix, prompt)]
        kept = top(summed(voters, prefix), count)
        if sinks is not None:
            kept = {*range(sinks), *range(prefix - count + sinks, prefix)}
        for position in answer:
            row = attention(queries, keys, scaling, position)
            strong = {i for i in range(first, prefix) if row[i] > threshold}
            important += len(strong)
            hits += len(strong & kept)
    return hits / important, important / (len(heads) * len(answer))


def overlap(heads, scaling, *, one, other, candidates, keep_tokens):
    """Return the share of the positions with most attention that two groups of queries have in
    common.
    """
    shared = 0
    for queries, keys in heads:
        sets = [
            top(summed([attention(queries, keys, scaling, i) for i in window], candidates), k)
            for window, k in ((one, keep_tokens), (other, keep_tokens))
        ]
        shared += len(sets[0] & sets[1])
    return shared / (keep_tokens * len(heads))
