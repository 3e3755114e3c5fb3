"""The measures against plain loops over Python numbers."""

import pytest

from snapkv_lab.study import HitRate, Instructions, Overlap
from snapkv_lab.study.attention import SELECTIONS, count_common_tokens
from tests.lab.study import loops
from tests.ops import states


def random_layer(tokens, queries):
    """Return a layer, and the states of each query head as lists; the first queries are missing."""
    layer = states.random_layer(0, prompt_tokens=tokens, query_tokens=queries)
    own, keys = layer.queries[0].tolist(), layer.keys[0].tolist()
    unknown = [None] * (tokens - queries)
    return layer, [(unknown + own[head], keys[head // 2]) for head in range(4)]


@pytest.mark.parametrize("first", [0, 4], ids=["all", "beyond the sinks"])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_hit_rates_equal_those_of_plain_loops(selection, first):
    prompt, answer = 90, 70  # more queries than are looked at together
    layer, heads = random_layer(prompt + 2 * answer, 11 + 2 * answer)
    given = {"keep_ratio": 0.2, "threshold": 0.05}
    shape = {"window_size": 11, "generation_windows": 2, "generation_tokens": answer}
    found = HitRate(**given, **shape).measure_layer(layer, prompt)
    beyond = "_beyond_sinks" if first else ""
    for window in (1, 2):
        start = prompt + (window - 1) * answer
        rate, important = loops.hit_rate(
            heads,
            layer.score_options.scaling,
            prompt=prompt,
            window=11,
            answer=range(start, start + answer),
            first=first,
            sinks=4 if selection == "sinks and recent" else None,
            **given,
        )
        assert 0 < rate < 1
        assert found[selection, window][f"hit_rate{beyond}"] == pytest.approx(rate)
        assert found[selection, window][f"important{beyond}"] == pytest.approx(important)
    nothing = HitRate(**given | {"threshold": 0.9999}, **shape).measure_layer(layer, prompt)
    assert nothing[selection, 1]["hit_rate"] is None  # where nothing is important


def test_overlaps_equal_those_of_plain_loops():
    prompt, size = 80, 8
    layer, heads = random_layer(prompt + 2 * size, 5 * size)
    study = Overlap(keep_ratio=0.1, window_tokens=size, prompt_windows=3, generation_windows=2)
    found = study.measure_layer(layer, prompt)
    assert list(found) == [*(("prompt", at) for at in (-3, -2, -1)), ("answer", 1), ("answer", 2)]
    last, answer = range(72, 80), range(80, 96)
    for window, one, other in [
        (("prompt", -3), answer, range(56, 64)),
        (("prompt", -1), answer, last),
        (("answer", 2), last, range(88, 96)),
    ]:
        for name, candidates, keep_tokens in [("overlap", 72, 7), ("overlap_of_common", 56, 5)]:
            expected = loops.overlap(
                heads,
                layer.score_options.scaling,
                one=one,
                other=other,
                candidates=candidates,
                keep_tokens=keep_tokens,
            )
            assert found[window][name] == pytest.approx(expected), (window, name)


def test_votes_of_a_question_and_its_answer_equal_those_of_plain_loops():
    document, tokens = 60, 150
    layer, heads = random_layer(tokens, tokens - document)
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


def test_common_tokens_are_counted_over_all_texts():
    assert count_common_tokens([[1, 2, 3, 9], [1, 2, 4], [1, 2, 3]]) == 2
    assert count_common_tokens([[1, 2], [1, 2, 3]]) == 2
    assert count_common_tokens([[5], [6]]) == 0
