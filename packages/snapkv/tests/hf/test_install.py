"""A model is wrapped while it has caches and is restored completely afterwards."""

import copy
import functools
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.generation import utils as generation_utils
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import snapkv
from snapkv import (
    CacheMismatchError,
    CompressedCache,
    Document,
    FastGen,
    FullCache,
    InvalidArgumentError,
    InvalidTypeError,
    SnapKV,
    UnsupportedModelError,
)
from snapkv.hf import generate as around
from snapkv.hf import install as module
from tests.families import KINDS, call, generated, random_ids, tiny_config, tiny_model
from tests.hf.test_generate import Recorder

POLICY = SnapKV(36, window_size=8, kernel_size=5)
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
METHODS = tuple(around._AROUND)


@pytest.fixture(autouse=True, scope="module")
def _frozen_heap():
    """Exclude objects of earlier tests from garbage collection, which would take seconds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _without_collector():
    """Disable garbage collection, so that a cache is freed when its last reference is deleted."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def multimodal(implementation):
    """Return Gemma 3 with a vision tower: a config that contains two others."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = tiny_config("gemma3_text").to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)
    torch.manual_seed(0)
    made = Gemma3ForConditionalGeneration._from_config(config, attn_implementation=implementation)
    made.set_attn_implementation({"vision_config": "sdpa"})
    return made.float().eval()


@pytest.fixture(params=["llama sdpa", "deepseek_v3 eager", "several configs"])
def model(request):
    if request.param == "several configs":
        return multimodal("eager")
    return tiny_model.__wrapped__(*request.param.split())  # others use and change the cached one


@pytest.fixture
def llama():
    return tiny_model.__wrapped__("llama")


def configs(model):
    """Return the attention implementation in each config of the model and its parts, by name."""
    found = {"": model.config}
    for name, part in model.named_modules():
        if isinstance(part, PreTrainedModel):
            found[name] = part.config
    for name in model.config.sub_configs:
        found[f"config.{name}"] = getattr(model.config, name)
    return {name: config._attn_implementation for name, config in found.items()}


def state(model):
    """Return everything about a model that an installation may change."""
    return configs(model), dict(vars(model)), {n: getattr(model, n).__func__ for n in METHODS}


def as_it_was(model, before):
    assert configs(model) == before[0]
    assert vars(model).keys() == before[1].keys()
    assert all(vars(model)[name] is value for name, value in before[1].items())
    for name in METHODS:
        assert name not in vars(model)
        assert getattr(model, name).__func__ is before[2][name]
    return True


def carries(model):
    text = model.config.get_text_config(decoder=True)
    return text._attn_implementation.startswith("snapkv|") and vars(model).keys() >= set(METHODS)


# The last cache.


def test_model_is_restored_after_last_cache_is_deleted(model):
    before, ids = state(model), random_ids(2, 60)
    plain = generated(model, DynamicCache(config=model.config), ids)
    cache = CompressedCache(model, POLICY)
    assert carries(model)
    generated(model, cache, ids)
    other = CompressedCache(model, FullCache())
    del cache
    assert carries(model)
    assert torch.equal(generated(model, other, ids), plain)
    del other
    assert as_it_was(model, before)
    assert torch.equal(generated(model, DynamicCache(config=model.config), ids), plain)
    assert as_it_was(model, before)


def test_copies_loaded_caches_and_documents_keep_model_wrapped(llama, tmp_path):
    before, cache = state(llama), CompressedCache(llama, POLICY)
    expected = generated(llama, cache, random_ids(1, 60))
    cache.save(tmp_path / "cache")
    held = [copy.copy(cache), copy.deepcopy(cache)]
    del cache
    while held:
        assert carries(llama)
        held.pop()
    assert as_it_was(llama, before)
    loaded = CompressedCache.load(tmp_path / "cache", llama)
    assert generated(llama, loaded, expected).shape[1] == 72
    del loaded
    assert as_it_was(llama, before)
    document = Document(llama, random_ids(1, 60), POLICY)
    inputs = document.inputs([[5, 6, 7]])
    del document
    llama.generate(**inputs, **OPTIONS)
    assert carries(llama)
    del inputs
    assert as_it_was(llama, before)


def test_failed_cache_creation_call_or_install_leaves_model_unchanged(llama):
    before = state(llama)
    with pytest.raises(InvalidArgumentError, match="tokenizer"):
        CompressedCache(llama, FastGen())
    assert as_it_was(llama, before)
    with pytest.raises((AttributeError, TypeError)):
        llama(random_ids(1, 9), past_key_values=CompressedCache(llama, POLICY), labels=3)
    assert as_it_was(llama, before)
    config = AutoConfig.for_model("bloom", vocab_size=128, hidden_size=16, n_layer=1, n_head=2)
    bloom = AutoModelForCausalLM.from_config(config)
    before = state(bloom)
    for make in (CompressedCache, snapkv.install):
        with pytest.raises(UnsupportedModelError, match="does not go through"):
            make(bloom)
        assert as_it_was(bloom, before)


# A cache made between the brackets of the call that uses it: `generate` was looked up before.


PADDED = torch.ones(2, 60).long().index_fill(1, torch.arange(9), 0)
INLINE = {
    "pieces": {"prefill_chunk_size": 7},
    "beams": {"num_beams": 2},
    "padded": {"attention_mask": PADDED},
}


@pytest.mark.parametrize("options", INLINE.values(), ids=INLINE)
def test_cache_made_inside_generate_call_gives_same_tokens_as_one_made_before(llama, options):
    before, ids = state(llama), random_ids(2, 60)
    cache = CompressedCache(llama, POLICY)
    expected = llama.generate(ids, past_key_values=cache, **OPTIONS, **options)
    del cache
    assert "generate" not in vars(llama)
    tokens = llama.generate(
        ids, past_key_values=CompressedCache(llama, POLICY), **OPTIONS, **options
    )
    assert torch.equal(tokens, expected)
    assert as_it_was(llama, before)


def test_cache_made_inside_generate_call_supports_streaming_refusals_and_drafts(llama):
    seen, ids = Recorder(), random_ids(1, 60) % 9 + 3

    def own(model, input_ids, streamer=None, **_):
        streamer.put(input_ids)
        streamer.end()
        return input_ids

    def inline(**options):
        return llama.generate(
            ids, past_key_values=CompressedCache(llama, POLICY), **OPTIONS, **options
        )

    inline(custom_generate=own, streamer=seen)
    assert seen.tokens[-1] == "end"
    with pytest.raises(InvalidArgumentError, match="use_cache: the value must be True"):
        inline(use_cache=False)
    assert torch.equal(inline(prompt_lookup_num_tokens=3), inline())


# What others do in the meantime.


def test_forward_replaced_by_another_library_is_kept_when_drafting(llama):
    """accelerate replaces `forward` in this way; the replacement is back after the prompt."""
    ids, own = random_ids(1, 60) % 9 + 3, llama.forward
    llama.forward = hooked = functools.partial(own)
    options = {"past_key_values": CompressedCache(llama, POLICY), **OPTIONS}
    looked = llama.generate(ids, **options, prompt_lookup_num_tokens=3)
    assert llama.forward is hooked
    del llama.forward
    plain = {**OPTIONS, "past_key_values": CompressedCache(llama, POLICY)}
    assert torch.equal(looked, llama.generate(ids, **plain))


def test_concurrent_drafting_threads_generate_same_tokens_as_alone(llama, monkeypatch):
    """Both threads wait for their drafts while each has replaced `forward` of the shared model."""
    met, waited = threading.Barrier(2, timeout=60), threading.local()

    class Meeting(PromptLookupCandidateGenerator):
        def get_candidates(self, *args, **options):
            if not hasattr(waited, "once"):
                waited.once = met.wait()
            return super().get_candidates(*args, **options)

    def answer(seed):
        ids = random_ids(1, 60, seed) % 9 + 3
        options = {"past_key_values": CompressedCache(llama, POLICY), **OPTIONS}
        return llama.generate(ids, **options, prompt_lookup_num_tokens=3)

    expected = [answer(0), answer(1)]
    monkeypatch.setattr(generation_utils, "PromptLookupCandidateGenerator", Meeting)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(answer, (0, 1)))
    assert all(map(torch.equal, answers, expected))
    assert "forward" not in vars(llama)


def test_attention_implementation_set_after_cache_creation_is_kept(model):
    name = "eager" if model.config.get_text_config()._attn_implementation == "sdpa" else "sdpa"
    cache = CompressedCache(model, POLICY)
    model.set_attn_implementation(name)
    before = configs(model)
    with pytest.raises(CacheMismatchError, match="another attention implementation"):
        model(random_ids(1, 60), past_key_values=cache)
    again = CompressedCache(model, POLICY)
    del cache
    gc.collect()
    assert model.config.get_text_config()._attn_implementation == f"snapkv|{name}"
    model(random_ids(1, 60), past_key_values=again)
    del again
    assert configs(model) == before
    assert not vars(model).keys() & set(METHODS)


def test_generate_replaced_after_cache_creation_is_kept_and_announces_prompts(llama):
    cache, ids = CompressedCache(llama, POLICY), random_ids(1, 60)
    expected, inner = generated(llama, CompressedCache(llama, POLICY), ids), llama.generate
    calls = []

    def noting(*args, **kwargs):
        calls.append(args)
        return inner(*args, **kwargs)

    llama.generate = noting
    assert torch.equal(generated(llama, cache, ids), expected)
    del cache
    assert llama.generate is noting
    assert not vars(llama).keys() & set(METHODS[1:])
    assert llama.config._attn_implementation == "sdpa"
    generated(llama, None, ids)
    assert torch.equal(generated(llama, CompressedCache(llama, POLICY), ids), expected)
    assert len(calls) == 3
    snapkv.uninstall(llama)
    assert llama.generate is noting


# Copies of the model.


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copied_model_works_with_its_own_caches_and_is_restored_afterwards(model, copied):
    names, ids = configs(model), random_ids(1, 60)
    cache = CompressedCache(model, POLICY)
    other = copied(model)
    assert other.generate.model is other
    expected = generated(model, cache, ids)
    its_own = CompressedCache(other, POLICY)
    del cache
    assert carries(other)
    assert configs(model) == names
    assert torch.equal(generated(other, its_own, ids), expected)
    del its_own
    assert configs(other) == names
    assert not vars(other).keys() & {*METHODS, module.INSTALLATION}
    assert vars(model).keys() == vars(other).keys()


@pytest.mark.parametrize("first", ["outer", "inner"])
def test_caches_of_model_and_of_its_inner_model_restore_shared_config(llama, first):
    names, ids = configs(llama), random_ids(1, 60)
    models = {"outer": llama, "inner": llama.model}
    caches = {name: CompressedCache(model, POLICY) for name, model in models.items()}
    del caches[first]
    with torch.no_grad():
        for name, cache in caches.items():
            models[name](ids, past_key_values=cache)
    del cache
    caches.clear()
    assert configs(llama) == names
    assert module.INSTALLATION not in vars(llama) | vars(llama.model)


def test_model_can_be_deleted_before_its_cache():
    model = tiny_model.__wrapped__("llama")
    config, cache, gone = model.config, CompressedCache(model, POLICY), weakref.ref(model)
    del model
    assert gone() is None
    assert config._attn_implementation == "snapkv|sdpa"
    del cache
    assert config._attn_implementation == "sdpa"


# By hand.


def test_explicit_install_stays_without_caches_until_uninstalled(model):
    before = state(model)
    plain = model(random_ids(1, 30)).logits
    installed = snapkv.install(model)
    assert carries(model)
    generated(model, CompressedCache(model, POLICY), random_ids(1, 60))
    gc.collect()
    assert carries(model)
    assert torch.equal(model(random_ids(1, 30)).logits, plain)
    installed.uninstall()
    assert as_it_was(model, before)
    installed.uninstall()
    assert as_it_was(model, before)


def test_with_block_and_uninstall_restore_model_and_with_block_waits_for_caches(llama):
    before = state(llama)
    snapkv.install(llama)
    with snapkv.install(llama), snapkv.install(llama) as inner:
        inner.uninstall()
        assert carries(llama)
    gc.collect()
    assert carries(llama)
    for _ in range(2):
        snapkv.uninstall(llama)
        assert as_it_was(llama, before)
    cache = None

    def failing():
        nonlocal cache
        with snapkv.install(llama):
            cache = CompressedCache(llama, POLICY)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        failing()
    assert carries(llama)
    cache = None
    assert as_it_was(llama, before)


def test_live_cache_is_refused_after_uninstall_until_another_cache_is_made(llama):
    before, ids, policy = state(llama), random_ids(1, 60), FullCache()
    cache, expected = CompressedCache(llama, policy), CompressedCache(llama, policy)
    for each in (cache, expected):
        llama(ids, past_key_values=each)
    token, seen = ids[:, :1], cache.report()
    logits = llama(token, past_key_values=expected).logits
    snapkv.uninstall(llama)
    assert as_it_was(llama, before)
    for _ in range(2):
        with pytest.raises(CacheMismatchError, match="another attention implementation"):
            llama(token, past_key_values=cache)
        assert cache.report() == seen, "nothing was read"
    other = CompressedCache(llama, policy)
    assert torch.equal(llama(token, past_key_values=cache).logits, logits)
    del other
    assert carries(llama), "the older ones still count"
    del each, cache, expected
    gc.collect()  # the refusals' tracebacks
    assert as_it_was(llama, before)


@pytest.mark.parametrize("what", [torch.nn.Linear(2, 2), "llama"], ids=repr)
@pytest.mark.parametrize("change", [snapkv.install, snapkv.uninstall])
def test_install_and_uninstall_refuse_objects_that_are_not_models(what, change):
    with pytest.raises(InvalidTypeError, match="model: expected a PreTrainedModel of transformers"):
        change(what)


RELATED = {
    "a copy": copy.deepcopy,
    "a shallow copy": copy.copy,
    "of its config": lambda m: AutoModelForCausalLM.from_config(copy.deepcopy(m.config)),
    "a part of it": lambda m: m.model,
}


@pytest.mark.parametrize("related", RELATED.values(), ids=RELATED)
def test_uninstall_restores_copy_or_part_of_model_with_caches(llama, related):
    cache, before = CompressedCache(llama, POLICY), vars(llama).keys() - {*METHODS}
    other = related(llama)
    snapkv.uninstall(other)
    assert other.config._attn_implementation == "sdpa"
    assert not vars(other).keys() & {*METHODS, module.INSTALLATION}
    again = CompressedCache(llama, POLICY)
    assert generated(llama, cache, random_ids(1, 60)).shape == (1, 66)
    del cache, again
    assert llama.config._attn_implementation == "sdpa"
    assert vars(llama).keys() == before - {module.INSTALLATION}


class Adapted:
    """A model wrapped in adapters, like a `PeftModel`."""

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)

    def get_base_model(self):
        return self.model


def test_model_inside_adapters_is_wrapped_and_restored(llama):
    before = state(llama)
    snapkv.install(Adapted(llama))
    assert carries(llama)
    snapkv.uninstall(Adapted(llama))
    assert as_it_was(llama, before)


# Any thread, any time.


def test_caches_made_and_deleted_in_many_threads_leave_model_restored(llama):
    before, ids = state(llama), random_ids(1, 40)
    expected = call(llama, CompressedCache(llama, POLICY), ids)

    def work(seed):
        for turn in range(15):
            cache = CompressedCache(llama, POLICY)
            if (turn + seed) % 5 == 0:
                assert torch.equal(call(llama, cache, ids), expected)
            if turn % 3 == 0:
                cache = copy.deepcopy(cache)
            if turn % 7 == 0:
                cache.circle = cache  # for the collector, in whichever thread it runs
                gc.collect()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [None] * 4
    gc.collect()
    assert as_it_was(llama, before)


def batch_options():
    """Return options for four new tokens and a small pool of blocks."""
    limits = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    pool = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    config = GenerationConfig(**limits)
    return {"generation_config": config, "continuous_batching_config": pool}


def continuously(model, ids):
    """Return the tokens that continuous batching generates after each row."""
    found = model.generate_batch(ids.tolist(), progress_bar=False, **batch_options())
    return [each.generated_tokens for each in found.values()]


def managed(model, ids):
    """Return the same tokens as `continuously`, from a manager that the caller starts."""
    manager = model.init_continuous_batching(**batch_options())
    manager.start()
    manager.add_requests(ids.tolist())
    found = [manager.get_result().generated_tokens for _ in ids]
    manager.stop(block=True)
    manager.destroy()
    return found


@pytest.mark.parametrize(
    ("batching", "implementation"), [(continuously, "eager"), (managed, "sdpa")]
)
def test_continuous_batching_gives_same_tokens_with_and_without_install(batching, implementation):
    model, ids = copy.deepcopy(tiny_model("llama", implementation)), random_ids(1, 30)
    expected = batching(model, ids)
    with snapkv.install(model):
        cache = CompressedCache(model, POLICY)
        text = model.generate(ids, past_key_values=cache, **OPTIONS)
        assert batching(model, ids) == expected
        if batching is managed:
            assert model.config._attn_implementation == implementation
            with pytest.raises(CacheMismatchError, match="another attention implementation"):
                model(ids[:, :1], past_key_values=cache)
            again = CompressedCache(model, POLICY)
            assert torch.equal(model.generate(ids, past_key_values=again, **OPTIONS), text)
        assert model.config._attn_implementation == f"snapkv|{implementation}"
        model.generate(torch.cat([text, ids], dim=1), past_key_values=cache, **OPTIONS)
    del cache
    if batching is managed:
        del again
    assert model.config._attn_implementation == implementation
    assert not set(METHODS) & set(vars(model))


@pytest.mark.parametrize(
    ("family", "changes", "implementation"),
    [
        ("gpt2", {"reorder_and_upcast_attn": True}, "eager"),
        ("gemma4_text", KINDS["shared"][2] | {"head_dim": 8}, "flex_attention"),
    ],
)
def test_model_that_reads_attention_implementation_name_is_refused(family, changes, implementation):
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    if family == "gemma4_text" and not hasattr(model.config, "kv_sharing_modes"):
        pytest.skip("transformers: names no layers that share keys, which are refused anyway")
    model.set_attn_implementation(implementation)
    before = dict(vars(model))
    for use in (snapkv.install, CompressedCache):
        with pytest.raises(UnsupportedModelError, match="attn_implementation='sdpa'"):
            use(model)
        assert model.config._attn_implementation == implementation
        assert vars(model) == before
    model.set_attn_implementation("sdpa")
    CompressedCache(model, POLICY)


def test_shallow_copy_gets_its_own_methods_and_is_restored(llama):
    cache, other = CompressedCache(llama, POLICY), copy.copy(llama)
    its_own = CompressedCache(other, POLICY)
    assert other.generate.model is other
    assert llama.generate.model is llama
    del cache
    assert other.config._attn_implementation == "snapkv|sdpa", "they share a config"
    assert generated(other, its_own, random_ids(1, 60)).shape == (1, 66)
    del its_own
    assert llama.config._attn_implementation == "sdpa"
    assert not (vars(other).keys() | vars(llama).keys()) & {*METHODS, module.INSTALLATION}


MOMENTS = ("register_attention", "announce_prompts", "_text_configs", "Use")


@pytest.mark.parametrize("moment", MOMENTS)
def test_last_cache_can_be_deleted_while_next_one_is_being_made(llama, monkeypatch, moment):
    before, caches = state(llama), [CompressedCache(llama, POLICY)]
    inner = getattr(module, moment)

    def losing(*args):
        caches.clear()
        return inner(*args)

    monkeypatch.setattr(module, moment, losing)
    cache = CompressedCache(llama, POLICY)
    assert not caches
    assert carries(llama)
    assert generated(llama, cache, random_ids(1, 60)).shape == (1, 66)
    del cache
    assert as_it_was(llama, before)


def test_cyclic_cache_can_be_collected_during_forward_pass_without_it(llama):
    """Garbage collection runs during a forward pass of the same model without a cache."""
    ids, before = random_ids(1, 40), state(llama)
    plain = llama(ids).logits
    cache = CompressedCache(llama, POLICY)
    cache.circle = cache
    del cache
    hook = llama.model.layers[1].register_forward_hook(lambda *_: gc.collect() and None)
    assert torch.equal(llama(ids).logits, plain)
    hook.remove()
    assert as_it_was(llama, before)
