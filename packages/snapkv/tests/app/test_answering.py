"""Answers: the same tokens as plain `generate`, honest timings, refusals that say both numbers."""

import copy
import json
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from snapkv import FullCache, Random, SnapKV, StreamingLLM
from snapkv.app.answering import _Stopwatch, answer
from snapkv.app.models import LoadedModel
from snapkv.app.prefills import PREFILLS
from snapkv.app.prompts import Prompt, chat_prompt, question_prompt, text_prompt
from snapkv.app.settings import GenerationSettings
from snapkv.errors import (
    InvalidArgumentError,
    OutOfMemoryError,
    PromptTooLongError,
    UnsupportedModelError,
)
from snapkv.plan import (
    free_bytes,
    out_of_memory_explained,
    prompt_advice,
    weights_bytes,
)
from snapkv.plan.advice import chunked_bytes, prompt_bytes
from snapkv.plan.footprint import footprint_of_loaded
from tests.families import random_ids, tiny_model

SHORT = GenerationSettings(max_new_tokens=6)
DOCUMENT = "The gate opens at nine. The key is under the blue stone. " * 12


@pytest.fixture(scope="module")
def prompt(demo):
    return question_prompt(
        demo.tokenizer, DOCUMENT, "Where is the key?", answer_start="The key is under the"
    )


def plain_tokens(demo, prompt, new_tokens, **options):
    ids = prompt.token_ids(demo.tokenizer)
    cache = DynamicCache(config=demo.model.config)
    output = demo.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=new_tokens,
        **options,
    )
    return output[0, ids.shape[1] :]


def test_the_full_cache_gives_the_text_of_plain_generate(demo, prompt):
    tokens = plain_tokens(demo, prompt, 6, do_sample=False)
    text = demo.tokenizer.decode(tokens, skip_special_tokens=True)
    result = answer(demo, prompt, FullCache(), SHORT)
    assert result.text == prompt.answer_start + text
    assert result.cache.held_bytes == result.cache.full_bytes


def test_a_compressed_answer_says_what_it_took(demo, prompt):
    result = answer(demo, prompt, SnapKV(48, window_size=16, kernel_size=13), SHORT)
    assert result.text == "The key is under the blue stone."
    assert result.finish_reason == "stop"
    assert result.prompt_tokens == prompt.token_ids(demo.tokenizer).shape[1]
    assert result.new_tokens == 4  # blue, stone, the full stop, the end of the turn
    assert result.kept_tokens == 48
    assert result.cache.kept_tokens == 48 + 3  # the last token is never fed back
    assert result.first_token_ms > result.token_ms > 0
    assert result.policy["name"] == "snapkv"
    assert result.policy["budget"] == 48
    assert json.loads(json.dumps(asdict(result)))["cache"]["kept_tokens"] == 51


@pytest.mark.parametrize("name", PREFILLS)
def test_kept_tokens_are_those_of_the_prompt_however_it_was_read(demo, prompt, name):
    given = {"cap_tokens": 56, "chunk_tokens": 32} if name == "chunked" else {}
    prefill = PREFILLS[name](**given)
    result = answer(demo, prompt, SnapKV(48, window_size=16), SHORT, prefill=prefill)
    assert result.kept_tokens == 48 < result.cache.kept_tokens


def test_what_was_evicted_for_the_answers_own_tokens_is_not_kept(demo, prompt):
    result = answer(demo, prompt, StreamingLLM(48), SHORT)
    assert result.kept_tokens == 48 - (result.new_tokens - 1)


def test_the_stream_is_the_answer(demo, prompt):
    pieces = []
    result = answer(demo, prompt, SnapKV(48), SHORT, on_text=pieces.append)
    assert pieces[0] == "The key is under the"
    assert len(pieces) > 2
    assert "".join(pieces) == result.text


