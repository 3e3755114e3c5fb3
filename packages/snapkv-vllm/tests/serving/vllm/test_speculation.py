"""Drafts looked up in the text itself (n-grams), verified against compressed prompts."""

import sys

import pytest

from snapkv import AdaKV, SnapKV, default_policy
from tests.serving.vllm.engines import greedy, small_engine
from tests.serving.vllm.models import ids_of
from tests.serving.vllm.test_graphs import steps_of

BUDGET = 64
TOKENS = 40
CHUNK = 60
NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 2,
}
PROMPTS = [(ids_of(length // 3, seed=length) * 3)[:length] for length in (111, 90, 96, 42, 60)]


POLICIES = {
    "snapkv": SnapKV,
    "adakv": lambda budget: AdaKV(SnapKV(budget)),
    "across-layers": default_policy,
}


@pytest.fixture(
    scope="module",
    params=[("snapkv", True), ("adakv", False), ("across-layers", True)],
    ids=["prefix-caching", "heads-of-different-length", "one-budget-for-all-layers"],
)
def engine(request, small):
    """Of few blocks and short chunks, so that requests with drafts are preempted."""
    policy, caching = request.param
    with small_engine(
        small,
        budget=BUDGET,
        policy=policy,
        speculative_config=NGRAMS,
        enable_prefix_caching=caching,
        max_model_len=192,
        max_num_batched_tokens=CHUNK,
        kv_cache_memory_bytes=small.blocks_bytes(8, 32),
    ) as running:
        running.policy = POLICIES[policy]
        yield running
    # vLLM looks into every module when it makes a worker, and stumbles over what numba brought.
    sys.modules.pop("llvmlite.binding.ffi", None)


def count_drafts(engine):
    """How many tokens were drafted and how many of these were right, from now on."""
    counted, make = {"drafted": 0, "accepted": 0}, engine.scheduler.make_spec_decoding_stats

    def make_and_count(*args, num_draft_tokens, num_accepted_tokens, **kwargs):
        counted["drafted"] += num_draft_tokens
        counted["accepted"] += num_accepted_tokens
        tokens = {"num_draft_tokens": num_draft_tokens, "num_accepted_tokens": num_accepted_tokens}
        return make(*args, **tokens, **kwargs)

    engine.scheduler.make_spec_decoding_stats = make_and_count
    return counted


def test_answers_equal_those_without_drafts(engine, small):
    """Texts repeat themselves; the last is not compressed, and the pool is too small for all."""
    budgets = [BUDGET] * 4 + [0]
    policies = [engine.policy(budget) if budget else SnapKV(512) for budget in budgets]
    expected = [
        small.answer(ids, policy, TOKENS) for ids, policy in zip(PROMPTS, policies, strict=True)
    ]
    counted = count_drafts(engine)
    sampling = [greedy(TOKENS, extra_args={"snapkv_budget": budget}) for budget in budgets]
    with engine.watching() as kept:
        assert engine.answers(PROMPTS, sampling) == expected
    assert 0 < counted["accepted"] < counted["drafted"]
    assert engine.preempted > 0
    assert len(kept.blocks_held) > kept.prompts  # resumed requests are compressed again
    engine.require_empty()


def test_last_chunk_as_long_as_a_step_with_drafts_is_compressed_correctly(
    engine, small, second_runner
):
    """The last four tokens of the prompt look to vLLM like one token and three drafts."""
    prompt = ids_of(2 * CHUNK + 4, seed=1)
    with steps_of(engine, second_runner) as steps:
        answers = engine.answers([prompt], greedy(5))
    assert [tokens for tokens, _, _ in steps[:3]] == [[CHUNK], [CHUNK], [4]]
    _, orders, uniform = steps[2]
    assert (orders, uniform) == (True, [False])
    assert answers == [small.answer(prompt, engine.policy(BUDGET), 5)]
