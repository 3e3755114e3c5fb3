"""Errors about memory name a size that fits, before any weights are read or downloaded."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from snapkv.errors import OutOfMemoryError, UnsupportedModelError
from snapkv.hf import device_memory
from snapkv.hf.device_memory import free_bytes, out_of_memory_explained
from snapkv_app.models import load
from snapkv_app.plan.advice import footprint_of_loaded, prompt_advice, prompt_bytes, require_memory
from tests.families import random_ids, tiny_model
from tests.plan.outlines import outline

GIB, MIB, KIB = 2**30, 2**20, 2**10
CPU = torch.device("cpu")
ENORMOUS = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 65536,
    "intermediate_size": 262144,
    "num_hidden_layers": 64,
    "num_attention_heads": 512,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
"""The configuration of a model of eight terabytes."""


@pytest.fixture
def memory(monkeypatch):
    def set_bytes(count):
        monkeypatch.setattr(device_memory, "total_bytes", lambda device: count)

    return set_bytes


@pytest.mark.parametrize(
    ("dtype", "total", "said"),
    [
        (torch.float32, 20 * GIB, "With dtype bfloat16 they would fit. Choose"),
        (torch.bfloat16, 13 * GIB, "Qwen/Qwen3-4B would fit, with 7.5 GiB in bfloat16. Choose"),
        (torch.float32, 2 * GIB, "Qwen/Qwen3-0.6B would fit, with 1.1 GiB in bfloat16. Choose"),
        (torch.bfloat16, GIB // 8, "so the model was not loaded. Choose a smaller model"),
    ],
)
def test_error_names_a_size_that_would_fit(memory, dtype, total, said):
    memory(total)
    model = outline("llama-3.1-8b", dtype=dtype)
    takes = "15.0 GiB" if dtype == torch.bfloat16 else "29.9 GiB"
    with pytest.raises(OutOfMemoryError, match=f"the weights of it take {takes} in") as raised:
        require_memory("it", model, CPU)
    assert said in str(raised.value)


def test_weights_that_fit_exactly_or_have_unknown_size_pass(memory):
    model = outline("smollm2-135m", dtype=torch.float32)
    needed = 4 * sum(parameter.numel() for parameter in model.parameters())
    for total in (needed, None):
        memory(total)
        require_memory("it", model, CPU)
    memory(needed - 1)
    with pytest.raises(OutOfMemoryError):
        require_memory("it", model, CPU)
    model.config.quantization_config = {"quant_method": "gptq"}
    require_memory("it", model, CPU)  # its bytes are not counted


def test_total_memory_exceeds_the_free_memory():
    assert device_memory.free_bytes(CPU) <= device_memory.total_bytes(CPU)
    assert device_memory.total_bytes(torch.device("meta")) is None


def test_too_large_model_is_refused_by_its_configuration(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(ENORMOUS))
    with pytest.raises(
        OutOfMemoryError, match=r"more than the memory of cpu .*, so the model was not loaded"
    ):
        load(str(tmp_path), device="cpu")


# Prompts.


@pytest.mark.parametrize(
    ("attention", "prompt_tokens", "free", "fits"),
    [
        ("sdpa", 400, 400 * KIB, True),
        ("sdpa", 400, 40 * MIB, False),
        ("sdpa", 100_000, 40 * MIB, False),  # more than the model has positions
        ("sdpa", 400, None, False),
        ("eager", 400, 3 * MIB, True),
        ("eager", 400, 0, False),
    ],
)
def test_suggested_prompt_length_fits_and_is_shorter(attention, prompt_tokens, free, fits):
    model = tiny_model("llama", attention)
    footprint, message = footprint_of_loaded(model), prompt_advice(model, prompt_tokens, free)
    found = re.search(r"about ([\d,]+) tokens would fit", message)
    assert (found is not None) == fits
    assert ("Choose sdpa attention" in message) == (attention == "eager")
    if found:
        tokens = int(found[1].replace(",", ""))
        assert tokens < prompt_tokens
        assert prompt_bytes(model, footprint, tokens) <= free
        assert prompt_bytes(model, footprint, tokens + 2) > free


def test_eager_attention_needs_a_score_and_a_probability_per_pair():
    models = [tiny_model("llama", attention) for attention in ("sdpa", "eager")]
    linear, eager = (prompt_bytes(each, footprint_of_loaded(each), 1000) for each in models)
    assert eager - linear == 8 * 1000 * 1000 * (4 + 4)


def test_a_limit_on_the_address_space_counts_as_memory(monkeypatch):
    resource = pytest.importorskip("resource")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 50 * MIB
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert free_bytes(CPU) <= 51 * MIB
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1, 1))
    assert free_bytes(CPU) == 0


@pytest.mark.parametrize(
    ("error", "taken"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("shapes differ"), False),
        (OSError(32, "Broken pipe"), False),
    ],
)
def test_only_memory_errors_become_out_of_memory_errors(error, taken):
    kind = OutOfMemoryError if taken else type(error)
    with pytest.raises(kind) as raised, out_of_memory_explained(lambda: "why"):
        raise error
    assert str(raised.value) == ("why" if taken else str(error))


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "deepseek_v3"])
def test_advice_counts_windows_latents_and_spare_slots_as_stored(family):
    model = tiny_model(family, "eager")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(random_ids(1, 300), past_key_values=cache)
    sliding, full = {}, {}
    for index, layer in enumerate(cache.layers):
        held = full if type(layer) is DynamicLayer else sliding
        held[index] = (layer.keys.nbytes + layer.values.nbytes) // layer.keys.shape[2]
    footprint = footprint_of_loaded(model)
    assert footprint.token_bytes == sum(full.values())
    fixed = prompt_bytes(model, footprint, 0) + footprint.sliding_bytes(300)
    assert fixed == 64 * sum(full.values()) + 23 * sum(sliding.values())
    assert "a full cache would take" in prompt_advice(model, 300, None)


def test_advice_for_an_unknown_model_has_no_numbers(monkeypatch):
    def fail(*args, **options):
        raise UnsupportedModelError("model: looks at its data")

    monkeypatch.setattr("snapkv_app.plan.advice.footprint_of_loaded", fail)
    said = prompt_advice(tiny_model("llama"), 4000, 10**6)
    assert "do not fit in the memory of cpu. Shorten the prompt" in said
