"""Preemption, shared prefixes and mixed batches: whatever vLLM does, answers stay the same."""

import pytest

from tests.serving.vllm.engines import Engine, greedy

BUDGET = 128
PAGE = 32
TOKENS = 150


def prompts_of(text_ids):
    return [
        text_ids[n * 500 : n * 500 + length]
        for n, length in enumerate((600, 90, 900, 300, 700, 450))
    ]


@pytest.fixture(scope="module")
def alone(folder, text_ids):
    """Every prompt's answer on its own, with room for everything."""
    with Engine(folder, budget=BUDGET, max_num_batched_tokens=2048) as engine:
        return [engine.answers([ids], greedy(TOKENS))[0] for ids in prompts_of(text_ids)]


def blocks_bytes(blocks):
    """Memory for that many blocks of the demo model: 30 layers, 3 KV heads of 64, float32."""
    return blocks * PAGE * 30 * 3 * 64 * 2 * 4


@pytest.mark.parametrize("caching", [False, True], ids=["plain", "prefix-caching"])
def test_preempted_requests_give_the_answers_of_undisturbed_ones(folder, text_ids, alone, caching):
    """Six requests that grow to nine blocks each, in the 34 that a prompt of 1,024 tokens needs."""
    with Engine(
        folder,
        budget=BUDGET,
        max_model_len=1024,
        kv_cache_memory_bytes=blocks_bytes(35),
        max_num_batched_tokens=256,
        enable_prefix_caching=caching,
    ) as engine:
        with engine.watching() as kept:
            assert engine.answers(prompts_of(text_ids), greedy(TOKENS)) == alone
        assert engine.free_blocks == engine.all_blocks
        assert engine.leftovers() == []
        assert engine.preemptions() > 0
        assert len(kept.blocks_held) > 5  # resumed requests are compressed again


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
        assert output.num_cached_tokens == 800 // PAGE * PAGE  # 828 before the window, in blocks
        assert engine.answers(prompts, greedy(20)) == expected  # all at once, sharing blocks
        whole = greedy(20, extra_args={"snapkv_budget": 0})
        assert engine.outputs([prompts[0]], whole)[0].num_cached_tokens == 832
        several = engine.outputs([prompts[1]], greedy(20, n=3, temperature=1.0, top_k=1))[0]
        assert [list(one.token_ids) for one in several.outputs] == [expected[1]] * 3
        assert engine.free_blocks == engine.all_blocks


def test_requests_that_come_while_others_generate(folder, text_ids, alone):
    """Chunks of prompts and generated tokens share batches, one compressed and one not."""
    with Engine(folder, budget=BUDGET, max_num_batched_tokens=100) as engine:
        answers = {}
        names = []
        for ids in prompts_of(text_ids):
            names += engine.start([ids], greedy(TOKENS))
            for _ in range(3):
                for output in engine.step():
                    answers[output.request_id] = list(output.outputs[0].token_ids)
        while engine.scheduler.requests:
            for output in engine.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)
        assert [answers[name] for name in names] == alone


def test_compiled_models_give_the_same_answers(folder, text_ids, alone):
    with Engine(folder, budget=BUDGET, enforce_eager=False, max_num_batched_tokens=512) as engine:
        answers = engine.answers(prompts_of(text_ids)[2:4], greedy(TOKENS))
    assert answers == alone[2:4]
