"""R-KV: a worked example, and its redundancy and importance against plain loops.

What it shares with the other methods that evict is in `test_evicting.py`.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from snapkv import RKV
from snapkv.ops import ScoreOptions, attention_of_groups, redundancy
from snapkv.policies import DecodeStep
from tests.ops.states import random_layer, worked_layer
from tests.pairs import pairs

REPEATED = torch.tensor([[1.0, 0, 0, 0]] * 3 + [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
"""The first three keys are the same; nothing is like the others."""


def step_of(layer, padding_slots=None, **fields):
    """Return a decode step after which the cache stores exactly the layer's states."""
    columns = torch.arange(layer.keys.shape[2]).expand(*layer.keys.shape[:2], -1)
    common = {
        "queries": layer.queries,
        "keys": layer.keys,
        "score_options": layer.score_options,
        "layer_idx": 0,
        "columns": columns,
        "seen_tokens": columns.shape[2],
        "padding_slots": padding_slots,
    }
    return DecodeStep(**common | fields)


def six_tokens():
    """Return a prompt whose last query pays the first five tokens 4, 4, 4, 3 and 1 of 16 parts."""
    queries = torch.tensor([4.0, 3, 1, 100]).log()[None, None, None]
    return worked_layer(REPEATED[None, None], queries=queries)


@pytest.mark.parametrize(
    ("mix_lambda", "kept"),
    [(1.0, [0, 1, 2, 5]), (0.1, [2, 3, 4, 5]), (0.0, [2, 3, 4, 5])],
    ids=["importance alone", "the paper's", "redundancy alone"],
)
def test_eviction_equals_a_worked_example(mix_lambda, kept):
    """The attention is 0.25 thrice, 0.1875, 0.0625; the redundancy 0.212, 0.180, then 0.152.

    With 0.1 the scores of the first five are -0.166, -0.137, -0.112, -0.118 and -0.131. Where they
    tie, the lower position stays.
    """
    policy = RKV(4, window_size=1, evict_every=2, kernel_size=1, mix_lambda=mix_lambda)
    assert policy.evict(step_of(six_tokens())).keep_indices.tolist() == [[kept]]
    assert policy.select(six_tokens()).keep_indices.tolist() == [[kept]]


# Against loops.


def loop_redundancy(keys, threshold, exempt, pads):
    """Compute the redundancy by its definition in float64, one pair at a time."""
    result = torch.zeros(keys.shape[:3])
    for row, head in [(b, h) for b in range(keys.shape[0]) for h in range(keys.shape[1])]:
        own = [key / key.norm() for key in keys[row, head, pads[row] :].double()]
        sums = [0.0] * len(own)
        for one, key in enumerate(own):
            cosines = {other: float(key @ own[other]) for other in range(len(own)) if other != one}
            similar = [other for other, cosine in cosines.items() if cosine > threshold]
            for other, cosine in cosines.items():
                if other not in similar[::-1][:exempt]:
                    sums[other] += cosine
        means = torch.tensor(sums) / len(own)
        result[row, head, pads[row] :] = means.softmax(-1)
    return result


def loop_attention(layer, heads, pads, prefix):
    """Compute the attention by its definition in float64, one score at a time."""
    options, Hq = layer.score_options, layer.queries.shape[1]
    result = torch.zeros(layer.queries.shape[0], heads, prefix)
    for row in range(layer.queries.shape[0]):
        for group in range(heads):
            members = range(group * Hq // heads, (group + 1) * Hq // heads)
            for query in range(layer.queries.shape[2]):
                scores = [
                    max(_score(layer, row, head, query, slot) for head in members)
                    for slot in range(pads[row], prefix)
                ]
                parts = [math.exp(score) for score in scores]
                sink = 0.0
                if options.sink_logits is not None:
                    sink = math.exp(max(float(options.sink_logits[head]) for head in members))
                for slot, part in enumerate(parts, pads[row]):
                    share = part / (sum(parts) + sink) / layer.queries.shape[2]
                    result[row, group, slot] += share
    return result


def _score(layer, row, head, query, slot):
    options = layer.score_options
    key = layer.keys[row, head * layer.keys.shape[1] // layer.queries.shape[1], slot].double()
    score = float(layer.queries[row, head, query].double() @ key) * options.scaling
    cap = options.softcap
    return score if cap is None else cap * math.tanh(score / cap)


@pairs(pads=[None, [0, 7], [12, 3]], exempt=[0, 1, 3], rows=[1, 5, 100])
def test_redundancy_equals_its_definition(pads, exempt, rows):
    keys = random_layer(3, batch=2, prompt_tokens=13, query_tokens=1).keys[..., :3]
    pad_tokens = None if pads is None else torch.tensor(pads)
    found = redundancy(
        keys, threshold=0.5, exempt=exempt, pad_tokens=pad_tokens, most_cosines=rows * 2 * 2 * 13
    )
    torch.testing.assert_close(found, loop_redundancy(keys, 0.5, exempt, pads or [0, 0]))


@pairs(
    pads=[None, [4, 0]],
    heads=[(4, 4), (2, 2), (1, 1), (4, 1), (4, 2)],
    options={
        "plain": ScoreOptions(scaling=0.4),
        "softcap": ScoreOptions(scaling=0.7, softcap=1.5),
        "sinks": ScoreOptions(scaling=0.4, sink_logits=torch.tensor([0.3, 1.0, -2.0, 0.1])),
    },
)
def test_attention_of_groups_equals_its_definition(heads, pads, options):
    kv_heads, groups = heads
    layer = random_layer(1, batch=2, prompt_tokens=11, query_tokens=3, kv_heads=kv_heads)
    layer = replace(layer, score_options=options)
    pad_tokens = None if pads is None else torch.tensor(pads)
    found = attention_of_groups(replace(layer, pad_tokens=pad_tokens), groups)
    torch.testing.assert_close(found, loop_attention(layer, groups, pads or [0, 0], 11))


class Largest(TorchDispatchMode):
    """Records the number of values in the largest created tensor."""

    values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.values = max(self.values, made.numel())
        return made


def test_redundancy_holds_only_part_of_the_matrix_of_similarities():
    keys = random_layer(0, prompt_tokens=400, query_tokens=1).keys
    with Largest() as largest:
        redundancy(keys, threshold=0.5, most_cosines=20_000)
    assert largest.values == 20_000
    with Largest() as largest:
        redundancy(keys, threshold=0.5)
    assert largest.values == 2 * 400 * 400
