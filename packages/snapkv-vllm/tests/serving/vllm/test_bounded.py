"""Requests with a budget for their answers evict tokens while they generate."""

import pytest
import torch

from snapkv import RKV, TOVA, PromptThenDecode, SnapKV, StreamingLLM
from snapkv_vllm import Limits
from tests.serving.vllm.engines import greedy, small_engine
from tests.serving.vllm.models import SmallModel, ids_of

WINDOW = {"window_size": 8}
SIZES = {"max_model_len": 4096, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 50 << 20}


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "deepseek_v3"])
def test_other_models_keep_answers_within_the_budget_as_the_library_does(tmp_path, family):
    small, policy = SmallModel(tmp_path, family), SnapKV(64)
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
    """The budgets of library and plugin are set so that both evict the same tokens."""
    every, policy = DECODING[name]
    limits = Limits(decode_budget=80 + every, decode_policy=name, evict_every=every)
    library = PromptThenDecode(prompt=SnapKV(64, **WINDOW), decode=policy)
    prompts = [ids_of(tokens, seed=tokens) for tokens in (40, 150, 333)]
    with small_engine(small, budget=64, parameters=WINDOW, limits=limits, **SIZES) as engine:
        answers = engine.answers(prompts, greedy(60))
    assert answers == [small.answer(ids, library, 60) for ids in prompts]


def test_blocks_computed_after_a_compression_are_not_reused(tmp_path):
    """Sliding-window layers count, too: their blocks depend on compressed layers."""
    small, ids = SmallModel(tmp_path, "gemma3_text"), ids_of(416)
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
