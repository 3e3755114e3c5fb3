"""The measures against numbers worked out by hand, and against plain loops."""

import pytest
import torch

from snapkv.ops import ScoreOptions
from snapkv.policies import PromptLayer
from snapkv_lab.study import HitRate, Instructions, Overlap
from snapkv_lab.study.attention import common_tokens
from tests.lab.study import loops


def layer_paying(rows):
    """A layer whose attention is exactly these rows: (heads, queries, tokens), each summing to 1.

    Keys are unit vectors, so a query's channels are its scores, and a softmax of logarithms gives
    back the numbers.
    """
    weights = torch.tensor(rows)
    tokens = weights.shape[-1]
    keys = torch.eye(tokens)[None, None]
    queries = weights.clamp(min=1e-30).log()[None]
    return PromptLayer(
        queries=queries,
        keys=keys,
        values=keys,
        score_options=ScoreOptions(scaling=1.0),
        layer_idx=0,
    )


HAND = layer_paying(
    [
        [  # head 0: the window votes .2 .6 .7 .2, so positions 1 and 2 are kept
            [0.1, 0.5, 0.2, 0.1, 0.1, 0, 0, 0],
            [0.1, 0.1, 0.5, 0.1, 0.1, 0.1, 0, 0],
            [0.1, 0.3, 0.1, 0.3, 0.1, 0.05, 0.05, 0],  # important: 1 (hit), 3
            [0.2, 0.1, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1],  # important: 0, 2 (hit)
        ],
        [  # head 1: 1.1 .2 .2 .3, so 0 and 3
            [0.6, 0.1, 0.1, 0.1, 0.1, 0, 0, 0],
            [0.5, 0.1, 0.1, 0.2, 0.05, 0.05, 0, 0],
            [0.4, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0],  # important: 0 (hit)
            [0.05, 0.05, 0.2, 0.3, 0.1, 0.1, 0.1, 0.1],  # important: 2, 3 (hit)
        ],
    ]
)
"""Six tokens of a prompt, the last two of which are the window, and two of an answer."""


def test_the_hit_rate_of_a_hand_worked_example():
    settings = {"keep_ratio": 0.5, "window_size": 2, "sink_tokens": 1}
    settings |= {"generation_windows": 2, "generation_tokens": 1}
    study = HitRate(**settings, threshold=0.15)
    rates = study.measured(HAND, prompt_tokens=6)
    assert rates["vote", 1]["hit_rate"] == pytest.approx(2 / 3)
    assert rates["vote", 2]["hit_rate"] == pytest.approx(2 / 4)
    assert rates["vote", 1]["hit_rate_beyond_sinks"] == pytest.approx(1 / 2)
    assert rates["vote", 2]["hit_rate_beyond_sinks"] == pytest.approx(2 / 3)
    assert rates["vote", 1]["important"] == pytest.approx(3 / 2)  # per head
    # The same number of positions without a vote: the first one, and the prefix's last, 3.
    assert rates["sinks and recent", 1]["hit_rate"] == pytest.approx(2 / 3)
    assert rates["sinks and recent", 2]["hit_rate"] == pytest.approx(2 / 4)
    assert rates["sinks and recent", 2]["hit_rate_beyond_sinks"] == pytest.approx(1 / 3)
    rates = HitRate(**settings, threshold=0.6).measured(HAND, prompt_tokens=6)
    assert rates["vote", 1]["hit_rate"] is None  # where nothing is important


def random_layer(*, tokens, queries, heads=4, kv_heads=2, channels=8, seed=0):
    draw = torch.Generator().manual_seed(seed)
    states = [
        torch.randn(1, count, tokens, channels, generator=draw) * 1.5
        for count in (heads, kv_heads, kv_heads)
    ]
    return PromptLayer(
        queries=states[0][:, :, -queries:],
        keys=states[1],
        values=states[2],
        score_options=ScoreOptions(scaling=channels**-0.5),
        layer_idx=0,
    ), [
        (states[0][0, head].tolist(), states[1][0, head // (heads // kv_heads)].tolist())
        for head in range(heads)
    ]


@pytest.mark.parametrize("first", [0, 4], ids=["all", "beyond the sinks"])
@pytest.mark.parametrize("window", [1, 2])
def test_hit_rates_are_those_of_plain_loops(window, first):
    prompt, answer = 90, 70  # more queries than are looked at together
    layer, heads = random_layer(tokens=prompt + 2 * answer, queries=11 + 2 * answer)
    study = HitRate(keep_ratio=0.2, window_size=11, generation_windows=2, generation_tokens=answer)
    start = prompt + (window - 1) * answer
    expected = loops.hit_rate(
        heads,
        layer.score_options.scaling,
        prompt=prompt,
        window=11,
        keep_ratio=0.2,
        threshold=0.05,
        answer=range(start, start + answer),
        first=first,
    )
    found = study.measured(layer, prompt)["vote", window]
    assert 0 < expected < 1
    assert found["hit_rate_beyond_sinks" if first else "hit_rate"] == pytest.approx(expected)


def test_overlaps_are_those_of_plain_loops():
    prompt, size = 80, 8
    layer, heads = random_layer(tokens=prompt + 2 * size, queries=5 * size)
    study = Overlap(keep_ratio=0.1, window_tokens=size, prompt_windows=3, generation_windows=2)
    found = study.measured(layer, prompt)
    assert list(found) == [("prompt", -3), ("prompt", -2), ("prompt", -1), *_answers(2)]
    last, answer = range(72, 80), range(80, 96)
    for window, one, other in [
        (("prompt", -3), answer, range(56, 64)),
        (("prompt", -1), answer, last),
        (("answer", 2), last, range(88, 96)),
    ]:
        for name, candidates, keep_tokens in [
            ("overlap", 72, 7),
            ("overlap_of_common", 56, 5),
        ]:
            expected = loops.overlap(
                heads,
                layer.score_options.scaling,
                one=one,
                other=other,
                candidates=candidates,
                keep_tokens=keep_tokens,
            )
            assert found[window][name] == pytest.approx(expected), (window, name)


def _answers(count):
    return [("answer", number) for number in range(1, count + 1)]


def test_votes_of_a_question_and_its_answer_are_those_of_plain_loops():
    document, tokens = 60, 150
    layer, heads = random_layer(tokens=tokens, queries=tokens - document)
    whole, even, odd = Instructions(keep_ratio=0.1)._votes(layer, document)
    for mask, voters in [
        (whole, range(document, tokens)),
        (even, range(document, tokens, 2)),
        (odd, range(document + 1, tokens, 2)),
    ]:
        for head, (queries, keys) in enumerate(heads):
            rows = [loops.attention(queries, keys, layer.score_options.scaling, i) for i in voters]
            expected = loops.top(loops.summed(rows, document), 6)
            assert set(mask[head].nonzero().flatten().tolist()) == expected


def test_what_several_texts_share():
    assert common_tokens([[1, 2, 3, 9], [1, 2, 4], [1, 2, 3]]) == 2
    assert common_tokens([[1, 2], [1, 2, 3]]) == 2
    assert common_tokens([[5], [6]]) == 0
