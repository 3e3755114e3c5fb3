"""Captured decode steps give the tokens of eager steps, or the report says why none is captured."""

import contextlib
import copy
import functools
import gc
from unittest.mock import Mock

import pytest
import torch
from transformers import CompileConfig
from transformers.generation.streamers import BaseStreamer

from snapkv import (
    TOVA,
    AdaKV,
    CompressedCache,
    PyramidKV,
    SnapKV,
    default_policy,
)
from snapkv.hf import append_buffers, forward_context, step_graph
from snapkv.kvzip import read_twice
from snapkv_app.reading import telling_of_reading
from tests import families
from tests.families import (
    HYBRID,
    ONCE,
    peaked_model,
    random_ids,
    require_integrity,
    tiny_config,
    tiny_model,
)
from tests.hf.tape import TapeRecorder, recording_on_a_cpu
from tests.methods import METHODS

POLICY = SnapKV(40, window_size=8)
RECORDED = ("snapkv", "snapkv by query head", "adakv", "criticalkv", "kvzip", "across-layers")


@pytest.fixture(autouse=True)
def on_a_cpu():
    with recording_on_a_cpu():
        yield


generated = functools.partial(families.generated, max_new_tokens=12)


def as_eager(model, ids, policy=POLICY, **options):
    """Check that captured and eager steps give equal tokens; return the cache of each."""
    cache, eager = (CompressedCache(model, policy) for _ in range(2))
    got = generated(model, cache, ids, **options)
    assert torch.equal(got, generated(model, eager, ids, disable_compile=True, **options))
    return cache, eager


@pytest.mark.parametrize(
    ("name", "quantize"),
    [*((name, None) for name in RECORDED), ("snapkv", "int4"), ("across-layers", "int4")],
)
def test_decode_steps_of_every_method_are_captured_as_one_graph(name, quantize):
    model, ids, answers, positions = tiny_model("llama"), random_ids(2, 90), [], []
    for options in ({}, {"disable_compile": True}):
        cache = CompressedCache(model, METHODS[name], quantize=quantize)
        if cache.policy.needs_reconstruction_pass:
            read_twice(model, ids[:, :80], cache)
        answers.append(generated(model, cache, ids, **options))
        positions.append([cache.kept_positions(layer) for layer in cache.compressed_layers])
        assert cache.report()["steps"] == (None if options else "one graph")
    assert torch.equal(*answers)
    assert all(map(torch.equal, *positions))


OBSTACLES = dict.fromkeys(HYBRID, "eager: ") | {"deepseek_v3": "share what is stored"}


@pytest.mark.parametrize(("family", "implementation"), ONCE)
def test_steps_of_every_family_are_one_graph_or_report_says_why_not(family, implementation):
    cache, _ = as_eager(tiny_model(family, implementation), random_ids(2, 60))
    assert OBSTACLES.get(family, "one graph") in cache.report()["steps"]


def turns_of(model, cache, **options):
    """Generate three turns of a conversation, the second one shorter than the window."""
    ids = random_ids(1, 60)
    for new in (0, 3, 30):
        ids = torch.cat([ids, random_ids(1, new, seed=new)], dim=1)
        ids = generated(model, cache, ids, **options)
    return ids


GOING_ON = [
    (POLICY, {}),
    (POLICY, {"turns": "compress"}),
    (POLICY, {"recall": "host", "quantize": "int8"}),
    (default_policy(40), {}),
    (default_policy(40), {"recall": "host"}),
    (PyramidKV(40, window_size=8), {"recall": "host"}),
]


@pytest.mark.parametrize(("policy", "going_on"), GOING_ON)
def test_conversation_with_captured_steps_matches_eager_conversation(policy, going_on):
    model = tiny_model("llama")
    cache, eager = (CompressedCache(model, policy, **going_on) for _ in range(2))
    got = turns_of(model, cache)
    assert torch.equal(got, turns_of(model, eager, disable_compile=True))
    assert cache.report()["steps"] == "one graph"
    assert cache.report().held_bytes == eager.report().held_bytes
    for layer in cache.compressed_layers:
        assert torch.equal(cache.kept_positions(layer), eager.kept_positions(layer))
        require_integrity(cache.layers[layer])


@pytest.fixture
def recorded(monkeypatch):
    """Return a list that gets one entry for each capture."""
    found, own = [], TapeRecorder.record
    monkeypatch.setattr(TapeRecorder, "record", lambda *given: found.append(1) or own(*given))
    return found


