"""Requests held to a number of tokens while they generate."""

import random

import pytest
import torch

from snapkv import RKV, TOVA, PromptThenDecode, SnapKV, StreamingLLM
from snapkv_vllm import Limits
from tests.serving.vllm.engines import greedy, small_engine
from tests.serving.vllm.families import FamilyModel
from tests.serving.vllm.models import ids_of

WINDOW = {"window_size": 8}
SIZES = {"max_model_len": 4096, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 50 << 20}


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "deepseek_v3"])
def test_other_models_keep_answers_within_the_budget_as_the_library_does(tmp_path, family):
    small, policy = FamilyModel(tmp_path, family), SnapKV(64)
    limits = Limits(decode_budget=80, decode_policy="tova", evict_every=1)
    prompts = [ids_of(tokens, seed=tokens) for tokens in (70, 150, 200, 350)]
    latent = family == "deepseek_v3"
    sizes = {"max_num_batched_tokens": 150, "block_size": 16 if latent else 32}
    with small_engine(small, budget=64, limits=limits, **sizes) as engine:
        grown = engine.answers(prompts, greedy(40))
    library = PromptThenDecode(prompt=policy, decode=TOVA(79))
    assert grown == [small.answer(ids, library, 40) for ids in prompts]


DECODING = {
    "streaming-llm": (1, StreamingLLM(80, positions="original")),
    "r-kv": (8, RKV(80, evict_every=8)),
}


@pytest.mark.parametrize("name", DECODING)
def test_evictions_from_answers_equal_those_of_the_library(small, name):
    """The library's methods evict to their budget, the plugin from its own."""
    every, policy = DECODING[name]
    limits = Limits(decode_budget=80 + every, decode_policy=name, evict_every=every)
    library = PromptThenDecode(prompt=SnapKV(64, **WINDOW), decode=policy)
    prompts = [ids_of(tokens, seed=tokens) for tokens in (40, 150, 333)]
    with small_engine(small, budget=64, parameters=WINDOW, limits=limits, **SIZES) as engine:
        answers = engine.answers(prompts, greedy(60))
    assert answers == [small.answer(ids, library, 60) for ids in prompts]


def blocks_by_request(engine):
    managers = engine.scheduler._blocks._managers.values()
    (manager,) = managers
    return {name: blocks for name, blocks in manager.req_to_blocks.items() if blocks}


def test_eviction_without_free_blocks_waits(small):
    """Five samples share a whole prompt and nearly the whole pool."""
    limits = Limits(decode_budget=300, decode_policy="r-kv", evict_every=16)
    sizes = SIZES | {"enable_prefix_caching": True, "max_num_seqs": 8, "max_model_len": 512}
    sizes |= {"kv_cache_memory_bytes": small.blocks_bytes(17, 32)}
    with small_engine(small, budget=256, parameters=WINDOW, limits=limits, **sizes) as engine:
        (alone,) = engine.answers([ids_of(256)], greedy(100))
        before = engine.waits
        (several,) = engine.outputs([ids_of(256)], greedy(100, n=5, temperature=1.0, min_p=1.0))
        assert [list(one.token_ids) for one in several.outputs] == [alone] * 5
        assert engine.waits > before
        engine.require_empty()


def test_blocks_computed_after_a_compression_are_not_reused(tmp_path):
    """In layers with a window, too, whose blocks hold what comes out of compressed layers."""
    small, ids = FamilyModel(tmp_path, "gemma3_text"), ids_of(416)
    sizes = {"block_size": 16, "enable_prefix_caching": True, "max_num_batched_tokens": 150}
    whole = greedy(4, logprobs=3, extra_args={"snapkv_budget": 0})
    with small_engine(small, budget=64, **sizes) as engine:
        (exact,) = engine.outputs([ids], whole)
        engine.llm.reset_prefix_cache()
        engine.answers([ids], greedy(4))
        for _ in range(2):
            (again,) = engine.outputs([ids], whole)
            found = [again.outputs[0].logprobs, exact.outputs[0].logprobs]
            ours, expected = ([one.logprob for step in of for one in step.values()] for of in found)
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


def require_promise(engine):
    for name, request in engine.scheduler.requests.items():
        most = engine.scheduler._plans[name].max_held(request.num_tokens + 1)
        blocks = blocks_by_request(engine).get(name, ())
        assert len(blocks) <= -(-most // engine.block_tokens)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_aborted_requests_leave_no_state(small, seed):
    """Limits of their own, in a pool that is too small for all."""
    draw = random.Random(seed)
    limits = Limits(decode_budget=200, evict_every=16)
    sizes = SIZES | {"kv_cache_memory_bytes": small.blocks_bytes(13, 32), "max_model_len": 384}
    with small_engine(small, budget=64, parameters=WINDOW, limits=limits, **sizes) as engine:
        for _ in range(60):
            own = {"snapkv_budget": draw.choice([32, 64, 100])}
            own |= draw.choice([{}, {"snapkv_decode_budget": draw.choice([128, 199])}])
            ids = ids_of(draw.randrange(1, 230), seed=draw.randrange(10**6))
            engine.start([ids], greedy(draw.randrange(1, 150), extra_args=own))
            for _ in range(draw.randrange(12)):
                engine.step()
                require_promise(engine)
            if draw.random() < 0.2 and engine.scheduler.requests:
                engine.abort_all()
        while engine.scheduler.requests:
            engine.step()
            require_promise(engine)
        engine.require_empty()
