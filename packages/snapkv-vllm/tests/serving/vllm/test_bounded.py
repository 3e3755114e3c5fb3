"""Requests held to a number of tokens while they are read and while they generate."""

import random

import pytest
import torch

from snapkv import RKV, TOVA, AdaKV, CompressedCache, PromptThenDecode, SnapKV, StreamingLLM
from snapkv.prefill import chunked
from snapkv_vllm import Limits
from tests.serving.vllm.engines import greedy, small_engine
from tests.serving.vllm.families import FamilyModel
from tests.serving.vllm.models import SmallModel, generated, ids_of

WINDOW = {"window_size": 8}
SIZES = {"max_model_len": 4096, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 50 << 20}
CAP = Limits(cap=96, chunk_tokens=64)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Reads long prompts."""
    return SmallModel(tmp_path_factory.mktemp("long"), max_position_embeddings=20_000)


def kept_of(watched, seen, layers):
    """Positions in the prompt, out of what every compression kept of what was held before it."""
    held = [None] * layers
    for at in sorted(watched.kept):
        if at > seen:
            break
        for layer, kept in enumerate(watched.kept[at]):
            before = held[layer]
            if before is None:
                held[layer] = (kept, at)
                continue
            positions, last = before
            fresh = torch.arange(last, at).expand(*positions.shape[:2], -1)
            held[layer] = (torch.cat([positions, fresh], dim=-1).gather(2, kept), at)
    return [positions for positions, _ in held]


def read_in_pieces(small, ids, policy, tokens, limits=CAP):
    """The library's answer, and what it kept of the prompt in every layer."""
    cache = CompressedCache(small.model, policy)
    with chunked(small.model, cap_tokens=limits.cap, chunk_tokens=limits.chunk_tokens):
        answer = generated(small.model, ids, cache, tokens)
    kept = [cache.kept_positions(layer)[..., : policy.budget] for layer in small.compressed_layers]
    return answer, kept


@pytest.mark.parametrize(("caching", "batched"), [(False, 512), (True, 80)], ids=str)
def test_a_prompt_under_a_cap_is_read_as_by_the_library(small, caching, batched):
    """Prompts of every rest of a chunk, together and one after the other."""
    policy = SnapKV(64, **WINDOW)
    prompts = [ids_of(tokens, seed=tokens) for tokens in (100, 161, 264, 320, 328, 329, 500, 1023)]
    sizes = SIZES | {"max_num_batched_tokens": batched, "enable_prefix_caching": caching}
    sizes |= {"max_window_size": 8}  # a step has room for it
    with small_engine(small, budget=64, parameters=WINDOW, limits=CAP, **sizes) as engine:
        for ids in prompts:
            with engine.watching() as watched:
                (answer,) = engine.answers([ids], greedy(6))
            expected, kept = read_in_pieces(small, ids, policy, 6)
            assert answer == expected
            require_same(kept_of(watched, len(ids), 4), kept)
        together = engine.answers(prompts, greedy(6))
        assert together == [read_in_pieces(small, ids, policy, 6)[0] for ids in prompts]
        engine.require_empty()


def require_same(found, kept):
    for ours, library in zip(found, kept, strict=True):
        assert torch.equal(ours, library.expand_as(ours))


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "deepseek_v3"])
def test_models_of_other_kinds_are_bounded_as_by_the_library(tmp_path, family):
    """Where layers with a window cannot forget what they read, the chunks' own tokens vote."""
    small, policy = FamilyModel(tmp_path, family), SnapKV(64)
    cap = Limits(cap=96, chunk_tokens=48)
    limits = Limits(chunk_tokens=48, decode_budget=80, decode_policy="tova", evict_every=1)
    prompts = [ids_of(tokens, seed=tokens) for tokens in (70, 150, 200, 350)]
    latent = family == "deepseek_v3"
    sizes = {"max_num_batched_tokens": 150, "block_size": 16 if latent else 32}
    with small_engine(small, budget=64, limits=limits, **sizes) as engine:
        grown = engine.answers(prompts, greedy(40))
        for ids in prompts:
            with engine.watching() as watched:
                (answer,) = engine.answers([ids], greedy(6, extra_args={"snapkv_cap": 96}))
            expected, kept = read_in_pieces(small, ids, policy, 6, cap)
            assert answer == expected
            require_same(kept_of(watched, len(ids), len(kept)), kept)
    library = PromptThenDecode(prompt=policy, decode=TOVA(79))
    assert grown == [small.answer(ids, library, 40) for ids in prompts]


def test_heads_part_behind_a_prompt_under_a_cap(small):
    """All hold as many tokens until the prompt's end."""
    policy = AdaKV(SnapKV(64, **WINDOW))
    prompts = [ids_of(tokens, seed=tokens) for tokens in (100, 320, 500, 777)]
    sizes = SIZES | {"enable_prefix_caching": True, "policy": "adakv"}
    with small_engine(small, budget=64, parameters=WINDOW, limits=CAP, **sizes) as engine:
        answers = engine.answers(prompts, greedy(40))
        engine.require_empty()
    for ids, answer in zip(prompts, answers, strict=True):
        with chunked(small.model, cap_tokens=CAP.cap, chunk_tokens=CAP.chunk_tokens):
            assert answer == small.answer(ids, policy, 40)


DECODING = {
    "tova": (1, TOVA(80)),
    "streaming-llm": (1, StreamingLLM(80, positions="original")),
    "r-kv": (8, RKV(80, evict_every=8)),
}


