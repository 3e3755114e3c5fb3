"""Answers: the tokens of plain `generate`, correct times, and every way to end an answer."""

import gc
import json
import weakref
from dataclasses import asdict
from types import SimpleNamespace

import numpy
import pytest
import torch
from transformers import DynamicCache

from snapkv import CompressedCache, FullCache, SnapKV, StreamingLLM, default_policy
from snapkv.errors import InvalidArgumentError, OutOfMemoryError, PromptTooLongError
from snapkv.policies.default import adapt_to_question, method_name
from snapkv_app.answering import Comparison, _Stopwatch, answer, answers_together
from snapkv_app.models import LoadedModel
from snapkv_app.prefills import PREFILLS, Exact, LayerByLayer
from snapkv_app.prompt_end import telling_of_prompt_end
from snapkv_app.prompts import Prompt, question_prompt, text_prompt
from snapkv_app.reading import telling_of_reading
from snapkv_app.settings import GenerationSettings
from tests.app.conftest import DOCUMENT
from tests.families import read

START = "The key is under the"


def settings(**given):
    return GenerationSettings(**{"max_new_tokens": 6} | given)


SHORT = settings()


def test_full_cache_gives_the_tokens_of_plain_generate(tiny, prompt):
    ids = prompt.token_ids(tiny.tokenizer)
    cache = DynamicCache(config=tiny.model.config)
    plain = tiny.model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False)
    result = answer(tiny, prompt, FullCache(), SHORT)
    assert result.token_ids == tuple(plain[0, ids.shape[1] :].tolist())
    assert result.text == START + tiny.tokenizer.decode(result.token_ids, skip_special_tokens=True)
    assert (result.finish_reason, result.cache.held_bytes) == ("length", result.cache.full_bytes)


def test_compressed_answer_reports_its_tokens_and_times(demo, prompt):
    result = answer(demo, prompt, SnapKV(48, window_size=16, kernel_size=13), SHORT)
    assert result.text == "The key is under the blue stone."
    assert result.finish_reason == "stop"
    assert result.prompt_tokens == prompt.token_ids(demo.tokenizer).shape[1]
    assert result.new_tokens == 4  # blue, stone, the full stop, the end of the turn
    assert result.kept_tokens == 48
    assert result.cache.kept_tokens == 48 + 3  # the last token is never fed back
    assert result.first_token_ms > result.token_ms > 0
    assert (result.policy["name"], result.policy["budget"]) == ("snapkv", 48)
    assert json.loads(json.dumps(asdict(result)))["cache"]["kept_tokens"] == 51


def test_prompts_of_a_batch_get_the_same_answers_as_alone(tiny, prompt):
    prompts, policy = [prompt, Prompt(text="The gate opens at"), prompt], SnapKV(48)
    alone = [answer(tiny, each, policy, SHORT).text for each in prompts]
    assert answers_together(tiny, prompts, policy, SHORT) == alone
    with pytest.raises(InvalidArgumentError, match="temperature: the temperature must be 0"):
        answers_together(tiny, prompts, policy, settings(temperature=1.0))


@pytest.mark.parametrize("name", PREFILLS)
def test_kept_tokens_count_the_prompt_for_every_prefill(tiny, prompt, name):
    result = answer(tiny, prompt, SnapKV(48, window_size=16), SHORT, prefill=PREFILLS[name]())
    assert result.kept_tokens == 48 < result.cache.kept_tokens


def test_kept_tokens_exclude_those_evicted_during_the_answer(tiny, prompt):
    result = answer(tiny, prompt, StreamingLLM(48), SHORT)
    assert result.kept_tokens == 48 - (result.new_tokens - 1)


