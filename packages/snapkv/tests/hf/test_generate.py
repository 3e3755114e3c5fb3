"""`model.generate` on a compressed cache gives the same tokens in all of its greedy modes."""

import copy
import functools
import gc
import inspect
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import GenerationConfig, TextStreamer

from snapkv import (
    AcrossLayers,
    AdaKV,
    CacheMismatchError,
    CompressedCache,
    InvalidArgumentError,
    SnapKV,
)
from tests.families import SLIDING_LAYERS_CRASH_AFTER_DRAFTS, random_ids, tiny_model
from tests.oracle import unwrapped

PROMPT = 80
POLICY = SnapKV(36, window_size=8, kernel_size=5)
OPTIONS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
LOOKUP = {"prompt_lookup_num_tokens": 6, "max_matching_ngram_size": 1}

families = pytest.mark.parametrize("family", ["llama", "gemma3_text"])  # all full; some sliding


def generate(model, ids, policy=POLICY, **options):
    """Return generated tokens and the cache that was used."""
    cache = CompressedCache(model, policy)
    return model.generate(ids, past_key_values=cache, **{**OPTIONS, **options}), cache


def repeating(tokens=PROMPT):
    """Return a repetitive text, in which prompt lookup finds drafts."""
    return random_ids(1, tokens) % 9 + 3


@pytest.mark.parametrize(
    ("family", "tokens", "group_reduce", "pads"),
    [
        ("llama", PROMPT, "none", 30),
        ("llama", 30, "mean", 0),  # all is kept
        ("gemma3_text", PROMPT, "mean", 0),
    ],
)
def test_prompt_lookup_gives_same_tokens_as_greedy(family, tokens, group_reduce, pads):
    policy = SnapKV(36, window_size=8, kernel_size=5, group_reduce=group_reduce)
    model, ids = tiny_model(family), repeating(tokens)
    mask = torch.ones_like(ids)
    mask[:, :pads] = 0
    options = {"max_new_tokens": 16, "attention_mask": mask}
    greedy, greedy_cache = generate(model, ids, policy, **options)
    looked, cache = generate(model, ids, policy, **options, **LOOKUP)
    assert torch.equal(looked, greedy)
    kept = min(36, tokens)
    for layer in cache.compressed_layers:
        ours = cache.kept_positions(layer)[..., :kept]
        assert torch.equal(ours, greedy_cache.kept_positions(layer)[..., :kept])


ASSISTANTS = {
    "another": lambda model: tiny_model("llama", "eager"),
    "a copy": lambda model: unwrapped(model, "sdpa"),
    "itself": lambda model: model,
}


@families
@pytest.mark.parametrize("assistant", ASSISTANTS)
def test_assistant_model_gives_same_tokens_as_greedy(family, assistant):
    if family == "gemma3_text" and assistant != "another" and SLIDING_LAYERS_CRASH_AFTER_DRAFTS:
        pytest.skip("transformers: a sliding assistant with its own cache crashes at a rejection")
    model, ids = tiny_model(family), random_ids(1, PROMPT)
    greedy, _ = generate(model, ids, max_new_tokens=12)
    assistant_model = ASSISTANTS[assistant](model)
    assisted, cache = generate(model, ids, max_new_tokens=12, assistant_model=assistant_model)
    assert torch.equal(assisted, greedy)
    assert cache.get_seq_length() == PROMPT + 11


class Recorder(TextStreamer):
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.tokens.append("end")


def test_streamer_receives_the_returned_tokens():
    streamer = Recorder()
    tokens, _ = generate(tiny_model("llama"), random_ids(1, PROMPT), streamer=streamer)
    assert streamer.tokens == [*tokens[0].tolist(), "end"]


def test_second_generate_call_reads_only_new_tokens():
    """If the mask is longer than the ids, only the new ids were passed."""
    model, ids = tiny_model("llama"), random_ids(1, PROMPT)
    whole, _ = generate(model, ids, max_new_tokens=12)
    for given in (slice(None), slice(-1, None)):
        first, cache = generate(model, ids, max_new_tokens=5)
        second = model.generate(
            first[:, given],
            attention_mask=torch.ones_like(first),
            past_key_values=cache,
            **{**OPTIONS, "max_new_tokens": 7},
        )
        assert torch.equal(second[:, -7:], whole[:, -7:])
        assert cache.get_seq_length() == PROMPT + 11


def test_verified_drafts_do_not_compress_short_prompt():
    _, cache = generate(tiny_model("llama"), random_ids(1, 34) % 5 + 3, max_new_tokens=12, **LOOKUP)
    assert cache.report().kept_tokens == cache.get_seq_length() == 34 + 11


