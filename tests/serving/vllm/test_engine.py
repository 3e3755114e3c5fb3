"""One engine with compressed prompts, against the library and against itself without them."""

import functools

import pytest
import torch

from snapkv import TOVA, CompressedCache, SnapKV
from snapkv.app.models import load
from tests.serving.vllm.engines import Engine, greedy

BUDGET = 256


@pytest.fixture(scope="module")
def engine(folder):
    with Engine(folder, budget=BUDGET, max_num_batched_tokens=700) as running:
        yield running


@pytest.fixture(scope="module")
def stock(folder):
    with Engine(folder, compressed=False, max_num_batched_tokens=700) as running:
        yield running


@functools.cache
def library_model():
    return load("demo").model


def library(ids, policy, tokens):
    """The library's answer and what it kept, on the same prompt."""
    model = library_model()
    cache = CompressedCache(model, policy)
    prompt = torch.tensor([ids])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=cache,
        max_new_tokens=tokens,
        do_sample=False,
        min_new_tokens=tokens,
    )
    return output[0, len(ids) :].tolist(), cache


def kept_of(cache, layer, budget):
    """What the library kept of the prompt: (1, Hkv, budget)."""
    return cache.kept_positions(layer)[..., :budget].expand(-1, 3, -1)


LENGTHS = (100, 255, 256, 257, 288, 700, 701, 1391, 1402, 2100)


def test_kept_sets_and_answers_are_those_of_the_library(engine, text_ids):
    """Lengths around the budget, and windows that lie across chunks of 700."""
    prompts = [text_ids[n : 2 * n] for n in LENGTHS]
    with engine.watching() as kept:
        answers = engine.answers(prompts, greedy(24))
    for prompt, answer in zip(prompts, answers, strict=True):
        expected, cache = library(prompt, SnapKV(BUDGET), 24)
        assert answer == expected, len(prompt)
        if len(prompt) > BUDGET:
            for layer, keep in enumerate(kept.of(prompt)):
                assert torch.equal(keep, kept_of(cache, layer, BUDGET)), (len(prompt), layer)
    assert kept.prompts == sum(n > BUDGET for n in LENGTHS)


def test_a_request_has_its_own_budget_window_kernel_and_pooling(engine, text_ids):
    prompt = text_ids[3000:4500]
    settings = [
        {"snapkv_budget": 128},
        {"snapkv_window_size": 64, "snapkv_kernel_size": 13, "snapkv_pooling": "avg"},
        {"snapkv_budget": 0},
    ]
    answers = engine.answers([prompt] * 3, [greedy(24, extra_args=own) for own in settings])
    policies = [SnapKV(128), SnapKV(BUDGET, window_size=64, kernel_size=13, pooling="avg")]
    expected = [library(prompt, policy, 24)[0] for policy in [*policies, SnapKV(4096)]]
    assert answers == expected
    assert len({tuple(answer) for answer in answers}) > 1


def test_a_budget_of_the_prompt_changes_nothing(engine, stock, text_ids):
    prompts = [text_ids[n : n + length] for n, length in enumerate((40, 300, 650, 1100, 1800))]
    off = [greedy(32, extra_args={"snapkv_budget": own}) for own in (0, 300, 4096, 1100, 0)]
    assert engine.answers(prompts, off) == stock.answers(prompts, greedy(32))


@pytest.mark.parametrize(
    "own",
    [
        {"snapkv_budget": "256"},
        {"snapkv_budget": 20},
        {"snapkv_kernel_size": 4},
        {"snapkv_pool": "max"},
    ],
    ids=str,
)
def test_wrong_settings_are_refused_before_the_engine_sees_them(engine, text_ids, own):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=r"snapkv_|budget|kernel_size"):
        engine.answers([text_ids[:50]], greedy(4, extra_args=own))
    assert len(engine.answers([text_ids[:50]], greedy(4))[0]) == 4


def test_blocks_are_really_freed_and_all_come_back(engine, text_ids):
    with engine.watching() as kept:
        engine.answers([text_ids[:2000]], greedy(4))
    assert kept.blocks_held == [-(-BUDGET // engine.block_tokens)]
    assert engine.free_blocks == engine.all_blocks


def test_samples_of_one_prompt_and_log_probabilities(engine, stock, text_ids):
    prompt = text_ids[:900]
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


def test_aborted_requests_leave_nothing_behind(engine, text_ids):
    """Before, during and after the prompt."""
    for steps in range(6):
        engine.start([text_ids[:1500], text_ids[1500:1900]], greedy(32))
        for _ in range(steps):
            engine.step()
        engine.abort_all()
        assert engine.free_blocks == engine.all_blocks, steps
    prompt = text_ids[:1200]
    assert engine.answers([prompt], greedy(8))[0] == library(prompt, SnapKV(BUDGET), 8)[0]
    assert engine.leftovers() == []


@pytest.mark.parametrize(("policy", "kind"), [("tova", TOVA)])
def test_other_methods_keep_what_the_library_keeps(folder, text_ids, policy, kind):
    prompt = text_ids[:1000]
    with Engine(folder, budget=200, policy=policy, max_num_batched_tokens=512) as engine:
        with engine.watching() as kept:
            engine.answers([prompt], greedy(2))
        _, cache = library(prompt, kind(200), 1)
    for layer, keep in enumerate(kept.of(prompt)):
        assert torch.equal(keep.expand(-1, 3, -1), kept_of(cache, layer, 200))
