"""Ragged heads in an engine: kept tokens and answers equal those of the library's AdaKV."""

import pytest

from snapkv import AdaKV, SnapKV
from tests.serving.vllm.conftest import SECOND_RUNNER
from tests.serving.vllm.engines import greedy, require_same_as_library, small_engine
from tests.serving.vllm.models import ids_of
from tests.serving.vllm.test_graphs import steps_of

BUDGET = 64
CHUNK = 150
TOKENS = 16 if SECOND_RUNNER else 40
LENGTHS = [40, 64, 65, 66, 95, 96, 97, 127, 128, 150, 151, 182, *range(190, 460, 15)]


@pytest.fixture(scope="module")
def engine(small):
    options = {"policy": "adakv", "enable_prefix_caching": True}
    with small_engine(small, budget=BUDGET, max_num_batched_tokens=CHUNK, **options) as running:
        yield running


@pytest.fixture(scope="module")
def plain(small):
    """Every head keeps as many tokens, on the plain path."""
    with small_engine(small, budget=BUDGET, max_num_batched_tokens=CHUNK) as running:
        yield running


def test_kept_tokens_and_answers_of_thirty_prompts_equal_those_of_the_library(engine, small):
    prompts = [ids_of(length, seed=length) for length in LENGTHS]
    kept = require_same_as_library(engine, small, prompts, AdaKV(SnapKV(BUDGET)), TOKENS)
    long = [prompt for prompt in prompts if len(prompt) > BUDGET]
    assert len({len(head) for ids in long for layer in kept.of(ids) for head in layer}) > 30


def test_all_blocks_but_one_reserve_block_are_freed(engine):
    # the prompt in pieces of 150 tokens, then 64 + 31 tokens and up to 39 more
    assert engine.blocks_in_turn(ids_of(430, seed=1), greedy(40)) == [5, 10, 3, 4, 5, 0]


def test_heads_with_equal_counts_answer_as_without_splitting(engine, plain):
    """Tokens and probabilities are equal, since the kernels add in the same order."""
    prompts = [ids_of(length, seed=length) for length in (200, 310, 90, 64)]
    equal = greedy(40, logprobs=3, extra_args={"snapkv_safeguard": 1})
    ours = engine.outputs(prompts, equal)
    for mine, other in zip(ours, plain.outputs(prompts, greedy(40, logprobs=3)), strict=True):
        assert mine.outputs[0].token_ids == other.outputs[0].token_ids
        assert logprobs(mine) == logprobs(other)


def logprobs(output):
    return [
        {token: one.logprob for token, one in step.items()} for step in output.outputs[0].logprobs
    ]


def test_full_graphs_are_not_replayed_if_heads_are_split(engine, second_runner):
    """Such a graph would have captured sequences without the split heads."""
    with steps_of(engine, second_runner) as steps:
        engine.answers([ids_of(100), ids_of(50)], [greedy(4), greedy(8)])
    decoding = [(tokens, uniform) for tokens, orders, uniform in steps if not orders][1:]
    assert decoding[:2] == [([1, 1], [False])] * 2
    assert decoding[-1] == ([1], [True])