def test_every_layer_reports_once_while_the_prompt_is_read(demo, prompt):
    events = []
    answer(
        demo,
        prompt,
        SnapKV(48),
        SHORT,
        on_text=lambda text: events.append("text"),
        on_layer=lambda layer, layers: events.append((layer, layers)),
    )
    reading = [(layer + 1, 30) for layer in range(30)]
    assert events[0] == "text"  # the start of the answer is known before anything is read
    assert events[1:31] == reading
    assert set(events[31:]) == {"text"}


def test_the_answer_ends_where_the_model_ends_it(demo):
    prompt = chat_prompt(demo.tokenizer, "Say hello.")
    result = answer(demo, prompt, FullCache(), GenerationSettings(max_new_tokens=60))
    assert result.finish_reason == "stop"
    assert result.new_tokens < 60
    assert "<|im_end|>" not in result.text
    cut = answer(demo, prompt, FullCache(), GenerationSettings(max_new_tokens=1))
    assert cut.finish_reason == "length"
    assert cut.token_ms is None


def test_sampling_follows_the_seed_and_leaves_the_callers_draws_alone(demo, prompt):
    def sample(seed):
        settings = GenerationSettings(max_new_tokens=8, temperature=1.5, seed=seed)
        return answer(demo, prompt, SnapKV(48), settings).text

    state = torch.get_rng_state()
    first, again, other = sample(1), sample(1), sample(2)
    assert first == again
    assert first != other
    assert torch.equal(torch.get_rng_state(), state)


def test_timings_are_those_of_the_tokens(demo, prompt, monkeypatch):
    clock = iter([0.0, 2.0, 2.1, 2.3, 2.6])
    fake_time = SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr("snapkv.app.answering.time", fake_time)
    result = answer(demo, prompt, FullCache(), SHORT)
    assert result.first_token_ms == pytest.approx(2000)
    assert result.token_ms == pytest.approx(200)


@pytest.mark.parametrize("new_tokens", [1, 128])
def test_a_prompt_beyond_the_models_positions_is_refused_with_both_numbers(demo, new_tokens):
    prompt = text_prompt(demo.tokenizer, "word " * 8300)
    tokens = prompt.token_ids(demo.tokenizer).shape[1]
    settings = GenerationSettings(max_new_tokens=new_tokens)
    with pytest.raises(PromptTooLongError, match=rf"8,192 .* prompt of {tokens:,} tok"):
        answer(demo, prompt, SnapKV(), settings)


