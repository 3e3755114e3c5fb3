"""The planner's numbers equal measured memory and published arithmetic."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers.cache_utils import DynamicCache

from snapkv import BudgetTooSmallError, CompressedCache, FullCache, KVCodes, SnapKV
from snapkv.errors import InvalidArgumentError, InvalidTypeError
from snapkv_app.footprints import find_footprint
from snapkv_app.plan import Request, footprint_of, plan
from snapkv_app.plan.advice import footprint_of_loaded
from snapkv_app.plan.costs import Costs
from snapkv_app.plan.planner import LAYER_MS, batch_of_speedup, gpu_step_ms
from snapkv_app.plan.shapes import SHAPES
from tests.families import FAMILIES, IMPLEMENTATIONS, random_ids, read, tiny_model

ROOT = Path(__file__).parents[4]
GIB = 2**30


def planned(footprint, **request):
    return plan("m", footprint, Request(**request))


def shaped(shape, **request):
    return planned(SHAPES[shape].footprint(), **request)


def costs_of(made):
    """The arithmetic behind a plan."""
    return Costs(footprint=made.footprint, request=made.request)


def held_bytes(model, ids, policy):
    return read(model, policy, ids).report()["held_bytes"]


def test_planned_peak_of_the_prefill_equals_the_measured_one():
    """The rows of `python -m snapkv_lab.experiments speed` were measured on the process."""
    lines = (ROOT / "docs/results/speed.jsonl").read_text().splitlines()
    rows = {
        row["cache"]: row for row in map(json.loads, lines) if row["benchmark"] == "peak memory"
    }
    row = rows["snapkv"]
    made = planned(
        find_footprint("demo"), context_tokens=row["prompt_tokens"], budget=row["budget"]
    )
    for needs, name in ((made.full, "transformers"), (made.compressed, "snapkv")):
        measured = rows[name]["peak_growth_bytes"]
        assert needs.prefill_peak_bytes == pytest.approx(measured, rel=0.03), name


@pytest.mark.parametrize("family", FAMILIES)
def test_cache_of_every_family_has_the_planned_bytes(family, tmp_path):
    """Grouped heads, sliding windows, latent attention, mixtures."""
    model = tiny_model(family, IMPLEMENTATIONS[family][0])
    model.save_pretrained(tmp_path)
    footprint = find_footprint(str(tmp_path))
    made = planned(footprint, context_tokens=100, batch=2, budget=40, window_size=8)
    ids = random_ids(2, 100)
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}
    assert made.footprint.weights_bytes == sum(tensors.values())
    assert made.full.cache_bytes == held_bytes(model, ids, FullCache())
    assert made.compressed.cache_bytes == held_bytes(model, ids, SnapKV(40, window_size=8))
    made = planned(footprint, context_tokens=100, batch=2, keep_ratio=0.4, window_size=16)
    policy = SnapKV(keep_ratio=0.4, window_size=16)
    assert made.compressed.cache_bytes == held_bytes(model, ids, policy)


CODES = {
    33: "int8",
    90: "int4",
    "45%": "k8v4",
    "14kB": KVCodes(4, 8, group_size=64),
    "70%": "int8",
}


@pytest.mark.parametrize(("budget", "bits"), CODES.items(), ids=str)
def test_quantized_cache_has_the_planned_bytes_after_an_answer(budget, bits):
    """Scales and answer tokens that fill no block yet count with the bytes of their tensors."""
    model = tiny_model("qwen3")
    footprint = footprint_of_loaded(model)
    asked = {"context_tokens": 100, "budget": budget, "window_size": 8, "bits": bits}
    cache = CompressedCache(model, SnapKV(budget, window_size=8), quantize=KVCodes.of(bits))
    ids = random_ids(1, 200)
    with torch.inference_mode():
        try:
            model(ids[:, :100], past_key_values=cache, logits_to_keep=1)
        except BudgetTooSmallError as error:
            with pytest.raises(BudgetTooSmallError, match=re.escape(str(error)[:50])):
                planned(footprint, **asked)
            return
        made = planned(footprint, **asked)
        assert made.compressed.cache_bytes == cache.report().held_bytes
        assert made.kept_tokens == cache.report().kept_tokens
        for place in range(100, 200):
            model(ids[:, place : place + 1], past_key_values=cache)
            new = place + 1 - 100
            assert costs_of(made).cache(100, new, compressed=True) == cache.report().held_bytes, new
            if new % 33 == 0:
                until = Request(**asked, new_tokens=new)
                costs = Costs(footprint=footprint, request=until)
                assert costs.answering(100, compressed=True) >= in_memory(cache)


def test_planned_tokens_for_a_share_of_bytes_equal_a_worked_example():
    """A quarter of the bytes of 1,000 tokens is planned in 16 bits and in blocks of int4."""
    made = shaped("llama-3.1-8b", context_tokens=1000, budget="25%")
    assert made.kept_tokens == 250
    assert made.compressed.cache_bytes * 4 == made.full.cache_bytes
    made = shaped("llama-3.1-8b", context_tokens=1000, budget="25%", bits="int4")
    block = 8 * 2 * (32 * 128 // 2 + 4 * 128)  # heads, keys and values, codes, scales
    per_layer, layers = 250 * 4096, 32
    blocks = layers * per_layer // block
    assert made.kept_tokens == 32 * blocks / layers
    assert made.compressed.cache_bytes == blocks * block


def in_memory(cache):
    """Bytes of the memory behind keys and values, whatever of it they show."""
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def answered(model, cache, new_tokens):
    ids = random_ids(1, 100 + new_tokens)
    with torch.inference_mode():
        model(ids[:, :100], past_key_values=cache, logits_to_keep=1)
        after_prompt = in_memory(cache)
        for place in range(100, 100 + new_tokens):
            model(ids[:, place : place + 1], past_key_values=cache)
    return after_prompt, in_memory(cache)


@pytest.mark.parametrize(
    ("family", "new_tokens"), [("llama", 1), ("llama", 66), ("gemma3_text", 65), ("gpt_oss", 66)]
)
def test_memory_equals_the_plan_with_spare_slots_and_windows(family, new_tokens):
    """The memory of the tensors is counted while a prompt is read in one pass and answered."""
    model = tiny_model(family, "eager")
    footprint = footprint_of_loaded(model)
    made = planned(footprint, context_tokens=100, budget=40, window_size=8, new_tokens=new_tokens)
    compressed = CompressedCache(model, SnapKV(40, window_size=8))
    read, answered_ = answered(model, compressed, new_tokens)
    assert read == made.compressed.cache_bytes
    assert answered_ == costs_of(made).answering(100, compressed=True)
    read, answered_ = answered(model, DynamicCache(config=model.config), new_tokens)
    assert answered_ == costs_of(made).answering(100, compressed=False)
    activations = max(made.footprint.mlp_token_bytes, made.footprint.attention_token_bytes) * 100
    assert made.full.prefill_peak_bytes == read + activations


@pytest.mark.parametrize(
    ("shape", "tokens", "memory"), [("smollm2-135m", 8192, 4), ("gemma-3-12b", 131072, 80)]
)
@pytest.mark.parametrize("spare", [0, 500])
def test_too_few_positions_are_not_reported_as_too_little_memory(shape, tokens, memory, spare):
    """A prompt that needs more positions than there are may fit the memory all the same."""
    made = shaped(shape, context_tokens=tokens - spare, memory_bytes=memory * 10**9)
    sentences = " ".join(made.verdict)
    assert "do not fit" not in sentences
    assert "does not fit" not in sentences
    assert ("it will be refused. Shorten the prompt to" in sentences) == (spare < 128)
    assert made.compressed.fits_in_one_pass


@pytest.mark.parametrize("memory", [16, 24, 80])
def test_verdict_about_passes_agrees_with_the_numbers(memory):
    made = shaped("llama-3.1-8b", context_tokens=120_000, memory_bytes=memory * 10**9 + 10**9)
    sentences = " ".join(made.verdict)
    in_one = costs_of(made).total(120_000, 1, True, in_pieces=False) <= memory * 10**9
    in_pieces = costs_of(made).total(120_000, 1, True, in_pieces=True) <= memory * 10**9
    assert ("read them in pieces" in sentences) == (in_pieces and not in_one)
    assert ("does not fit in the memory" in sentences) == (not in_pieces and not in_one)
    assert (made.compressed.longest_prompt_tokens >= 120_000) == in_one
    assert (made.compressed.largest_batch >= 1) == in_pieces


def test_more_prompts_can_be_answered_together_than_read_together():
    made = shaped("qwen3-8b", context_tokens=32768, memory_bytes=80 * 10**9)
    room, one = 79 * 10**9, costs_of(made).answering(32768, compressed=True)
    batch = made.compressed.largest_decoding_batch
    assert made.footprint.weights_bytes + batch * one <= room
    assert made.footprint.weights_bytes + (batch + 1) * one > room
    assert batch > made.compressed.largest_batch


def test_weights_of_an_unknown_quantization_are_reported():
    shape = SHAPES["qwen3-0.6b"]
    quantized = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    settings = {"dtype": "bfloat16", "model_type": shape.family, **shape.config, **quantized}
    made = planned(footprint_of(settings, parameters=shape.parameters), context_tokens=4096)
    assert made.footprint.weights_bytes == 2 * 596_049_920
    assert any("quantized (gptq); they are counted in bfloat16" in s for s in made.verdict)


def test_plan_agrees_with_published_arithmetic_for_a_7b_model():
    """Thousands are decimal there, gigabytes binary, keys and values of 16 bits."""
    for thousands, gib in ((16, 7.8), (380, 185.5)):
        made = shaped("lwm-7b", context_tokens=1000 * thousands)
        assert made.full.cache_bytes / GIB == pytest.approx(gib, abs=0.06)
        assert made.compressed.cache_bytes / GIB == 0.5


def test_batch_reads_more_experts_than_one_token():
    footprint = SHAPES["mixtral-8x7b"].footprint()
    assert footprint.read_bytes(1) / 2e9 == pytest.approx(12.9 - 0.13, rel=0.01)
    whole = footprint.weights_bytes - footprint.embedding_bytes
    assert footprint.read_bytes(1) < footprint.read_bytes(4) < whole
    assert footprint.read_bytes(100) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("compressed", [False, True])
def test_longest_prompt_and_largest_batch_fit_and_one_more_does_not(compressed):
    room = 39 * 10**9  # less than what all positions take
    made = shaped("lwm-7b", context_tokens=32768, batch=2, memory_bytes=room + 10**9)
    needs = made.compressed if compressed else made.full
    names = ("longest_prompt_tokens", "longest_prompt_in_pieces_tokens")
    for in_pieces in (False, True):
        longest = getattr(needs, names[in_pieces])
        assert costs_of(made).total(longest, 2, compressed, in_pieces=in_pieces) <= room
        assert costs_of(made).total(longest + 1, 2, compressed, in_pieces=in_pieces) > room
    batch = needs.largest_batch
    assert costs_of(made).total(32768, batch, compressed, in_pieces=True) <= room
    assert costs_of(made).total(32768, batch + 1, compressed, in_pieces=True) > room


def test_speedup_is_the_ratio_of_the_bytes_read():
    """W + B * full over W + B * kept; the embedding is not read."""
    made = shaped("lwm-7b", context_tokens=8192, batch=4, new_tokens=8, bandwidth_bytes=1e12)
    weights = made.footprint.weights_bytes - 32000 * 4096 * 2
    full, kept = (weights + 4 * 524288 * tokens for tokens in (8200, 1032))
    assert made.decode_speedup == pytest.approx(full / kept)
    launches = LAYER_MS * 32
    assert made.compressed.step_ms == pytest.approx(kept / 1e9 + launches)


@pytest.mark.parametrize(
    ("shape", "request_", "said"),
    [
        ("lwm-7b", {"context_tokens": 900}, "nothing is dropped"),
        ("qwen2.5-7b", {"context_tokens": 2048}, "will hardly help"),
        ("lwm-7b", {"context_tokens": 65536, "new_tokens": 2048}, "Compression helps"),
        ("lwm-7b", {"context_tokens": 32768, "new_tokens": 8}, "takes as long as before, about"),
        ("lwm-7b", {"context_tokens": 131072, "memory_bytes": 80 * 10**9}, "what makes this fit"),
        ("lwm-7b", {"context_tokens": 800_000, "memory_bytes": 80 * 10**9}, "layer_by_layer"),
        ("lwm-7b", {"context_tokens": 9000, "memory_bytes": 10**10}, "does not fit in the memory"),
        ("lwm-7b", {"context_tokens": 2**21}, "it will be refused"),
        ("gemma-3-27b", {"context_tokens": 2**16, "memory_bytes": 80 * 10**9}, "in one pass:"),
        ("mixtral-8x7b", {"context_tokens": 65536}, "2 of 8 experts"),
        ("gemma-3-12b", {"context_tokens": 65536}, "8 of 48 layers grow"),
    ],
)
def test_verdict_contains_the_expected_sentence(shape, request_, said):
    sentences = shaped(shape, **request_).verdict
    assert any(said in sentence for sentence in sentences), sentences
    assert said in sentences[0] or said[0].islower() or said[0].isdigit()


def test_verdict_names_a_batch_that_gains_if_one_row_does_not():
    rows = [shaped("llama-3.1-8b", context_tokens=16384, batch=batch) for batch in (1, 8, 9)]
    assert [batch_of_speedup(costs_of(made), 1.5) for made in rows] == [9, 9, 9]
    said = ["A batch of 9 comes 1.5 times as fast" in " ".join(made.verdict) for made in rows]
    assert said == [True, True, False]
    times = "a token takes about 11.2 ms, compressed 10.5, of which 5.4 are launches"
    assert times in " ".join(rows[0].verdict)


def test_planned_step_takes_as_long_as_measured_on_a_gpu():
    """One row and sixteen on an H100, as the committed rows have it."""
    text = (ROOT / "docs/results/gpu.jsonl").read_text("utf-8")
    rows = [row for row in map(json.loads, text.splitlines()) if row.get("part") == "token"]
    measured = [row for row in rows if row["cache"] == "snapkv" and row["batch"] <= 16]
    measured = [row for row in measured if "H100" in row["device"]]
    assert {row["batch"] for row in measured} == {1, 16}
    for row in measured:
        made = shaped("llama-3.1-8b", context_tokens=row["length"])
        step = gpu_step_ms(costs_of(made), row["batch"], compressed=True)
        assert step == pytest.approx(row["ms_per_token"]["p50"], rel=0.15), row["text"]


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (
            {"context_tokens": 0},
            InvalidArgumentError,
            "context_tokens: expected a value of at least 1",
        ),
        ({"context_tokens": 9.5}, InvalidTypeError, "context_tokens: expected an integer"),
        ({"context_tokens": 9, "batch": 0}, InvalidArgumentError, "batch"),
        ({"context_tokens": 9, "budget": 32}, InvalidArgumentError, "budget"),
        ({"context_tokens": 9, "budget": 64, "keep_ratio": 0.5}, InvalidArgumentError, "one of"),
        ({"context_tokens": 9, "memory_bytes": 10**9}, InvalidArgumentError, "gpu_memory"),
        (
            {"context_tokens": 9, "budget": "auto"},
            InvalidArgumentError,
            "budget: expected a number of tokens",
        ),
        ({"context_tokens": 9, "bits": "int5"}, InvalidArgumentError, "quantize"),
    ],
)
def test_invalid_request_is_refused(request_, error, message):
    with pytest.raises(error, match=message):
        Request(**request_)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("memory", [24, 80, 640])
def test_verdict_explains_a_shorter_prompt_in_pieces(shape, memory):
    """The largest batch fits with the prefill that needs less memory."""
    if 2 * SHAPES[shape].parameters > (memory - 1) * 10**9:
        return
    made = shaped(shape, context_tokens=4096, memory_bytes=memory * 10**9)
    one_pass = made.compressed.longest_prompt_tokens
    in_pieces = made.compressed.longest_prompt_in_pieces_tokens
    explained = any("Read the prompts in one pass" in each for each in made.verdict)
    assert explained == (in_pieces < one_pass)
    if made.compressed.fits_in_one_pass:
        assert made.compressed.largest_batch >= 1
    costs, batch = costs_of(made), made.compressed.largest_batch
    room = (memory - 1) * 10**9
    assert costs.least_total(4096, max(batch, 1), True) <= room or not batch
    assert costs.least_total(4096, batch + 1, True) > room