def test_inputs_embeds_give_same_tokens_as_input_ids():
    model, ids = tiny_model("llama"), random_ids(1, PROMPT)
    tokens, _ = generate(model, ids)
    embeds = model.get_input_embeddings()(ids)
    cache = CompressedCache(model, POLICY)
    new = model.generate(inputs_embeds=embeds, past_key_values=cache, **OPTIONS)
    assert torch.equal(new, tokens[:, PROMPT:])


def test_wrapped_model_gives_unchanged_tokens_without_compressed_cache():
    model, ids = tiny_model("llama"), random_ids(2, PROMPT)
    cache = CompressedCache(model, POLICY)
    plain = unwrapped(model, "sdpa").generate(ids, **OPTIONS)
    assert torch.equal(model.generate(ids, **OPTIONS), plain)
    assert torch.equal(model.generate(ids, **OPTIONS, use_cache=False), plain)
    assert cache.get_seq_length() == 0


REFUSED = {
    "healing": ({"token_healing": True}, InvalidArgumentError, "token_healing"),
    "no cache": ({"use_cache": False}, InvalidArgumentError, "use_cache: the value must be True"),
    "no option": ({"not_an_option": 3}, ValueError, "not_an_option"),
}


@pytest.mark.parametrize(("options", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_generate_call_leaves_no_announced_prompt(options, error, message):
    model, cache = tiny_model("llama"), CompressedCache(tiny_model("llama"), POLICY)
    with pytest.raises(error, match=message):
        model.generate(random_ids(1, PROMPT), past_key_values=cache, **OPTIONS, **options)
    model(random_ids(1, PROMPT + 40), past_key_values=cache)
    assert cache.report().kept_tokens == 36
    with pytest.raises(CacheMismatchError, match=r"already seen.*reset"):
        model.generate(random_ids(1, 40), past_key_values=cache, **OPTIONS)


SWITCHED_OFF = {
    "by an argument that says nothing": ((), {"use_cache": None}),
    "by a config without a name": ((GenerationConfig(use_cache=False),), {}),
    "by the checkpoint, under a config that does not say": ((GenerationConfig(),), {}),
}


@pytest.mark.parametrize(("given", "options"), SWITCHED_OFF.values(), ids=SWITCHED_OFF)
def test_disabled_use_cache_is_refused_for_every_way_of_disabling(given, options):
    model = copy.deepcopy(tiny_model("llama"))
    model.generation_config.use_cache = False
    cache = CompressedCache(model, POLICY)
    with pytest.raises(InvalidArgumentError, match="use_cache: the value must be True"):
        model.generate(random_ids(1, PROMPT), *given, past_key_values=cache, **OPTIONS, **options)
    assert cache.get_seq_length() == 0


def test_a_mask_of_more_columns_than_tokens_is_refused():
    model, ids = tiny_model("llama"), random_ids(1, PROMPT)
    cache = CompressedCache(model, POLICY)
    with pytest.raises(
        InvalidArgumentError, match=r"attention_mask: .* each of the 80 tokens, but got 90"
    ):
        model.generate(ids, attention_mask=torch.ones(1, 90), past_key_values=cache, **OPTIONS)


def test_drafts_are_read_in_separate_pass_after_prompt():
    """This also holds for `generate` of the class, which does not announce the prompt length."""
    model, ids = tiny_model("llama"), repeating()
    options = {**OPTIONS, "prompt_lookup_num_tokens": 4}
    for own in (model.generate, functools.partial(type(model).generate, model)):
        for policy in (POLICY, AdaKV(POLICY), AcrossLayers(POLICY)):
            tokens = own(ids, past_key_values=CompressedCache(model, policy), **options)
            assert torch.equal(tokens, generate(model, ids, policy)[0])
    cache = CompressedCache(model, POLICY)
    cache.expect_prompt(PROMPT - 3)
    with pytest.raises(CacheMismatchError, match="3 tokens after it"):
        model(ids, past_key_values=cache)


def test_wrapped_generate_keeps_signature_and_does_not_keep_model_alive():
    model = unwrapped(tiny_model("llama"), "sdpa")
    plain = inspect.signature(model.generate)
    cache = CompressedCache(model, POLICY)
    assert inspect.signature(model.generate) == plain
    assert "generate" in vars(model)
    ids = random_ids(1, PROMPT)
    copied = pickle.loads(pickle.dumps(model))
    assert torch.equal(generate(copied, ids)[0], generate(model, ids)[0])
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    del model, copied
    try:
        assert gone() is None
        assert cache.get_seq_length() == 0
    finally:
        gc.enable()


def test_concurrent_threads_generate_same_tokens_as_alone():
    model = tiny_model("llama")
    prompts = [random_ids(1, PROMPT, seed=seed) for seed in range(4)]
    alone = [generate(model, ids)[0] for ids in prompts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda ids: generate(model, ids)[0], prompts))
    assert all(map(torch.equal, together, alone))
