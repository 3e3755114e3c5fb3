"""Spans in requests: their checks and their effect on the kept positions."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snapkv import SnapKV, StreamingLLM
from snapkv.errors import InvalidArgumentError, SnapKVError
from snapkv.policies.spans import Spans
from snapkv_vllm.admission.methods import METHODS, WithSpans, count_kept_tokens, require_spans_fit
from snapkv_vllm.admission.settings import ServingSettings
from snapkv_vllm.admission.spans import SPANS_FIELD, RequestSpans, parse_spans
from tests.ops.states import random_layer
from tests.serving.fuzzing import any_value
from tests.serving.selections import kept_of

SETTINGS = ServingSettings(budget=64, parameters={"window_size": 8})
SPAN = st.tuples(st.integers(0, 30), st.integers(1, 12)).map(lambda one: (one[0], sum(one)))


def said(*spans, **more):
    return [{"start": start, "end": end, "do": do, **more} for start, end, do in spans]


def chosen(policy, tokens):
    layer = random_layer(0, prompt_tokens=tokens, query_tokens=policy.query_tokens)
    return kept_of(policy, layer)


@given(st.lists(SPAN, max_size=4), st.lists(SPAN, max_size=4))
def test_remaining_edits_are_a_difference_of_sets(some, gone):
    first, second = Spans.of("x", some), Spans.of("x", gone)
    left = first.without(second)
    covers = [one.cover(torch.arange(60)) for one in (first, second, left)]
    assert (covers[0] & ~covers[1] == covers[2]).all()


def test_spans_match_an_example_worked_out_by_hand():
    """Three of ten tokens are dropped; two of the budget of four are protected, and one votes."""
    own = {"window_size": 1, "kernel_size": 1}
    settings = ServingSettings(policy="snapkv", budget=4, parameters=own)
    given = {SPANS_FIELD: said((2, 5, "drop"), (0, 2, "protect"))}
    policy = settings.plan_request(given, 10).policy
    assert policy.spans == RequestSpans(Spans(((2, 5),)), Spans(((0, 2),)))
    assert policy.policy == SnapKV(7, window_size=1, kernel_size=1)
    assert count_kept_tokens(policy, 10) == 4
    votes = torch.zeros(1, 1, 10, 2)
    votes[..., [3, 6, 8], 0] = torch.tensor([9.0, 2.0, 1.0])  # keys that the last query meets
    query = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    layer = random_layer(0, prompt_tokens=10, query_tokens=1)
    layer = replace(layer, queries=query, keys=votes, values=votes)
    assert policy.select(layer).keep_indices.tolist() == [[[0, 1, 6, 9]]]


def test_only_dropped_spans_are_removed_if_the_rest_fits_the_budget():
    policy = SETTINGS.plan_request({SPANS_FIELD: said((10, 40, "drop"))}, 94).policy
    assert policy.policy is None
    assert policy.query_tokens == 0
    assert count_kept_tokens(policy, 94) == 64
    require_spans_fit(policy, 41)
    with pytest.raises(SnapKVError, match=r"drop 10 to 40 of .* the last token is kept"):
        require_spans_fit(policy, 40)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (said((0, 60, "protect")), "exceeds the budget of 64"),
        (said((5, 9, "compress")), "budget: the value must not be null"),
        (said((5, 9, "drop"), budget=3), "have a budget, but this span has the action drop"),
        (said((0, 10, "drop"), (5, 20, "protect")), "the spans .* overlap"),
        (said((3, 3, "drop")), "the start must be less than the end"),
        (said((0, 1, "erase")), "drop, protect and compress"),
        (said((0, 2**70, "drop")), "end"),
        (said((0, 1, "drop")) * 1025, "at most 1,024"),
        ([1], "every span must be an object"),
        ([{"role": "tool", "do": "drop"}], "the fields start, end, do, budget, but got .role."),
        (said(*((n, n + 2, "compress") for n in range(0, 40, 4)), budget=1), "at most 8 spans of"),
    ],
)
def test_wrong_spans_are_refused_in_one_line(given, words):
    with pytest.raises(SnapKVError, match=words) as error:
        SETTINGS.plan_request({SPANS_FIELD: given}, 100)
    assert "\n" not in str(error.value)


def test_error_about_spans_has_the_prefix_only_once():
    given = {SPANS_FIELD: said((0, 10, "drop")), "snapkv_protect_first": 5}
    with pytest.raises(SnapKVError, match=f"^{SPANS_FIELD}: the spans .* overlap"):
        SETTINGS.plan_request(given, 100)


@pytest.mark.parametrize(
    ("policy", "own"),
    [(name, {}) for name in METHODS] + [("default", {"voters": 3}), ("snapkv", {"voters": 60})],
    ids=str,
)
def test_every_method_applies_its_budget_to_tokens_outside_spans(policy, own):
    settings = ServingSettings(budget=40, policy=policy, parameters=own)
    given = said((50, 90, "drop"), (100, 104, "protect"))
    policy = settings.plan_request({SPANS_FIELD: given}, 200).policy
    keep = chosen(policy, 200)
    assert isinstance(policy, WithSpans)
    assert int((keep >= 0).sum()) == 40 * keep.shape[0] * keep.shape[1]
    for head in keep.flatten(0, 1).tolist():
        assert not set(range(50, 90)) & set(head)
        assert set(range(100, 104)) <= set(head)


@pytest.mark.parametrize("voters", [3, 8, 60])
def test_compressed_span_may_end_at_the_window_for_any_voters(voters):
    """The span has an answer and a question that votes on both."""
    own = {"snapkv_voters": voters, "snapkv_budget": 0}
    own[SPANS_FIELD] = said((50, 192, "compress"), budget=9)
    policy = SETTINGS.plan_request(own, 200).policy
    require_spans_fit(policy, 200)
    assert count_kept_tokens(policy, 200) == 200 - 142 + 9
    (heads,) = chosen(policy, 200).tolist()
    assert [len([place for place in head if 50 <= place < 192]) for head in heads] == [9, 9]
    with pytest.raises(InvalidArgumentError, match="because the last 8 are kept"):
        require_spans_fit(policy, 199)


def test_compressed_dropped_and_protected_spans_share_a_request():
    spans = said((20, 100, "compress"), budget=9) + said((130, 200, "compress"), budget=5)
    spans += said((100, 120, "protect"), (250, 296, "drop"))
    policy = SETTINGS.plan_request({SPANS_FIELD: spans}, 300).policy
    (heads,) = chosen(policy, 300).tolist()
    for head in heads:
        parts = [(20, 100), (100, 120), (130, 200), (250, 296), (296, 300)]
        assert [sum(a <= place < b for place in head) for a, b in parts] == [9, 20, 5, 0, 4]
        assert len(head) == 64


def test_span_with_attention_sinks_cannot_be_compressed():
    settings = ServingSettings(policy="streaming-llm", budget=64)
    assert StreamingLLM(64).start == 4
    with pytest.raises(InvalidArgumentError, match="because the first 4 tokens are kept"):
        settings.plan_request({SPANS_FIELD: said((2, 30, "compress"), budget=3)}, 100)


def test_any_json_is_parsed_as_spans_or_refused():
    draw, refused = random.Random(0), []
    for _ in range(2000):
        entry = said((draw.randrange(9), draw.randrange(9), "drop"))[0]
        entry[draw.choice([*entry, "role", "budget"])] = any_value(draw, in_json=True)
        given = draw.choice([[entry], [entry] * 3, any_value(draw, in_json=True)])
        try:
            parse_spans(given)
        except SnapKVError as error:
            refused.append(str(error))
    assert 500 < len(refused) < 2000
    assert not [one for one in refused if "\n" in one or len(one) > 400]