@pytest.mark.parametrize("new_tokens", [40, 31, 30])
def test_full_append_buffer_is_doubled_and_recaptured(new_tokens, recorded, monkeypatch):
    monkeypatch.setattr(append_buffers, "FIRST_TOKENS", 4)
    as_eager(tiny_model("llama"), random_ids(2, 60), AdaKV(POLICY), max_new_tokens=new_tokens)
    assert len(recorded) == 3 + (new_tokens > 29), "of 4, 8, 16 tokens, and what is left"


def test_hook_added_during_generate_ends_replay_when_append_buffer_is_full(monkeypatch):
    monkeypatch.setattr(append_buffers, "FIRST_TOKENS", 4)
    model, ids = copy.deepcopy(tiny_model("llama")), random_ids(1, 60)
    cache, eager = (CompressedCache(model, POLICY) for _ in range(2))
    hook = model.model.layers[1].register_forward_hook
    got = generated(model, cache, ids, streamer=Acting(lambda: hook(lambda *_: None)))
    assert cache.report()["steps"].startswith("eager: model.layers.1 has hooks")
    assert torch.equal(got, generated(model, eager, ids, disable_compile=True))


class Acting(BaseStreamer):
    """A streamer that calls `act` when it gets tokens for the fifth time, or `every` time."""

    def __init__(self, act, *, every=False):
        self.act, self.left, self.every = act, 5, every

    def put(self, value):
        self.left -= 1
        if self.every or not self.left:
            self.act()

    def end(self):
        """Do nothing: no text is held back."""


@pytest.mark.parametrize("options", [{}, {"recall": "host"}], ids=["", "recall"])
def test_copy_made_during_generate_grows_without_append_buffer(options, tmp_path):
    model, ids, branches = tiny_model("llama"), random_ids(1, 60), []
    cache = CompressedCache(model, POLICY, **options)

    def branch():
        cache.save(tmp_path / "one")
        loaded = CompressedCache.load(tmp_path / "one", model)
        branches.extend([copy.copy(cache), copy.deepcopy(cache), loaded])

    got = generated(model, cache, ids, streamer=Acting(branch))
    for each in branches:
        assert all(not layer.store.has_room for layer in each.prompt_state.layers)
        seen = each.get_seq_length()
        eager = CompressedCache(model, POLICY, **options)
        model(ids, past_key_values=eager)
        for token in got[0, 60:seen]:
            model(token.view(1, 1), past_key_values=eager)
        for own, other in zip(each.layers, eager.layers, strict=True):
            torch.testing.assert_close(own.queries.last, other.queries.last)
        logits = model(got[:, seen:], past_key_values=each).logits
        torch.testing.assert_close(model(got[:, seen:], past_key_values=eager).logits, logits)


@pytest.mark.parametrize("through_class", [False, True])
def test_cache_grows_without_append_buffer_after_failed_generate(through_class):
    model, ids = tiny_model("llama"), random_ids(1, 60)
    cache = CompressedCache(model, POLICY)
    options = {"streamer": Acting(lambda: 1 / 0), "max_new_tokens": 12, "do_sample": False}
    generate = functools.partial(type(model).generate, model) if through_class else model.generate
    with pytest.raises(ZeroDivisionError) as held:
        generate(ids, past_key_values=cache, **options)
    assert cache.get_seq_length() == 63
    model(random_ids(1, 300), past_key_values=cache)
    assert all(not layer.store.has_room for layer in cache.prompt_state.layers)
    cache.reset()
    options["streamer"] = Acting(held.__dict__.clear)  # the last to hold what had lent room
    generate(ids, past_key_values=cache, **options)
    assert cache.report()["steps"] == "one graph"


def with_a_hook():
    model = copy.deepcopy(tiny_model("llama"))
    model.model.layers[1].register_forward_hook(lambda *_: None)
    return model


def dropped(model, cache):
    cache.drop([(0, 50)])


def reordered(model, cache):
    cache.reorder_cache(torch.tensor([1, 0]))


def looked_ahead(model, cache):
    model(random_ids(2, 20, seed=5), past_key_values=cache)
    cache.crop(-20)


def injected(model, cache):
    model(random_ids(2, 4, seed=5), past_key_values=cache)
    cache.crop(-1)


@pytest.mark.parametrize("act", [dropped, reordered, looked_ahead, injected])
@pytest.mark.parametrize("policy", [POLICY, AdaKV(POLICY), default_policy(40)])
def test_cache_change_during_generate_affects_next_token(policy, act):
    model, ids, answers = tiny_model("llama"), random_ids(2, 60), []
    for options in ({}, {"disable_compile": True}):
        cache = CompressedCache(model, policy)
        criteria = [lambda ids, _, c=cache: torch.full((2,), acted(ids, model, c, act))]
        answers.append(generated(model, cache, ids, stopping_criteria=criteria, **options))
        assert cache.report()["steps"] == (None if options else "one graph")
    assert torch.equal(*answers)