def test_a_prompt_may_use_every_position(demo, monkeypatch):
    prompt = text_prompt(demo.tokenizer, "one two three")
    monkeypatch.setattr(LoadedModel, "max_tokens", 3 + 2)
    assert answer(demo, prompt, FullCache(), GenerationSettings(max_new_tokens=2)).new_tokens == 2
    with pytest.raises(PromptTooLongError):
        answer(demo, prompt, FullCache(), GenerationSettings(max_new_tokens=3))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=["cuda", "cpu-allocator", "python", "system"],
)
def test_out_of_memory_says_what_was_needed(demo, prompt, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(type(demo.model), "generate", fail)
    with pytest.raises(OutOfMemoryError) as raised:
        answer(demo, prompt, SnapKV(48), SHORT)
    message = str(raised.value)
    assert "weights of 513.1 MiB" in message
    assert "tokens would fit" not in message  # so short a prompt would, by the arithmetic
    assert "lower the budget" not in message
    assert "shorten the prompt, or choose dtype bfloat16" in message
    assert "\n" not in message


MIB = 2**20


@pytest.mark.parametrize(
    ("attention", "prompt_tokens", "free", "fits"),
    [
        ("sdpa", 4000, 40 * MIB, True),
        ("sdpa", 4000, 4000 * MIB, False),
        ("sdpa", 100_000, 1000 * MIB, False),  # more than the model has positions
        ("sdpa", 4000, 0, False),
        ("sdpa", 4000, None, False),
        ("eager", 4000, 600 * MIB, True),
        ("eager", 4000, 4000 * MIB, False),
    ],
)
def test_what_would_fit_is_less_than_what_did_not(
    demo, monkeypatch, attention, prompt_tokens, free, fits
):
    monkeypatch.setattr(demo.model.config, "_attn_implementation_internal", attention)
    message = prompt_advice(demo.model, prompt_tokens, free)
    found = re.search(r"about ([\d,]+) tokens would fit", message)
    assert (found is not None) == fits
    assert ("choose sdpa attention" in message) == (attention == "eager")
    if found:
        tokens = int(found[1].replace(",", ""))
        assert tokens < prompt_tokens
        assert tokens <= demo.max_tokens
        assert prompt_bytes(demo.model, footprint_of_loaded(demo.model), tokens) <= free
        assert prompt_bytes(demo.model, footprint_of_loaded(demo.model), tokens + 2) > free


def test_eager_attention_needs_a_score_and_a_probability_per_pair(demo, monkeypatch):
    footprint = footprint_of_loaded(demo.model)
    linear = prompt_bytes(demo.model, footprint, 1000)
    monkeypatch.setattr(demo.model.config, "_attn_implementation_internal", "eager")
    assert prompt_bytes(demo.model, footprint, 1000) - linear == 9 * 1000 * 1000 * (4 + 4)


def test_a_limit_on_the_address_space_counts_as_memory(monkeypatch):
    resource = pytest.importorskip("resource")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 50 * MIB
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert free_bytes(torch.device("cpu")) <= 51 * MIB
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1, 1))
    assert free_bytes(torch.device("cpu")) == 0


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), OSError(32, "Broken pipe")])
def test_other_failures_are_not_taken_for_memory(error):
    with pytest.raises(type(error), match=r"differ|Broken"), out_of_memory_explained(lambda: ""):
        raise error


def test_the_arithmetic_is_that_of_the_tensors(demo, prompt):
    result = answer(demo, prompt, FullCache(), SHORT)
    per_token = footprint_of_loaded(demo.model).token_bytes
    assert result.cache.full_bytes == per_token * result.cache.seen_tokens
    assert weights_bytes(demo.model) == sum(p.numel() for p in demo.model.parameters()) * 4


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "deepseek_v3"])
def test_advice_counts_windows_latents_and_room_as_they_are_stored(family):
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
    more = chunked_bytes(footprint, 50, 401) - chunked_bytes(footprint, 50, 400)
    assert more == sum(full.values()) + 50  # and a bool of the mask for each token of a piece
    fixed = chunked_bytes(footprint, 0, 0)
    assert fixed == 64 * sum(full.values()) + 23 * sum(sliding.values())
    assert "a full cache would hold" in prompt_advice(model, 300, None)


def test_a_model_that_cannot_be_outlined_is_advised_without_numbers(monkeypatch):
    def fail(*args, **options):
        raise UnsupportedModelError("model: looks at its data")

    monkeypatch.setattr("snapkv.plan.advice.footprint_of_loaded", fail)
    said = prompt_advice(tiny_model("llama"), 4000, 10**6)
    assert said == (
        "prompt: expected 4,000 tokens to fit in the memory of cpu, got out of memory; shorten the "
        "prompt, or choose dtype bfloat16 or a smaller model"
    )


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("tokens", [5, 90])
def test_a_full_cache_holds_the_last_tokens_only_where_attention_slides(family, tokens):
    model = tiny_model(family)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(random_ids(1, tokens), past_key_values=cache)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert footprint_of_loaded(model).cache_bytes(tokens, tokens) == held


def test_a_model_without_end_or_pad_token_and_with_its_own_sampling(demo):
    model = copy.deepcopy(tiny_model("llama"))  # other tests use the model too
    model.generation_config.update(do_sample=True, temperature=0.6, top_p=0.9, pad_token_id=None)
    loaded = LoadedModel(model=model, tokenizer=demo.tokenizer, name="tiny", revision=None)
    prompt = Prompt(text="<|im_start|>" * 40)
    first, again = (answer(loaded, prompt, Random(20, window_size=4), SHORT) for _ in range(2))
    assert first.text == again.text
    assert first.finish_reason == "length"


