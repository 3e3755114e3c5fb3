"""Wrong settings are refused for every caller, and memory and counts are right."""

from types import SimpleNamespace

import pytest

from tests.serving.vllm.engines import greedy, small_engine

BUDGET = 64
WRONG = {
    "at most 128 on this server, but got 1,400": {
        "snapkv_window_size": 1400,
        "snapkv_budget": 2000,
    },
    "Use snapkv_budget": {"budget": 64},
}


@pytest.fixture(scope="module")
def engine(small):
    with small_engine(
        small,
        budget=BUDGET,
        max_model_len=384,
        max_num_batched_tokens=100,
    ) as made:
        yield made


def test_engine_loads_no_logits_processor(engine):
    assert engine.runner.model_config.logits_processors is None
    assert not engine.runner.input_batch.logitsprocs_need_output_token_ids


def test_vllm_measures_its_memory_with_the_largest_compression(engine, monkeypatch):
    from snapkv_vllm import memory_profile

    seen = []
    monkeypatch.setattr(memory_profile, "_vote", lambda *given: seen.append(given))
    engine.runner.profile_run()
    layer, _, largest, kind = seen[0]
    assert [policy for _, policy, _, _ in seen] == largest.policies
    assert {policy.voters for policy in largest.policies} == {128}
    assert (layer.num_heads, layer.num_kv_heads, layer.head_size) == (8, 4, 32)
    assert largest.prompt_tokens == 384
    assert (largest.step_tokens, largest.recorded_tokens) == (100, 100 + 128)
    assert str(kind["device"]) == "cpu"


@pytest.mark.parametrize("words", WRONG)
def test_python_callers_get_an_error_and_the_engine_continues(engine, many_ids, words):
    from vllm.exceptions import VLLMValidationError

    prompts, right = [many_ids[:100], many_ids[:90]], greedy(4)
    expected = engine.answers(prompts, right)
    with pytest.raises(VLLMValidationError, match=words):
        engine.outputs(prompts, [right, greedy(4, extra_args=WRONG[words])])
    engine.abort_all()
    assert engine.answers(prompts, right) == expected
    assert engine.leftovers() == []


def test_scheduler_refuses_wrong_settings_that_no_front_end_checked(engine, many_ids, monkeypatch):
    processor = engine.llm.llm_engine.input_processor
    monkeypatch.setattr(processor, "validate_logits_processors_params", lambda params: None)
    prompts = [many_ids[:100], many_ids[:90]]
    wrong = greedy(4, extra_args={"snapkv_budget": 20})
    refused, answered = engine.outputs(prompts, [wrong, greedy(4)])
    assert refused.outputs[0].finish_reason == "error"
    assert answered.outputs[0].finish_reason == "length"
    engine.require_empty()


def test_prompt_is_counted_once_and_its_freed_blocks_every_time():
    from snapkv_vllm.metrics import PromptMetrics

    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_index=7),
        model_config=SimpleNamespace(served_model_name="counted"),
    )
    metrics = PromptMetrics(config)
    request = SimpleNamespace(request_id="a", num_prompt_tokens=100, num_preemptions=2)
    order = SimpleNamespace(selector=SimpleNamespace(stage="prompt"))
    for freed in (3, 2):
        metrics.record_compression(order, freed)
        metrics.record_prompt_end(request, kept_tokens=40)
    metrics.forget_request("a")
    metrics.record_prompt_end(request, kept_tokens=100)  # another one of that name

    def value(name, **more):
        return metrics.get(name, **more)._value.get()

    tokens = value("prompt_tokens_seen"), value("prompt_tokens_kept")
    assert (value("blocks_freed"), *tokens) == (5, 200, 140)
    assert value("compressions", stage="prompt") == 2
    assert [value("requests", outcome=one) for one in ("compressed", "whole")] == [1, 1]
