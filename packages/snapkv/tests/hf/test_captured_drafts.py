"""Passes that verify drafts are captured, and give what eager passes give."""

import copy
import functools

import pytest
import torch
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from snapkv import AdaKV, CompressedCache, FullCache, SnapKV, default_policy
from snapkv.errors import CacheMismatchError
from snapkv.hf import append_buffers, step_graph
from snapkv.hf.append_buffers import CAPTURED_TOKENS
from snapkv.hf.cache_argument import cache_among, passed
from tests import families
from tests.families import DRAFTS_ARE_COMPILED, random_ids, require_integrity, tiny_model
from tests.hf.tape import TapeRecorder, recording_on_a_cpu
from tests.hf.test_step_graph import Acting
from tests.methods import METHODS
from tests.oracle import unwrapped

POLICY = SnapKV(40, window_size=8)
LOOKUP = {"prompt_lookup_num_tokens": 6, "max_matching_ngram_size": 1}
LONG_LOOKUP = {"prompt_lookup_num_tokens": 12, "max_matching_ngram_size": 1}

needs_compiled_drafts = pytest.mark.skipif(
    not DRAFTS_ARE_COMPILED, reason="this release of transformers verifies drafts eagerly"
)


@pytest.fixture(autouse=True)
def on_a_cpu():
    with recording_on_a_cpu():
        yield


@pytest.fixture
def passes(monkeypatch):
    """Return a list that gets the tokens of each pass after the prompt, and how it ran."""
    found, recorded, own, record = [], [], step_graph.StepGraph.__call__, TapeRecorder.record

    def call(self, **inputs):
        before, ways = len(recorded), self._obstacle
        made = own(self, **inputs)
        if not ways:
            found.append((inputs["input_ids"].shape[1], len(recorded) > before))
        return made

    monkeypatch.setattr(TapeRecorder, "record", lambda *given: recorded.append(1) or record(*given))
    monkeypatch.setattr(step_graph.StepGraph, "__call__", call)
    return found


def captures(read):
    """Return which passes should have been captured, and check that the others were not."""
    numbers = [tokens for tokens, _ in read]
    for place, (tokens, was_captured) in enumerate(read):
        comes_again = numbers[: place + 1].count(tokens) == 2
        assert was_captured == (comes_again and tokens <= CAPTURED_TOKENS)
    return [tokens for tokens, was_captured in read if was_captured]


def repeating(tokens=60):
    """Return a repetitive text, in which prompt lookup finds drafts."""
    return random_ids(1, tokens, seed=2) % 9 + 3


generated = functools.partial(families.generated, max_new_tokens=24)


def require_alike(cache, eager):
    """Check that both caches hold the same tokens, bytes and queries."""
    assert cache.report().held_bytes == eager.report().held_bytes
    assert cache.get_seq_length() == eager.get_seq_length()
    for layer in cache.compressed_layers:
        assert torch.equal(cache.kept_positions(layer), eager.kept_positions(layer))
        own, other = cache.layers[layer], eager.layers[layer]
        require_integrity(own)
        torch.testing.assert_close(own.queries.last, other.queries.last)


def as_eager(model, ids, policy=POLICY, *, made=None, **options):
    """Check that captured and eager passes give the same; return the cache of the captured ones."""
    cache, eager, plain = (CompressedCache(model, policy, **made or {}) for _ in range(3))
    got = generated(model, cache, ids, **options)
    assert torch.equal(got, generated(model, eager, ids, disable_compile=True, **options))
    without = {name: each for name, each in options.items() if "num_tokens" not in name}
    without.pop("assistant_model", None)
    assert torch.equal(got, generated(model, plain, ids, disable_compile=True, **without))
    require_alike(cache, eager)
    return cache