def acted(ids, model, cache, act):
    """Call `act` at the fifth token and return False, so that generation goes on."""
    if ids.shape[1] == 65:
        act(model, cache)
    return False


def test_turn_announced_during_generate_is_read_eagerly_as_turn():
    model, ids, answers, caches = tiny_model("llama"), random_ids(1, 60), [], []
    for options in ({}, {"disable_compile": True}):
        caches.append(cache := CompressedCache(model, POLICY, turns="compress"))
        act = Acting(lambda c=cache: c.expect_prompt(c.get_seq_length() + 3))
        answers.append(generated(model, cache, ids, streamer=act, **options))
    assert torch.equal(*answers)
    assert torch.equal(*(cache.kept_positions(1) for cache in caches))
    assert caches[0].report()["steps"] == "eager: the cache has no append buffers for the step"


def test_cache_changed_at_every_token_runs_eagerly():
    model, ids = tiny_model("llama"), random_ids(2, 60)
    cache, eager = (CompressedCache(model, POLICY) for _ in range(2))

    def criteria(cache):
        return [lambda ids, _: torch.full((2,), looked_ahead(model, cache) is not None)]

    got = generated(model, cache, ids, stopping_criteria=criteria(cache))
    assert cache.report()["steps"] == "eager: the cache is changed while tokens are made"
    options = {"stopping_criteria": criteria(eager), "disable_compile": True}
    assert torch.equal(got, generated(model, eager, ids, **options))


def test_unquantized_tail_of_quantized_cache_stays_within_append_buffer(monkeypatch):
    monkeypatch.setattr(append_buffers, "FIRST_TOKENS", 32)
    model, ids, exact = tiny_model("llama"), random_ids(1, 90), []
    cache = CompressedCache(model, POLICY, quantize="int4")
    criteria = [lambda *_: exact.append(cache.layers[0].store.tail.tokens) or torch.zeros(1) > 0]
    generated(model, cache, ids, max_new_tokens=120, stopping_criteria=criteria)
    assert cache.report()["steps"] == "one graph"
    assert max(exact) <= 32 + 32


NO_ROOM = {
    "tova evicts": ("llama", TOVA(40), {}),
    "layers of another kind": ("gemma3_text", POLICY, {}),
    "fewer than 8 tokens": ("llama", POLICY, {"max_new_tokens": 7}),
    "attention weights are returned": ("llama", POLICY, {"output_attentions": True}),
}


@pytest.mark.parametrize("said", NO_ROOM)
def test_cache_without_append_buffers_runs_eagerly_and_reports_reason(said):
    family, *policy, options = NO_ROOM[said]
    cache, _ = as_eager(tiny_model(family), random_ids(1, 60), *policy, **options)
    assert cache.report()["steps"].startswith("eager: ")
    assert said in cache.report()["steps"]


def test_compile_config_is_replaced_by_capture_with_log_message(caplog):
    model, ids = tiny_model("llama"), random_ids(1, 60)
    cache, eager = CompressedCache(model, POLICY), CompressedCache(model, POLICY)
    config = CompileConfig()
    config._compile_all_devices = True  # or transformers would not on a CPU
    got = generated(model, cache, ids, compile_config=config)
    assert torch.equal(got, generated(model, eager, ids, disable_compile=True))
    assert cache.report()["steps"] == "one graph"
    assert "compile_config: decode steps are captured, not compiled" in caplog.text


def test_every_generate_call_captures_steps_for_its_own_batch_and_cache():
    model = tiny_model("llama")
    cache = CompressedCache(model, POLICY)
    for rows in (1, 2, 1):
        ids = random_ids(rows, 60)
        cache.reset()
        got = generated(model, cache, ids)
        assert torch.equal(got, generated(model, CompressedCache(model, POLICY), ids))
    branch = copy.copy(cache)
    assert branch.report()["steps"] is None
    more = torch.cat([got, random_ids(1, 3)], dim=1)
    assert torch.equal(generated(model, branch, more), generated(model, cache, more))


def test_collected_logits_and_hidden_states_are_not_overwritten_by_next_step():
    model, ids = tiny_model("llama"), random_ids(1, 60)
    wanted = {"return_dict_in_generate": True, "output_hidden_states": True, "output_logits": True}
    got = generated(model, CompressedCache(model, POLICY), ids, **wanted)
    expected = generated(model, CompressedCache(model, POLICY), ids, disable_compile=True, **wanted)
    torch.testing.assert_close(got.logits, expected.logits)
    torch.testing.assert_close(got.hidden_states[1:], expected.hidden_states[1:])


