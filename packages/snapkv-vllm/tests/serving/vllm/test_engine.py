"""One engine with compressed prompts, against the library and against itself without them."""

import pytest

from snapkv import TOVA, default_policy
from snapkv.policies.default import by_layer
from snapkv.validation import DEFAULT
from tests.serving.vllm.engines import greedy, require_same_as_library, small_engine
from tests.serving.vllm.models import ids_of

BUDGET = 64
CHUNK = 150


@pytest.fixture(scope="module")
def engine(small):
    with small_engine(
        small, policy=DEFAULT, budget=BUDGET, max_num_batched_tokens=CHUNK
    ) as running:
        yield running


@pytest.fixture(scope="module")
def stock(small):
    with small_engine(small, compressed=False, max_num_batched_tokens=CHUNK) as running:
        yield running


LENGTHS = (30, 63, 64, 65, 80, 150, 151, 181, 299, 302, 450)


def test_kept_tokens_and_answers_equal_those_of_the_library(engine, small):
    """Prompts are about as long as the budget, and some windows cross chunks of 150 tokens."""
    prompts = [ids_of(n, seed=n) for n in LENGTHS]
    kept = require_same_as_library(engine, small, prompts, by_layer(default_policy(BUDGET)), 16)
    assert set(map(tuple, kept.blocks_held)) == {(BUDGET // engine.block_tokens,)}


def test_request_may_set_budget_window_voters_kernel_and_pooling(engine, small):
    prompt = ids_of(400)
    settings = [
        {"snapkv_budget": 40, "snapkv_voters": 60},
        {"snapkv_window_size": 16, "snapkv_kernel_size": 13, "snapkv_pooling": "avg"},
        {"snapkv_budget": 0},
    ]
    answers = engine.answers([prompt] * 3, [greedy(16, extra_args=own) for own in settings])
    policies = [
        default_policy(40, voters=60),
        default_policy(BUDGET, kernel_size=13, pooling="avg"),
        default_policy(512),
    ]
    expected = [small.answer(prompt, by_layer(policy), 16) for policy in policies]
    assert answers == expected
    assert len({tuple(answer) for answer in answers}) == 3


def test_seeded_answer_does_not_depend_on_chunks_of_the_prompt(engine):
    """Alone the prompt is read in one step, in a batch in two; a longer one always in three."""
    seeded = [greedy(16, temperature=1.0, seed=number) for number in (1, 2, 3)]
    prompts = [ids_of(100, seed=1), ids_of(120, seed=2), ids_of(400, seed=3)]
    alone = [engine.answers([one], own)[0] for one, own in zip(prompts, seeded, strict=True)]
    assert engine.answers(prompts, seeded) == alone
    others = [greedy(16, temperature=1.0, seed=number) for number in (4, 5, 6)]
    assert engine.answers(prompts, others) != alone


def test_budget_as_long_as_the_prompt_changes_nothing(engine, stock):
    prompts = [ids_of(length, seed=length) for length in (20, 100, 200, 350, 450)]
    off = [greedy(24, extra_args={"snapkv_budget": own}) for own in (0, 100, 4096, 350, 0)]
    assert engine.answers(prompts, off) == stock.answers(prompts, greedy(24))


def test_several_samples_and_log_probabilities_equal_those_of_the_library(engine, stock):
    prompt = ids_of(260)
    sampling = greedy(12, n=3, temperature=1.0, logprobs=2, prompt_logprobs=1)
    ours = engine.outputs([prompt], sampling)[0]
    theirs = stock.outputs([prompt], sampling)[0]
    assert [len(one.token_ids) for one in ours.outputs] == [12, 12, 12]
    assert all(len(one.logprobs) == 12 for one in ours.outputs)
    # The prompt and the first token are the full model's; what follows is not.
    first = [[one.outputs[i].logprobs[0] for i in range(3)] for one in (ours, theirs)]
    for mine, stocks in zip(*first, strict=True):
        for token in mine.keys() & stocks.keys():
            assert mine[token].logprob == pytest.approx(stocks[token].logprob, abs=1e-4)
    for mine, stocks in zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True):
        for token in mine.keys() & stocks.keys():
            assert mine[token].logprob == pytest.approx(stocks[token].logprob, abs=1e-3)


def test_other_method_keeps_the_same_tokens_as_the_library(small):
    with small_engine(small, budget=50, policy="tova", max_num_batched_tokens=CHUNK) as engine:
        require_same_as_library(engine, small, [ids_of(300)], TOVA(50), 1)