CASES = {
    "snapkv": (POLICY, {}),
    "by query head": (METHODS["snapkv by query head"], {}),
    "adakv": (AdaKV(POLICY), {}),
    "default": (default_policy(40), {}),
    "full": (FullCache(), {}),
    "int8": (POLICY, {"quantize": "int8"}),
    "int4": (AdaKV(POLICY), {"quantize": "int4"}),
    "compress": (POLICY, {"turns": "compress"}),
    "recall": (default_policy(40), {"recall": "host"}),
    "recall in few bits": (POLICY, {"recall": "host", "quantize": "int4"}),
}


@pytest.mark.parametrize("case", CASES)
def test_captured_prompt_lookup_matches_eager_and_plain_decoding(case, passes):
    policy, made = CASES[case]
    cache = as_eager(tiny_model("llama"), repeating(), policy, made=made, **LOOKUP)
    if DRAFTS_ARE_COMPILED:
        captured = captures(passes)
        assert len(captured) > 1
        assert cache.report()["steps"] == f"{len(captured)} graphs"


ASSISTANTS = {
    "another": lambda model: tiny_model("llama", "eager"),
    "a copy": lambda model: unwrapped(model, "sdpa"),
    "itself": lambda model: model,
}


@pytest.mark.parametrize("assistant", ASSISTANTS)
@pytest.mark.parametrize("case", ["adakv", "compress"])
def test_captured_assistant_drafts_match_eager_and_plain_decoding(case, assistant):
    policy, made = CASES[case]
    model, ids = tiny_model("llama"), random_ids(1, 60)
    options = {"assistant_model": ASSISTANTS[assistant](model), "max_new_tokens": 40}
    cache = as_eager(model, ids, policy, made=made, **options)
    assert cache.report()["steps"] == ("2 graphs" if DRAFTS_ARE_COMPILED else None)


@pytest.mark.parametrize("case", [case for case in CASES if case != "int4"])
def test_turns_after_captured_drafts_match_eager_turns(case):
    policy, made = CASES[case]
    model = tiny_model("llama")
    cache, eager = (CompressedCache(model, policy, **made) for _ in range(2))
    ids = repeating()
    for new, drafts in ((0, LOOKUP), (3, {}), (30, {})):
        ids = torch.cat([ids, random_ids(1, new, seed=new)], dim=1)
        got = generated(model, cache, ids, **drafts)
        assert torch.equal(got, generated(model, eager, ids, disable_compile=True, **drafts))
        require_alike(cache, eager)
        ids = got
    assert "graph" in cache.report()["steps"]


@pytest.mark.parametrize("case", ["snapkv", "compress", "int8"])
def test_full_append_buffer_is_replaced_between_drafts(case, monkeypatch):
    monkeypatch.setattr(append_buffers, "FIRST_TOKENS", 4)
    policy, made = CASES[case]
    for ids in (repeating(), random_ids(1, 60)):
        as_eager(tiny_model("llama"), ids, policy, made=made, **LOOKUP)


@needs_compiled_drafts
@pytest.mark.parametrize("case", ["snapkv", "int8"])
def test_long_passes_run_eagerly_between_captured_ones(case, passes):
    policy, made = CASES[case]
    as_eager(tiny_model("llama"), repeating(), policy, made=made, **LONG_LOOKUP)
    assert len(captures(passes)) > 1
    assert max(passes)[0] > CAPTURED_TOKENS


@needs_compiled_drafts
@pytest.mark.parametrize("case", ["compress", "recall"])
def test_buffers_are_replaced_once_for_queries_of_long_passes(case, passes):
    policy, made = CASES[case]
    as_eager(tiny_model("llama"), repeating(), policy, made=made, **LONG_LOOKUP)
    numbers = [tokens for tokens, _ in passes]
    assert max(numbers) > CAPTURED_TOKENS
    captured = [tokens for tokens, was_captured in passes if was_captured]
    assert max(map(captured.count, captured)) <= 2


