"""Model families on a CUDA device: sdpa, eager and flash attention in 16-bit and 32-bit floats."""

import copy
import gc

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.utils import is_flash_attn_2_available

from snapkv import AdaKV, CompressedCache, FullCache, SnapKV
from snapkv.hf import append_buffers
from tests.families import IMPLEMENTATIONS, random_ids, read, tiny_model
from tests.ops.coded_cases import require_encoding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPT, BUDGET = 300, 96
POLICY = SnapKV(BUDGET, window_size=16)
FAMILIES = ("llama", "qwen3", "gemma3_text", "phi3", "olmo2")

flash = pytest.param(
    "flash_attention_2",
    marks=pytest.mark.skipif(
        not is_flash_attn_2_available(), reason="needs the package flash-attn"
    ),
)


def on_cuda(family, implementation, dtype):
    """Return a copy of the tiny model of a family on the device with the given attention."""
    model = copy.deepcopy(tiny_model(family, IMPLEMENTATIONS[family][-1]))
    model.set_attn_implementation(implementation)
    return model.to("cuda", dtype)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("implementation", ["sdpa", flash])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_low_precision_keeps_nearly_same_positions_as_eager(family, implementation, dtype, padded):
    ids = random_ids(2, PROMPT).cuda()
    mask = torch.ones_like(ids)
    mask[1, : 120 if padded else 0] = 0
    caches = [
        read(on_cuda(family, name, dtype), POLICY, ids, mask) for name in (implementation, "eager")
    ]
    for layer in caches[0].compressed_layers:
        ours, theirs = (cache.kept_positions(layer) for cache in caches)
        assert torch.isin(ours[0], theirs[0]).float().mean() > 0.8, "more than rounding explains"


def test_cuda_kernel_encodes_same_codes_as_torch():
    require_encoding("cuda")


@pytest.mark.parametrize("family", FAMILIES)
def test_recall_over_turns_keeps_same_positions_as_fresh_compression(family):
    """Copies run in a separate stream; restored tokens must be complete before they are read."""
    model = on_cuda(family, "sdpa", torch.float32)
    turns = [random_ids(2, PROMPT).cuda(), random_ids(2, 40, seed=1).cuda()]
    cache = CompressedCache(model, POLICY, recall="host")
    with torch.no_grad():
        for ids in turns:
            cache.expect_prompt(cache.get_seq_length() + ids.shape[1])
            model(ids, past_key_values=cache)
    fresh = read(model, POLICY, torch.cat(turns, dim=1))
    for layer in fresh.compressed_layers:
        assert torch.equal(cache.kept_positions(layer), fresh.kept_positions(layer))
        assert cache.layers[layer].offloaded.pieces[0].stored.tensors[0].is_pinned()


