"""Heads of different length in an engine: what is kept and answered is the library's AdaKV."""

import pytest

from snapkv import AdaKV, SnapKV
from tests.serving.vllm.conftest import SECOND_RUNNER
from tests.serving.vllm.engines import greedy, small_engine
from tests.serving.vllm.models import ids_of
from tests.serving.vllm.test_graphs import steps_of

BUDGET = 64
CHUNK = 150
PAGE = 32
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


def adakv(budget=BUDGET, safeguard=0.2, **options):
    return AdaKV(SnapKV(budget, **options), safeguard=safeguard)


def of_prompt(kept, prompt):
    """Of (1, H, K) positions and -1, those of every head that lie in the prompt."""
    return [[p for p in head if 0 <= p < len(prompt)] for head in kept[0].tolist()]


def test_kept_tokens_and_answers_of_thirty_prompts_equal_those_of_the_library(engine, small):
    prompts = [ids_of(length, seed=length) for length in LENGTHS]
    assert len(prompts) == 30
    with engine.watching() as kept:
        answers = engine.answers(prompts, greedy(TOKENS))
    lengths = set()
    for prompt, answer in zip(prompts, answers, strict=True):
        expected, cache = small.library(prompt, adakv(), TOKENS)
        assert answer == expected, len(prompt)
        if len(prompt) <= BUDGET:
            continue
        for layer, keep in enumerate(kept.of(prompt)):
            mine = of_prompt(keep, prompt)
            assert mine == of_prompt(cache.kept_positions(layer), prompt), (len(prompt), layer)
            assert sum(map(len, mine)) == BUDGET * small.kv_heads
            lengths |= {len(head) for head in mine}
    assert len(lengths) > 30
    assert kept.prompts == sum(length > BUDGET for length in LENGTHS)
    engine.require_empty()


def test_all_blocks_but_one_reserve_block_are_freed(engine):
    with engine.watching() as kept:
        engine.answers([ids_of(430)], greedy(4))
    assert kept.blocks_held == [[-(-(BUDGET + PAGE - 1) // PAGE)]] == [[3]]
    # the prompt in pieces of 150 tokens, then 64 + 31 tokens and up to 39 more
    assert engine.blocks_in_turn(ids_of(430, seed=1), greedy(40)) == [5, 10, 3, 4, 5, 0]


def test_heads_with_equal_counts_answer_as_without_splitting(engine, plain):
    """Token by token and probability by probability, since the kernels add in the same order."""
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
    """It would have captured the batch's own sequences."""
    with steps_of(engine, second_runner) as steps:
        engine.answers([ids_of(100), ids_of(50)], [greedy(4), greedy(8)])
    decoding = [(tokens, uniform) for tokens, orders, uniform in steps if not orders][1:]
    assert decoding[:2] == [([1, 1], [False])] * 2
    assert decoding[-1] == ([1], [True])


def test_protected_first_tokens_are_kept_in_every_head(engine, small):
    prompt = ids_of(250)
    with engine.watching() as kept:
        engine.answers([prompt], greedy(4, extra_args={"snapkv_protect_first": 5}))
    for keep in kept.of(prompt):
        assert all(head[:5] == [0, 1, 2, 3, 4] for head in of_prompt(keep, prompt))
        assert sum(map(len, of_prompt(keep, prompt))) == BUDGET * small.kv_heads