def test_a_question_without_chat_template_reads_like_a_form(demo, monkeypatch):
    monkeypatch.setattr(demo.tokenizer, "chat_template", None)
    prompt = question_prompt(demo.tokenizer, "Text.", "Why?", answer_start="Because")
    assert prompt.text == "Text.\n\nQuestion: Why?\nAnswer: Because"
    with pytest.raises(InvalidArgumentError, match="chat template"):
        chat_prompt(demo.tokenizer, "Text.")


def test_a_question_with_chat_template_comes_last_in_the_users_message(demo):
    prompt = question_prompt(demo.tokenizer, "Text.", "Why?", answer_start="Because")
    assert prompt.text.endswith("Text.\n\nWhy?<|im_end|>\n<|im_start|>assistant\nBecause")
    ids = prompt.token_ids(demo.tokenizer)[0].tolist()
    assert demo.tokenizer.decode(ids) == prompt.text


@pytest.mark.parametrize(
    "suggested",
    [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}, {"use_cache": False}],
    ids=["beams", "several-answers", "no-cache"],
)
def test_what_a_checkpoint_suggests_does_not_change_how_many_answers(demo, suggested):
    model = copy.deepcopy(tiny_model("llama"))  # other tests use the model too
    loaded = LoadedModel(model=model, tokenizer=demo.tokenizer, name="tiny", revision=None)
    prompt = Prompt(text="<|im_start|>" * 40)
    plain = answer(loaded, prompt, Random(20, window_size=4), SHORT)
    model.generation_config.update(**suggested)
    again = answer(loaded, prompt, Random(20, window_size=4), SHORT)
    assert (again.text, again.cache) == (plain.text, plain.cache)


@pytest.mark.parametrize("bad", [{"max_new_tokens": 0}, {"seed": -1}, {"min_new_tokens": -1}])
def test_bad_settings_are_refused(bad):
    with pytest.raises(InvalidArgumentError, match=f"{next(iter(bad))}: expected at least"):
        GenerationSettings(**bad)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"max_new_tokens": 4, "min_new_tokens": 5}, "min_new_tokens: expected at most max_new_"),
        ({"stop_strings": ("a", "")}, "stop_strings: expected texts, got an empty one"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(bad, said):
    with pytest.raises(InvalidArgumentError, match=said):
        GenerationSettings(**bad)


@pytest.mark.parametrize("bad", [-0.1, 1e-5, float("nan"), float("inf"), -float("inf")])
def test_a_temperature_that_nothing_can_be_drawn_at_is_refused(bad):
    with pytest.raises(InvalidArgumentError, match=r"0, or a finite number of at least 0\.001"):
        GenerationSettings(temperature=bad)


def test_the_smallest_temperature_draws_the_likeliest_token(demo, prompt):
    settings = GenerationSettings(max_new_tokens=6, temperature=0.001)
    assert answer(demo, prompt, FullCache(), settings).text == (
        answer(demo, prompt, FullCache(), SHORT).text
    )


def test_time_per_token_where_several_come_together(demo, monkeypatch):
    """Steps of 1, 3 and 2 tokens at 0, 1, 4 and 6 seconds: 6 s for the 6 behind the first."""
    now = iter([0.0, 0.0, 1.0, 4.0, 6.0])
    monkeypatch.setattr("snapkv.app.answering.time.perf_counter", lambda: next(now))
    watch = _Stopwatch(demo.tokenizer, None, ())
    watch.put(torch.zeros(1, 9, dtype=torch.long))
    for count in (1, 1, 3, 2):
        watch.put(torch.full((1, count), 100))
    assert watch.first_token_ms == 0
    assert watch.token_ms == 1000