@needs_compiled_drafts
def test_masks_of_captured_passes_begin_behind_tokens_that_were_read():
    model, offsets = tiny_model("llama"), []
    cache = CompressedCache(model, POLICY)

    def compare(*_):
        offsets.append(cache.get_query_offset())
        assert int(offsets[-1]) == cache.get_seq_length()
        return torch.zeros(1) > 0

    generated(model, cache, repeating(), stopping_criteria=[compare], **LOOKUP)
    assert sum(isinstance(offset, torch.Tensor) for offset in offsets) > 5


@pytest.mark.parametrize("method", ["drop", "reorder_cache", "release_append_buffers", "crop"])
@pytest.mark.parametrize("case", ["snapkv", "recall", "int8"])
def test_change_of_cache_between_pass_and_rejection_affects_next_token(case, method):
    policy, made = CASES[case]
    given = {"drop": ([(20, 60)],), "reorder_cache": (torch.tensor([0]),), "crop": (0,)}
    model, ids, answers, caches = tiny_model("llama"), repeating(), [], []
    for options in ({}, {"disable_compile": True}):
        caches.append(cache := CompressedCache(model, policy, **made))
        act = functools.partial(getattr(cache, method), *given.get(method, ()))
        options = {"streamer": Acting(act), **LOOKUP, **options}
        answers.append(generated(model, cache, ids, max_new_tokens=50, **options))
    assert torch.equal(*answers)
    for layer in caches[0].compressed_layers:
        assert torch.equal(*(cache.kept_positions(layer) for cache in caches))


@pytest.mark.parametrize("case", ["snapkv", "compress", "int4"])
def test_copy_made_between_pass_and_rejection_holds_same_tokens_as_eager_copy(case):
    policy, made = CASES[case]
    model, ids, branches = tiny_model("llama"), repeating(), []
    for options in ({}, {"disable_compile": True}):
        cache = CompressedCache(model, policy, **made)

        def branch(cache=cache):
            branches.extend([copy.copy(cache), copy.deepcopy(cache)])

        generated(model, cache, ids, streamer=Acting(branch), **LOOKUP, **options)
    for each in branches:
        assert all(not layer.store.has_room for layer in each.prompt_state.layers)
        require_alike(each, branches[-1])
        each.keep_among_last(2, torch.tensor([1]))
    for each in branches:
        require_alike(each, branches[-1])


@pytest.mark.parametrize("case", ["snapkv", "compress", "int8"])
def test_branch_of_captured_candidates_is_kept_as_of_eager_ones(case):
    """The candidates begin in a block that is full with them, and must not be quantized."""
    policy, made = CASES[case]
    model, ids, caches = tiny_model("llama"), repeating(), []
    for options in ({}, {"disable_compile": True}):
        caches.append(cache := CompressedCache(model, policy, **made))

        def keep(cache=cache):
            if cache.get_seq_length() >= 60 + 32:
                cache.keep_among_last(3, torch.tensor([0, 2]))
                raise StopIteration

        options |= {"streamer": Acting(keep, every=True), "max_new_tokens": 60, **LOOKUP}
        with pytest.raises(StopIteration):
            generated(model, cache, ids, **options)
    require_alike(*caches)
    for layer in range(2):
        own, other = (cache.layers[layer].store.last(8) for cache in caches)
        torch.testing.assert_close(own, other)


@needs_compiled_drafts
def test_more_tokens_are_removed_than_were_drafted():
    """The append buffers are given up then, as by any other change of the cache."""
    model, ids, answers = tiny_model("llama"), repeating(), []
    for options in ({}, {"disable_compile": True}):
        cache = CompressedCache(model, POLICY)

        def undo(cache=cache):
            cache.crop(-8)
            assert all(not layer.store.has_room for layer in cache.prompt_state.layers)
            answers.append(cache.kept_positions(0))
            raise StopIteration

        with pytest.raises(StopIteration):
            generated(model, cache, ids, streamer=Acting(undo), **LOOKUP, **options)
    assert torch.equal(*answers)