def moved(model):
    model.lm_head.weight.data = model.lm_head.weight.data.roll(1, dims=0).clone()


CHANGES = {
    "moved": moved,
    "rescaled": lambda m: vars(m.model.layers[1].input_layernorm).update(variance_epsilon=3.0),
    "followed": lambda m: m.model.layers[1].register_forward_hook(lambda _, given, made: made * 0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_model_change_between_calls_affects_next_call(change):
    model, ids = copy.deepcopy(tiny_model("llama")), random_ids(1, 60)
    cache = CompressedCache(model, POLICY)
    before = generated(model, cache, ids)
    change(model)
    cache.reset()
    after, eager = generated(model, cache, ids), CompressedCache(model, POLICY)
    assert torch.equal(after, generated(model, eager, ids, disable_compile=True))
    assert not torch.equal(before, after)


def with_frequencies_by_length():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    return peaked_model(tiny_config("llama", rope_parameters=rope), "sdpa")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (with_a_hook, "eager: model.layers.1 has hooks, or a forward of its own"),
        (with_frequencies_by_length, "eager: a step of LlamaForCausalLM reads a number from"),
        (lambda: copy.deepcopy(tiny_model("llama")).train(), "eager: the model is in training"),
    ],
)
def test_step_that_cannot_be_captured_runs_eagerly_and_report_says_why(made, said):
    cache, eager = as_eager(made(), random_ids(1, 60))
    assert cache.report()["steps"].startswith(said)
    assert said in str(cache.report())
    assert cache.get_seq_length() == eager.get_seq_length()


def test_attention_hook_is_called_for_every_decode_step():
    model, ids, calls = tiny_model("llama"), random_ids(1, 60), []
    cache = CompressedCache(model, POLICY)
    generated(model, cache, ids)

    class Follower(forward_context.Hook):
        def on_attention(self, call, attended):
            calls.append(call.query.shape[2])

    cache.reset()
    with forward_context.hooked(Follower()):
        generated(model, cache, ids)
    assert calls.count(1) == 11 * len(model.model.layers)


def test_captured_step_is_freed_after_generate_call():
    model, ids = tiny_model("llama"), random_ids(1, 60)
    cache = CompressedCache(model, POLICY)
    generated(model, cache, ids)
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is step_graph.StepGraph]


def test_prompt_of_embeddings_is_captured_once_and_matches_eager(recorded):
    model, answers = tiny_model("llama"), []
    embeds = model.get_input_embeddings()(random_ids(1, 60))
    options = {"inputs_embeds": embeds, "max_new_tokens": 100, "do_sample": False}
    for more in ({}, {"disable_compile": True}):
        cache = CompressedCache(model, POLICY)
        answers.append(model.generate(past_key_values=cache, **options, **more))
        assert len(recorded) == 1
    assert torch.equal(*answers)


def test_tokens_are_equal_inside_and_outside_inference_mode():
    model, ids = tiny_model("llama"), random_ids(1, 60)
    cache, answers = CompressedCache(model, POLICY), []
    for mode in (True, False, True):
        cache.reset()
        with torch.inference_mode(mode):
            answers.append(generated(model, cache, ids))
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


def test_step_is_captured_while_progress_of_reading_is_reported():
    model, ids, told = tiny_model("llama"), random_ids(1, 60), []
    with telling_of_reading(model, lambda *read: told.append(read)):
        cache = CompressedCache(model, POLICY)
        generated(model, cache, ids)
    assert cache.report()["steps"] == "one graph"
    assert told[-1] == (60, 60)


def test_steps_are_captured_while_gpu_of_model_is_current(monkeypatch):
    """torch captures an empty graph if the model is on a GPU that is not the current one."""
    current, seen, record = [], [], TapeRecorder.record

    @contextlib.contextmanager
    def device_of(states):
        current.append(states.device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(
        TapeRecorder, "record", lambda *given: seen.extend(current) or record(*given)
    )
    model = tiny_model("llama")
    generated(model, CompressedCache(model, POLICY), random_ids(1, 60))
    assert seen == [model.device]


def test_side_stream_is_waited_for_after_step_that_cannot_be_captured(monkeypatch):
    streams = {name: Mock() for name in ("side", "current")}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams["current"])
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setitem(step_graph.CudaRecorder._streams, 0, streams["side"])
    with pytest.raises(MemoryError), step_graph.CudaRecorder().side_stream():
        raise MemoryError
    streams["current"].wait_stream.assert_called_once_with(streams["side"])
