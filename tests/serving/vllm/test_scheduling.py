"""Preemption, shared prefixes and mixed batches: whatever vLLM does, answers stay the same."""

import pytest

from tests.serving.vllm.engines import Engine, blocks_bytes, greedy

BUDGET = 64
PAGE = 32
TOKENS = 60
LENGTHS = (260, 50, 130, 110, 125, 100)


def prompts_of(text_ids):
    return [text_ids[n * 300 : n * 300 + length] for n, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def alone(folder, text_ids):
    """Every prompt's answer on its own, with room for everything."""
    with Engine(folder, budget=BUDGET, max_num_batched_tokens=2048) as engine:
        return [engine.answers([ids], greedy(TOKENS))[0] for ids in prompts_of(text_ids)]


@pytest.mark.parametrize("caching", [False, True], ids=["plain", "prefix-caching"])
def test_preempted_requests_give_the_answers_of_undisturbed_ones(folder, text_ids, alone, caching):
    """Six requests that grow to four blocks each, in the 12 that 384 tokens need."""
    with Engine(
        folder,
        budget=BUDGET,
        max_model_len=384,
        kv_cache_memory_bytes=blocks_bytes(13, PAGE),
        max_num_batched_tokens=100,
        enable_prefix_caching=caching,
    ) as engine:
        with engine.watching() as kept:
            assert engine.answers(prompts_of(text_ids), greedy(TOKENS)) == alone
        assert engine.preempted > 0
        assert len(kept.blocks_held) > 4  # resumed requests are compressed again
        assert engine.free_blocks == engine.all_blocks
        assert engine.leftovers() == []


def test_shared_prefixes_are_reused_and_stay_intact(folder, text_ids):
    prefix, questions = text_ids[:800], [text_ids[n : n + 60] for n in (2000, 3000, 4000, 2000)]
    prompts = [prefix + question for question in questions]
    with Engine(folder, budget=BUDGET, max_num_batched_tokens=2048) as engine:
        expected = [engine.answers([ids], greedy(20))[0] for ids in prompts]
    with Engine(
        folder, budget=BUDGET, max_num_batched_tokens=2048, enable_prefix_caching=True
    ) as engine:
        for ids, answer in zip(prompts, expected, strict=True):
            (output,) = engine.outputs([ids], greedy(20))
            assert list(output.outputs[0].token_ids) == answer
        assert output.num_cached_tokens == 800  # 860 - 32 = 828, in whole blocks
        assert engine.answers(prompts, greedy(20)) == expected  # all at once, sharing blocks
        whole = greedy(20, extra_args={"snapkv_budget": 0})
        assert engine.outputs([prompts[0]], whole)[0].num_cached_tokens == 832
        several = engine.outputs([prompts[1]], greedy(20, n=3, temperature=1.0, top_k=1))[0]
        assert [list(one.token_ids) for one in several.outputs] == [expected[1]] * 3
        assert engine.free_blocks == engine.all_blocks


def test_requests_that_come_while_others_generate(folder, text_ids, alone):
    """Chunks of prompts and generated tokens share batches; every second request is whole."""
    with Engine(folder, budget=BUDGET, max_num_batched_tokens=100) as engine:
        answers, names = {}, []

        def step():
            for output in engine.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)

        for ids in prompts_of(text_ids):
            names += engine.start([ids], greedy(TOKENS))
            engine.start([ids], greedy(TOKENS, extra_args={"snapkv_budget": 0}))
            for _ in range(3):
                step()
        while engine.scheduler.requests:
            step()
        assert [answers[name] for name in names] == alone


def test_compiled_models_give_the_same_answers(folder, text_ids, alone):
    with Engine(folder, budget=BUDGET, enforce_eager=False, max_num_batched_tokens=512) as engine:
        answers = engine.answers(prompts_of(text_ids)[2:4], greedy(TOKENS))
    assert answers == alone[2:4]
