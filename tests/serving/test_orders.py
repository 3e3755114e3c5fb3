"""What the scheduler orders: block arithmetic worked out by hand, and in all cuts of a prompt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapkv import TOVA, SnapKV, StreamingLLM
from snapkv.serving.orders import Order, order_for, reusable_tokens, step_end

POLICY = SnapKV(64, window_size=32)


def ordered(prompt, computed, step, policy=POLICY):
    return order_for(policy, prompt_tokens=prompt, computed_tokens=computed, step_tokens=step)


def test_a_prompt_in_one_step_is_compressed_with_it():
    order = ordered(100, 100, 100)
    assert order == Order(policy=POLICY, prompt_tokens=100, query_tokens=32, compress=True)
    assert (order.kept_tokens, order.dropped_tokens) == (64, 36)


def test_a_window_that_lies_across_two_chunks_is_put_aside_in_parts():
    assert ordered(100, 60, 60) is None  # the window begins at 68
    first, second = ordered(100, 80, 80), ordered(100, 100, 20)
    assert (first.query_tokens, first.compress) == (12, False)
    assert (second.query_tokens, second.compress) == (20, True)


@pytest.mark.parametrize("prompt", [1, 63, 64])
def test_a_prompt_within_the_budget_is_left_alone(prompt):
    assert ordered(prompt, prompt, prompt) is None


def test_without_a_method_and_behind_the_prompt_there_are_no_orders():
    assert ordered(100, 100, 100, policy=None) is None
    assert ordered(100, 101, 1) is None


def test_methods_without_queries_only_get_the_end():
    policy = StreamingLLM(8)
    assert ordered(100, 99, 99, policy) is None
    assert ordered(100, 100, 1, policy).query_tokens == 0
    assert ordered(100, 100, 1, TOVA(8)).query_tokens == 1


@given(
    prompt=st.integers(65, 400),
    chunks=st.lists(st.integers(1, 90), min_size=1),
    window=st.integers(1, 63),
)
def test_however_a_prompt_is_cut_every_query_of_the_window_comes_once(prompt, chunks, window):
    policy, computed, queries, ends = SnapKV(64, window_size=window), 0, 0, 0
    for chunk in [*chunks, prompt]:
        step = min(chunk, prompt - computed)
        if step == 0:
            break
        computed += step
        order = ordered(prompt, computed, step, policy)
        queries += order.query_tokens if order else 0
        ends += order.compress if order else 0
    assert (queries, ends) == (window, 1)


def test_a_step_of_a_resumed_request_stops_where_its_prompt_ends():
    assert step_end(100, 0, 130) == 100
    assert step_end(100, 60, 60) == 40
    assert step_end(100, 0, 100) == 100
    assert step_end(100, 100, 7) == 7
    assert step_end(100, 0, 50) == 50


def test_cached_prefixes_end_before_the_queries_that_vote():
    assert reusable_tokens(POLICY, 200) == 168  # 200 - 32
    assert reusable_tokens(None, 200) == 200
    assert reusable_tokens(POLICY, 60) == 60  # nothing will be dropped
    assert reusable_tokens(StreamingLLM(64), 200) == 200
    assert reusable_tokens(TOVA(64), 200) == 199
