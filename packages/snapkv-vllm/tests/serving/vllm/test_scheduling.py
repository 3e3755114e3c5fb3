"""Preemption, shared prefixes and mixed batches do not change the answers."""

import pytest

from snapkv import SnapKV, default_policy
from snapkv.policies.default import by_layer
from tests.serving.vllm.engines import greedy, small_engine
from tests.serving.vllm.models import ids_of

BUDGET = 64
PAGE = 32
TOKENS = 60
LENGTHS = (260, 50, 130, 110, 125, 100)
PROMPTS = [ids_of(length, seed=length) for length in LENGTHS]


@pytest.fixture(scope="module")
def alone(small):
    """The library's answer to every prompt."""
    return [small.answer(ids, SnapKV(BUDGET), TOKENS) for ids in PROMPTS]


def test_preempted_requests_answer_as_undisturbed_ones(small, alone):
    """Six requests grow to four blocks each, but the pool has only 12 blocks."""
    with small_engine(
        small,
        budget=BUDGET,
        max_model_len=384,
        kv_cache_memory_bytes=small.blocks_bytes(13, PAGE),
        max_num_batched_tokens=100,
    ) as engine:
        with engine.watching() as kept:
            assert engine.answers(PROMPTS, greedy(TOKENS)) == alone
        assert engine.preempted > 0
        assert len(kept.blocks_held) > 4  # resumed requests are compressed again
        engine.require_empty()


def test_shared_prefixes_are_reused_and_stay_unchanged(small):
    prefix, questions = ids_of(320), [ids_of(60, seed=seed) for seed in (1, 2, 3, 1)]
    prompts = [prefix + question for question in questions]
    expected = [small.answer(ids, SnapKV(BUDGET), 20) for ids in prompts]
    with small_engine(small, budget=BUDGET, enable_prefix_caching=True) as engine:
        for ids, answer in zip(prompts, expected, strict=True):
            (output,) = engine.outputs([ids], greedy(20))
            assert list(output.outputs[0].token_ids) == answer
        assert output.num_cached_tokens == 320  # 380 - 32 = 348, in whole blocks
        assert engine.answers(prompts, greedy(20)) == expected  # all at once, sharing blocks
        whole = greedy(20, extra_args={"snapkv_budget": 0})
        assert engine.outputs([prompts[0]], whole)[0].num_cached_tokens == 352
        several = engine.outputs([prompts[1]], greedy(20, n=3, temperature=1.0, min_p=1.0))[0]
        assert [list(one.token_ids) for one in several.outputs] == [expected[1]] * 3
        assert engine.free_blocks == engine.all_blocks


def test_eight_questions_compute_their_text_once_and_answer_as_each_alone(small):
    """A cache hit ends before the voters, even if some of them are in the text."""
    policy, text = by_layer(default_policy(BUDGET)), ids_of(11 * PAGE)
    prompts = [text + ids_of(length, seed=length) for length in (1, 5, 9, 16, 33, 41, 80, 130)]
    cached = [(len(ids) - policy.query_tokens) // PAGE * PAGE for ids in prompts]
    with small_engine(small, policy="default", budget=BUDGET, enable_prefix_caching=True) as engine:
        for number, ids in enumerate(prompts):
            (output,) = engine.outputs([ids], greedy(20))
            assert list(output.outputs[0].token_ids) == small.answer(ids, policy, 20), len(ids)
            hit = min(cached[number], len(text)) if number else 0
            assert output.num_cached_tokens == hit
        assert cached[1] < len(text), "voters are in the text"
        engine.require_empty()


def test_compiled_models_give_the_same_answers(small, alone, second_runner):
    """With Triton's interpreter, models are only traced, because inductor needs a compiler."""
    options = {"enforce_eager": False, "max_num_batched_tokens": 512}
    if second_runner:
        options["compilation_config"] = {"mode": 1, "backend": "eager"}
    with small_engine(small, budget=BUDGET, **options) as engine:
        answers = engine.answers(PROMPTS[2:4], greedy(TOKENS))
    assert answers == alone[2:4]