@pytest.mark.parametrize("name", DECODING)
def test_an_answer_is_evicted_from_as_by_the_library(small, name):
    """The library's methods evict to their budget, the plugin from its own."""
    every, policy = DECODING[name]
    limits = Limits(decode_budget=80 + every, decode_policy=name, evict_every=every)
    library = PromptThenDecode(prompt=SnapKV(64, **WINDOW), decode=policy)
    prompts = [ids_of(tokens, seed=tokens) for tokens in (40, 150, 333)]
    with small_engine(small, budget=64, parameters=WINDOW, limits=limits, **SIZES) as engine:
        answers = engine.answers(prompts, greedy(60))
    assert answers == [small.answer(ids, library, 60) for ids in prompts]


def blocks_of(engine):
    managers = engine.scheduler._blocks._managers.values()
    (manager,) = managers
    return {name: blocks for name, blocks in manager.req_to_blocks.items() if blocks}


def test_a_prompt_larger_than_the_pool_is_served(small):
    """Sixteen thousand tokens in a pool of four; stock vLLM refuses to start."""
    limits = Limits(cap=1024, chunk_tokens=512, decode_budget=512, evict_every=64)
    sizes = {
        "max_model_len": 20_000,
        "max_num_batched_tokens": 1024,
        "kv_cache_memory_bytes": small.blocks_bytes(4096 // 32, 32),
    }
    ids = ids_of(16_000)
    with small_engine(small, budget=256, parameters=WINDOW, limits=limits, **sizes) as engine:
        assert engine.all_blocks * 32 <= 4096
        answers = engine.answers([ids, ids[:9000]], greedy(20))
        assert [len(answer) for answer in answers] == [20, 20]
        assert engine.free_blocks == engine.all_blocks


def test_an_eviction_that_finds_no_room_waits(small):
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


def test_what_a_cap_cannot_serve_is_refused(small):
    from vllm.exceptions import VLLMValidationError

    own = greedy(4, prompt_logprobs=1, extra_args={"snapkv_cap": 96})
    with small_engine(small, budget=64, parameters=WINDOW, limits=CAP, **SIZES) as engine:
        with pytest.raises(VLLMValidationError, match="prompt_logprobs: expected none"):
            engine.outputs([ids_of(100)], own)
        assert engine.answers([ids_of(100)], greedy(4))


def test_a_window_that_no_step_has_room_for_is_refused(small):
    """It would wait for ever; the request ends with an error, and others are answered."""
    sizes = SIZES | {"max_num_batched_tokens": 32}
    own = greedy(4, extra_args={"snapkv_cap": 96, "snapkv_window_size": 32})
    with small_engine(small, budget=64, parameters=WINDOW, **sizes) as engine:
        (refused,) = engine.outputs([ids_of(1500)], own)
        assert refused.outputs[0].finish_reason == "error"
        assert len(engine.answers([ids_of(1500)], greedy(4))[0]) == 4
        assert engine.free_blocks == engine.all_blocks


def test_what_was_read_behind_a_compression_is_nobodys_prefix(tmp_path):
    """In layers with a window, too, whose blocks hold what comes out of compressed layers."""
    small, ids = FamilyModel(tmp_path, "gemma3_text"), ids_of(416)
    sizes = {"block_size": 16, "enable_prefix_caching": True, "max_num_batched_tokens": 150}
    whole = greedy(4, logprobs=3, extra_args={"snapkv_budget": 0})
    with small_engine(small, budget=64, limits=Limits(chunk_tokens=48), **sizes) as engine:
        (exact,) = engine.outputs([ids], whole)
        engine.llm.reset_prefix_cache()
        engine.answers([ids], greedy(4, extra_args={"snapkv_cap": 96}))
        for _ in range(2):
            (again,) = engine.outputs([ids], whole)
            found = [again.outputs[0].logprobs, exact.outputs[0].logprobs]
            ours, expected = ([one.logprob for step in of for one in step.values()] for of in found)
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


def require_promise(engine):
    for name, request in engine.scheduler.requests.items():
        most = engine.scheduler._plans[name].most_held(request.num_tokens + 1)
        blocks = blocks_of(engine).get(name, ())
        assert len(blocks) <= -(-most // engine.block_tokens)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_mixed_requests_aborted_and_preempted_leave_nothing(small, seed):
    """Limits of their own, in a pool that is too small for all."""
    draw = random.Random(seed)
    limits = Limits(cap=128, chunk_tokens=64, decode_budget=200, evict_every=16)
    sizes = SIZES | {"kv_cache_memory_bytes": small.blocks_bytes(24, 32)}
    with small_engine(small, budget=64, parameters=WINDOW, limits=limits, **sizes) as engine:
        for _ in range(60):
            own = {"snapkv_budget": draw.choice([32, 64, 100])}
            own |= draw.choice([{}, {"snapkv_cap": draw.choice([100, 128])}])
            own |= draw.choice([{}, {"snapkv_decode_budget": draw.choice([128, 199])}])
            ids = ids_of(draw.randrange(1, 900), seed=draw.randrange(10**6))
            engine.start([ids], greedy(draw.randrange(1, 150), extra_args=own))
            for _ in range(draw.randrange(12)):
                engine.step()
                require_promise(engine)
            if draw.random() < 0.2 and engine.scheduler.requests:
                engine.abort_all()
        while engine.scheduler.requests:
            engine.step()
            require_promise(engine)
        assert engine.preempted
        engine.require_empty()