@pytest.mark.parametrize("going_on", [{}, {"recall": "host"}], ids=["", "recall"])
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("policy", [POLICY, AdaKV(POLICY)], ids=["even", "uneven"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_captured_steps_give_same_tokens_as_eager_steps(family, policy, quantize, going_on):
    model = on_cuda(family, "sdpa", torch.float32)
    made = going_on | {"quantize": quantize}
    cache = CompressedCache(model, policy, **made)
    for rows, tokens in ((2, PROMPT), (2, 50), (1, 200)):
        ids = random_ids(rows, tokens).cuda()
        options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
        cache.reset()
        got = model.generate(ids, past_key_values=cache, **options)
        eager = CompressedCache(model, policy, **made)
        options["disable_compile"] = True
        assert torch.equal(model.generate(ids, past_key_values=eager, **options), got)
        assert cache.report()["steps"] == "one graph"


@pytest.mark.parametrize("made", [{}, {"turns": "compress"}, {"quantize": "int8"}], ids=str)
@pytest.mark.parametrize(
    "policy", [POLICY, AdaKV(POLICY), FullCache()], ids=["even", "uneven", "full"]
)
@pytest.mark.parametrize("first_tokens", [256, 8])
def test_captured_drafts_give_same_tokens_as_eager_drafts(policy, made, first_tokens, monkeypatch):
    monkeypatch.setattr(append_buffers, "FIRST_TOKENS", first_tokens)
    model, ids = on_cuda("llama", "sdpa", torch.float32), (random_ids(1, PROMPT) % 9 + 3).cuda()
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    for drafts in ({"prompt_lookup_num_tokens": 6}, {"prompt_lookup_num_tokens": 12}):
        caches, answers = [], []
        for more in ({}, {"disable_compile": True}):
            caches.append(cache := CompressedCache(model, policy, **made))
            options |= {"max_matching_ngram_size": 1, **drafts}
            answers.append(model.generate(ids, past_key_values=cache, **options, **more))
        assert torch.equal(*answers)
        assert "graph" in caches[0].report()["steps"]
        for layer in caches[0].compressed_layers:
            assert torch.equal(*(cache.kept_positions(layer) for cache in caches))


class Asking(LlamaRMSNorm):
    """A norm that reads a number, which is detected before capture begins."""

    def forward(self, states):
        return super().forward(states * float(states.abs().max() > 0))


class Waiting(LlamaRMSNorm):
    """A norm that waits for the device, which makes capture fail."""

    def forward(self, states):
        torch.cuda.synchronize()
        return super().forward(states)


@pytest.mark.parametrize("norm", [Asking, Waiting])
def test_step_that_cannot_be_captured_runs_eagerly_and_leaves_device_usable(norm):
    ids, said = random_ids(1, PROMPT).cuda(), []
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    answers = []
    for kind in (LlamaRMSNorm, norm, LlamaRMSNorm):
        model = on_cuda("llama", "sdpa", torch.float32)
        model.model.norm.__class__ = kind
        cache = CompressedCache(model, POLICY)
        answers.append(model.generate(ids, past_key_values=cache, **options))
        said.append(cache.report()["steps"].partition(":")[0])
        assert torch.randn(3, device="cuda").isfinite().all()
    assert said == ["one graph", "eager", "one graph"]
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


def test_a_hundred_prompts_leak_no_device_memory():
    """A graph is freed with the call that captured it."""
    model, ids = on_cuda("llama", "sdpa", torch.bfloat16), random_ids(1, 120).cuda()
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    held = []
    for _ in range(4):
        for _ in range(2):
            cache = CompressedCache(model, POLICY)
            for _ in range(12):
                cache.reset()
                model.generate(ids, past_key_values=cache, **options)
            assert cache.report()["steps"] == "one graph"
            del cache
        gc.collect()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert max(held[1:]) <= held[0]


def test_peak_memory_of_prefill_is_no_higher_than_with_full_cache():
    """Each layer frees its evicted tokens before the next layer is read."""
    model, ids = on_cuda("llama", "sdpa", torch.bfloat16), random_ids(1, 400).cuda()
    peaks = []
    for policy in (FullCache(), SnapKV(64, window_size=16)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        cache = read(model, policy, ids)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        held = cache.report().held_bytes
        del cache
    assert peaks[1] <= peaks[0] * 1.05
    assert held < peaks[0]


def test_captured_steps_match_eager_steps_after_append_buffer_is_full(monkeypatch):
    monkeypatch.setattr(append_buffers, "FIRST_TOKENS", 8)
    model, ids = on_cuda("llama", "sdpa", torch.float32), random_ids(2, PROMPT).cuda()
    options = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0}
    answers = []
    for disable_compile in (False, True):
        cache = CompressedCache(model, POLICY)
        answers.append(
            model.generate(ids, past_key_values=cache, disable_compile=disable_compile, **options)
        )
    assert torch.equal(*answers)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_steps_of_model_on_second_device_are_captured_there():
    model, ids = on_cuda("llama", "sdpa", torch.float32).to("cuda:1"), random_ids(2, PROMPT)
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    answers = []
    for disable_compile in (False, True):
        cache = CompressedCache(model, POLICY)
        options |= {"past_key_values": cache, "disable_compile": disable_compile}
        answers.append(model.generate(ids.to("cuda:1"), **options))
        assert cache.report()["steps"] == (None if disable_compile else "one graph")
    assert torch.equal(*answers)