@pytest.mark.parametrize("way", [Exact(), LayerByLayer(chunk_tokens=64)])
def test_progress_of_the_prompt_and_pieces_of_text_are_reported(tiny, prompt, way):
    events = []
    with telling_of_reading(tiny.model, lambda *tokens: events.append(tokens)):
        result = answer(tiny, prompt, SnapKV(48), SHORT, on_text=events.append, prefill=way)
    tokens = result.prompt_tokens
    assert events[:2] == [(tokens // 2, tokens), (tokens, tokens)]  # it has two layers
    assert events[2] == START  # known before, but until the prompt is read a bar is drawn
    assert len(events) > 5
    assert "".join(events[2:]) == result.text
    assert not any(layer._forward_hooks for layer in tiny.model.model.layers)


@pytest.mark.parametrize("seed", [1, 3])
def test_sampling_follows_the_seed_and_keeps_the_callers_random_state(tiny, prompt, seed):
    def sample(seed):
        drawn = settings(max_new_tokens=8, temperature=1.5, seed=seed)
        return answer(tiny, prompt, SnapKV(48), drawn).text

    state = torch.get_rng_state()
    assert sample(seed) == sample(seed) != sample(seed + 1)
    assert torch.equal(torch.get_rng_state(), state)
    coldest = answer(tiny, prompt, FullCache(), settings(temperature=0.001))
    assert coldest.text == answer(tiny, prompt, FullCache(), SHORT).text


@pytest.mark.parametrize("bad", [-0.1, 1e-5, float("nan"), float("inf")])
def test_temperature_too_small_for_sampling_is_refused(bad):
    with pytest.raises(InvalidArgumentError, match=r"0 or a finite number of at least 0\.001"):
        GenerationSettings(temperature=bad)


# Where an answer ends.


@pytest.mark.parametrize(
    ("given", "text", "new_tokens", "reason"),
    [
        ({"min_new_tokens": 4, "stop_strings": ("stone",)}, " blue ", 2, "stop"),
        ({"stop_strings": ("ton", "lue st")}, " b", 2, "stop"),  # within and over tokens
        ({"stop_strings": ("absent",)}, " blue stone.", 4, "stop"),
        ({"stop_strings": ("stone",), "max_new_tokens": 2}, " blue ", 2, "stop"),
        ({"max_new_tokens": 2}, " blue stone", 2, "length"),
    ],
)
def test_settings_end_both_the_answer_and_its_stream(demo, prompt, given, text, new_tokens, reason):
    pieces = []
    result = answer(demo, prompt, FullCache(), settings(**given), on_text=pieces.append)
    assert result.text == START + text
    assert (result.new_tokens, result.finish_reason) == (new_tokens, reason)
    assert "".join(pieces) == result.text


def test_answer_never_ends_inside_a_character(demo):
    prompt = text_prompt(demo.tokenizer, "青石镇的图书馆里有一只橘猫。" * 2 + "青石镇的图书馆里有")
    halves = 0
    for tokens in range(1, 7):
        streamed: list[str] = []
        limit = GenerationSettings(max_new_tokens=tokens)
        found = answer(demo, prompt, FullCache(), limit, on_text=streamed.append)
        (together,) = answers_together(demo, [prompt], FullCache(), limit)
        assert found.text == "".join(streamed) == together
        assert "\ufffd" not in found.text
        halves += "\ufffd" in demo.tokenizer.decode(found.token_ids)
    assert halves


def test_end_token_counts_from_the_smallest_answer_length_on(demo, prompt):
    (stone,) = demo.tokenizer.encode(" stone")
    last = settings(stop_token_ids=(stone,), max_new_tokens=2)  # the last that it may have
    ended = answer(demo, prompt, FullCache(), last)
    assert (ended.text, ended.finish_reason) == (START + " blue stone", "stop")
    whole = answer(demo, prompt, FullCache(), SHORT)
    assert whole.text == START + " blue stone."
    exact = answer(demo, prompt, FullCache(), settings(min_new_tokens=6))
    assert (exact.new_tokens, exact.finish_reason) == (6, "length")
    assert exact.text.startswith(whole.text)


def test_stop_string_that_begins_in_the_prompt_ends_the_answer(demo):
    """transformers also looks at the end of the prompt; the answer counts as complete."""
    text = "one two three four five six seven eight one two three four five six seven"
    stop = settings(max_new_tokens=3, stop_strings=("seven eight",))
    result = answer(demo, Prompt(text=text), FullCache(), stop)
    assert (result.text, result.new_tokens, result.finish_reason) == (" eight", 1, "stop")


@pytest.mark.parametrize("new_tokens", [1, 128])
def test_prompt_beyond_the_positions_is_refused_with_both_numbers(tiny, new_tokens):
    prompt = text_prompt(tiny.tokenizer, "word " * 520)
    tokens = prompt.token_ids(tiny.tokenizer).shape[1]
    with pytest.raises(PromptTooLongError, match=rf"prompt of {tokens:,} tok.* 512 positions"):
        answer(tiny, prompt, SnapKV(), settings(max_new_tokens=new_tokens))


def test_prompt_and_answer_may_use_every_position(tiny, monkeypatch):
    prompt = text_prompt(tiny.tokenizer, "one two three")
    monkeypatch.setattr(LoadedModel, "max_tokens", 3 + 2)
    assert answer(tiny, prompt, FullCache(), settings(max_new_tokens=2)).new_tokens == 2
    with pytest.raises(PromptTooLongError):
        answer(tiny, prompt, FullCache(), settings(max_new_tokens=3))


def test_out_of_memory_error_says_how_much_was_needed(tiny, prompt, monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(type(tiny.model), "generate", fail)
    with pytest.raises(OutOfMemoryError) as raised:
        answer(tiny, prompt, SnapKV(48), SHORT)
    message = str(raised.value)
    assert "besides the weights of" in message
    assert "tokens would fit" not in message  # so short a prompt would, by the arithmetic
    assert "Shorten the prompt, or choose dtype bfloat16" in message


# Times.


def test_times_are_measured_between_tokens(tiny, prompt, monkeypatch):
    clock = iter([0.0, 2.0, 2.1, 2.3, 2.6])
    fake_time = SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr("snapkv_app.answering.time", fake_time)
    result = answer(tiny, prompt, FullCache(), settings(max_new_tokens=4, min_new_tokens=4))
    assert result.first_token_ms == pytest.approx(2000)
    assert result.token_ms == pytest.approx(200)


def test_time_per_token_is_right_if_steps_give_several_tokens(tiny, monkeypatch):
    """Steps of 1, 3 and 2 tokens take 6 seconds for the 6 tokens after the first."""
    now = iter([0.0, 0.0, 1.0, 4.0, 6.0])
    monkeypatch.setattr("snapkv_app.answering.time.perf_counter", lambda: next(now))
    watch = _Stopwatch(tiny.tokenizer, None, ())
    watch.put(torch.zeros(1, 9, dtype=torch.long))
    for count in (1, 1, 3, 2):
        watch.put(torch.full((1, count), 100))
    assert (watch.first_token_ms, watch.token_ms) == (0, 1000)


# A question that comes when the cache is compressed already.


def hidden_behind(text, question):
    return Prompt(text=text + question, context_characters=len(text))


def test_hidden_question_is_stored_after_the_kept_tokens(tiny):
    prompt = hidden_behind(DOCUMENT, "\n\nQuestion: Where is the key?\nAnswer:")
    behind = prompt.token_ids(tiny.tokenizer).shape[1] - prompt.context_tokens(tiny.tokenizer)
    hidden = answer(tiny, prompt, SnapKV(48), SHORT)
    visible = answer(tiny, Prompt(text=prompt.text), SnapKV(48), SHORT)
    assert hidden.prompt_tokens == visible.prompt_tokens
    assert visible.cache.kept_tokens == 48 + visible.new_tokens - 1
    assert hidden.cache.kept_tokens == 48 + behind + hidden.new_tokens - 1
    roomy = [answer(tiny, one, SnapKV(1000), SHORT) for one in (prompt, Prompt(text=prompt.text))]
    assert roomy[0].token_ids == roomy[1].token_ids


def test_hidden_question_is_preceded_by_64_voters(tiny):
    prompt, ends = hidden_behind(DOCUMENT, "\n\nWhen does the gate open?"), []
    given = answer(tiny, prompt, default_policy(48), SHORT, on_prompt_end=ends.append)
    tokens = prompt.context_tokens(tiny.tokenizer)
    behind = given.prompt_tokens - tokens
    assert given.policy == default_policy(48, voters=max(16, behind)).describe()
    text = prompt.token_ids(tiny.tokenizer)[:, :tokens]
    cache = read(tiny.model, default_policy(48, voters=64, pooling="max", window_size=2), text)
    for layer in cache.compressed_layers:
        for found, expected in zip(
            ends[0].cache.kept_positions(layer)[0], cache.kept_positions(layer)[0], strict=True
        ):
            assert torch.equal(found[(found >= 0) & (found < tokens)], expected[expected >= 0])


def test_reset_forgets_the_expected_question(tiny):
    cache = CompressedCache(tiny.model, default_policy(48))
    cache.expect_question(40)
    assert cache.prompt_state.policy == default_policy(48, voters=40)
    cache.reset()
    assert cache.prompt_state.policy == cache.policy == default_policy(48)


@pytest.mark.parametrize("answer_start", ["", "It lies"])
def test_tokens_of_the_question_vote(tiny, answer_start):
    """Tokens vote from the question's first one on, with the default method only."""
    question = "Where does the key lie, if it lies anywhere, and for how long has it been there?"
    prompt = question_prompt(
        tiny.tokenizer, f"{question} {DOCUMENT}", question, answer_start=answer_start
    )
    ids = prompt.token_ids(tiny.tokenizer)[0]
    tokens = prompt.question_tokens(tiny.tokenizer)
    assert tiny.tokenizer.decode(ids[-tokens:]).lstrip().startswith(question)
    assert question not in tiny.tokenizer.decode(ids[-tokens:])[len(question) :]
    given = answer(tiny, prompt, default_policy(48), SHORT)
    assert given.policy == default_policy(48, voters=tokens).describe()
    assert text_prompt(tiny.tokenizer, question).question_tokens(tiny.tokenizer) is None


@pytest.mark.parametrize(
    ("policy", "tokens", "asked"),
    [
        (default_policy(64), 40, default_policy(64, voters=40)),
        (default_policy(64).policy, 40, default_policy(64, voters=40).policy),
        (default_policy(64), 9, default_policy(64, voters=16)),
        (default_policy(64), 1024, default_policy(64, voters=1024)),
        (default_policy(64), 1025, default_policy(64)),
        (default_policy(64), None, default_policy(64)),
        (default_policy(64, voters=20), 40, default_policy(64, voters=20)),
        (default_policy("1.5%"), 40, default_policy("1.5%", voters=40)),
        (default_policy(20), 9, default_policy(20, voters=16)),
        (default_policy(20, voters=16), 40, default_policy(20, voters=16)),
        # as in a file of release 0.3.0
        (default_policy(20, window_size=16), 40, default_policy(20, window_size=16, voters=40)),
        (SnapKV(64), 40, SnapKV(64)),
        (SnapKV(64, window_reduce="max"), 40, SnapKV(64, window_reduce="max")),
        (StreamingLLM(64), 40, StreamingLLM(64)),
    ],
)
def test_policy_is_adapted_to_the_question(policy, tokens, asked):
    assert adapt_to_question(policy, tokens) == asked
    assert method_name(asked.describe()) == method_name(policy.describe())


@pytest.mark.parametrize(
    ("budgets", "kept"),
    [((63, numpy.int64(63), "6.2%"), (2, 1, 18)), ((64, "6.25%", "1KiB", "auto"), (16, 4, 16))],
)
def test_small_budget_of_the_default_method_keeps_a_small_window(budgets, kept):
    for budget in budgets:
        votes = default_policy(budget).policy
        assert (votes.window_size, votes.sink_tokens, votes.query_tokens) == kept, budget
        assert method_name(default_policy(budget).describe()) == "default"
        assert default_policy(budget, window_size=8).policy.query_tokens == 8


@pytest.mark.parametrize("inside", [0, 2, 7])
def test_token_across_the_end_of_the_context_belongs_to_the_question(tiny, inside):
    """The context's tokens are the first tokens of the prompt for every end of the context."""
    text = "The key lies underneath."
    prompt = Prompt(text=text, context_characters=len("The key ") + inside)
    tokens = prompt.context_tokens(tiny.tokenizer)
    ids = prompt.token_ids(tiny.tokenizer)[0].tolist()
    begun = tiny.tokenizer.decode(ids[:tokens])
    assert text.startswith(begun)
    assert len(begun) <= prompt.context_characters
    longer = tiny.tokenizer.decode(ids[: tokens + 1])
    assert len(longer) > prompt.context_characters or inside == 0
    assert Prompt(text=text).context_tokens(tiny.tokenizer) is None


@pytest.mark.parametrize(
    ("text", "characters", "said"),
    [
        (
            "Underneath.",
            3,
            "context: the prompt does not have any tokens before the hidden question",
        ),
        ("Here.", 5, "question: the prompt does not have any tokens after the context"),
    ],
)
def test_empty_and_complete_contexts_are_refused(tiny, text, characters, said):
    prompt = Prompt(text=text, context_characters=characters)
    with pytest.raises(InvalidArgumentError, match=said):
        answer(tiny, prompt, SnapKV(48), SHORT)


# The end of a prompt is told of once, by its own cache, and nothing stays behind in the model.


@pytest.mark.parametrize("at_end", [True, False], ids=["as it is told", "behind"])
def test_interrupted_answer_leaves_no_hooks_in_the_model(tiny, prompt, at_end):
    told = []

    def interrupt(given):
        told.append(given)
        raise KeyboardInterrupt

    where = {"on_prompt_end": interrupt if at_end else told.append}
    where |= {} if at_end else {"on_text": lambda text: interrupt(text) if text != START else None}
    with pytest.raises(KeyboardInterrupt):
        answer(tiny, prompt, SnapKV(40), SHORT, **where)
    assert told
    assert not tiny.model._forward_hooks
    assert not tiny.model._forward_hooks_with_kwargs


def test_prompt_end_is_reported_one_time_and_then_freed(tiny, prompt):
    told = []
    result = answer(tiny, prompt, SnapKV(40), SHORT, on_prompt_end=told.append)
    (end,) = told
    assert end.cache.get_seq_length() == result.prompt_tokens  # the answer is not in it
    stored = weakref.ref(end.cache)
    del end
    told.clear()
    gc.collect()
    assert stored() is None


def test_tokens_read_into_another_cache_are_not_the_prompt_end(tiny, prompt):
    ids = prompt.token_ids(tiny.tokenizer)
    cache, other = (CompressedCache(tiny.model, SnapKV(40)) for _ in range(2))
    told = []
    with torch.no_grad():
        tiny.model(ids, past_key_values=cache)
        with telling_of_prompt_end(tiny.model, cache, ids.shape[1], told.append):
            tiny.model(ids[:, :50], past_key_values=other)
            tiny.model(ids[:, :50])
    assert not told


# Where two answers part.


@pytest.mark.parametrize(
    ("ours", "theirs", "place"),
    [((1, 2, 3), (1, 2, 3), None), ((1, 2, 3), (1, 7, 3), 1), ((1, 2), (1, 2, 3), 2)],
)
def test_comparison_finds_the_first_different_token(ours, theirs, place):
    ours, theirs = (SimpleNamespace(text=str(ids), token_ids=ids) for ids in (ours, theirs))
    found = Comparison.of(ours, theirs)
    assert found == Comparison(same=place is None, first_difference=place)
    assert Comparison.of_first(ours, theirs, 1).same
    theirs.text = ours.text  # the same letters in other tokens
    assert Comparison.of(ours, theirs).same