@needs_compiled_drafts
def test_pass_that_fails_between_layers_breaks_cache(monkeypatch):
    model = copy.deepcopy(tiny_model("llama"))
    cache = CompressedCache(model, POLICY, turns="compress")
    own, calls = type(model.model.layers[1].mlp).forward, []

    def fail(module, states):
        calls.append(states.shape[1])
        if module is model.model.layers[0].mlp and len(calls) > 6:
            raise MemoryError
        return own(module, states)

    monkeypatch.setattr(type(model.model.layers[1].mlp), "forward", fail)
    with pytest.raises(MemoryError):
        generated(model, cache, repeating(), **LOOKUP)
    calls.clear()
    with pytest.raises(CacheMismatchError, match="interrupted"):
        model(random_ids(1, 1), past_key_values=cache)


class Counting(LlamaRMSNorm):
    """A norm that asks the cache how many tokens it has seen."""

    caches: tuple[Cache, ...] = ()

    def forward(self, states):
        return super().forward(states).roll(self.caches[-1].get_seq_length(), dims=-1)


@pytest.mark.parametrize("drafts", [{}, LOOKUP], ids=["", "drafts"])
@pytest.mark.parametrize("place", ["before", "after"])
def test_length_that_model_asks_for_is_not_frozen_in_captured_pass(place, drafts):
    """The model asks before, or after, the layers have stored the tokens of a pass."""
    model = copy.deepcopy(tiny_model("llama"))
    inner = model.model
    norm = inner.layers[0].input_layernorm if place == "before" else inner.norm
    norm.__class__ = Counting
    answers = []
    for options in ({}, {"disable_compile": True}):
        cache = CompressedCache(model, POLICY)
        Counting.caches = (cache,)
        answers.append(generated(model, cache, repeating(), **drafts, **options))
    assert torch.equal(*answers)
    Counting.caches = ()


@pytest.mark.parametrize("kind", ["compressed", "stock"])
def test_cache_of_assistant_model_is_not_disturbed(kind):
    model, assistant = tiny_model("llama"), unwrapped(tiny_model("llama", "eager"), "sdpa")
    ids, answers = random_ids(1, 60), []
    for uses in (True, False):
        its = CompressedCache(assistant, POLICY) if kind == "compressed" else DynamicCache()
        before = generated(assistant, its, ids)
        if uses:
            as_eager(model, ids, assistant_model=assistant, max_new_tokens=40)
        assert its.get_seq_length() == 83
        more = torch.cat([before, random_ids(1, 9)], dim=1)
        answers.append(generated(assistant, its, more))
    assert torch.equal(*answers)


def test_assistant_model_may_draft_with_compressed_cache_of_its_own(monkeypatch):
    model, assistant = tiny_model("llama"), unwrapped(tiny_model("llama", "eager"), "sdpa")
    its = []

    def generate(*args, **options):
        if cache_among(options) is None:
            its.append(CompressedCache(assistant, POLICY))
            options |= passed(its[-1])
        return type(assistant).generate(assistant, *args, **options)

    vars(assistant)["generate"] = generate
    as_eager(model, random_ids(1, 60), assistant_model=assistant, max_new_tokens=40)
    assert len(its) == 2


@needs_compiled_drafts
def test_last_pass_and_more_can_be_removed_after_generate():
    """The last pass has one token more than the queries that its removal needs at least."""
    model, ids, caches = tiny_model("llama"), random_ids(1, 60, seed=5) % 5 + 3, []
    lookup = LOOKUP | {"prompt_lookup_num_tokens": CAPTURED_TOKENS, "max_new_tokens": 31}
    for options in ({}, {"disable_compile": True}):
        caches.append(cache := CompressedCache(model, POLICY, turns="compress"))
        generated(model, cache, ids, **lookup, **options)
    cache, eager = caches
    cache.crop(-4)
    eager.crop(-4)
    torch.testing.assert_close(cache.layers[0].queries.held, eager.layers[0].queries.held)
