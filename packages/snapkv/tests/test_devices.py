"""Everything once more on a device that is not there: no tensor is left on another one."""

import copy

import pytest
import torch

from snapkv import (
    H2O,
    RKV,
    TOVA,
    AdaKV,
    CompressedCache,
    CriticalKV,
    Document,
    ExpectedAttention,
    FastGen,
    FullCache,
    KeyDiff,
    KVzip,
    LagKV,
    PromptThenDecode,
    PyramidKV,
    Random,
    Scissorhands,
    SnapKV,
    StreamingLLM,
    prefill,
)
from snapkv.decoding import CandidateTree, Medusa
from snapkv.hf import fidelity
from snapkv.kvzip import read_context
from tests.decoding.heads import random_heads
from tests.families import ONCE, random_ids, tiny_model
from tests.pairs import pairs
from tests.pretended import Pretended, pretending

pytestmark = pytest.mark.devices
PROMPT, NEW = 64, 6
SNAPKV = SnapKV(16, window_size=4, kernel_size=3)
BUDGET = {"budget": 24, "window_size": 4}
CACHES = {
    "snapkv": (SNAPKV, {}),
    "ratio": (SnapKV(keep_ratio=0.3, window_size=4), {}),
    "per query head": (SnapKV(16, window_size=4, group_reduce="none"), {}),
    "static": (SNAPKV, {"storage": "static"}),
    "int8": (SNAPKV, {"quantize": "int8"}),
    "int4": (SNAPKV, {"quantize": "int4"}),
    "turns": (SNAPKV, {"turns": "compress"}),
    "recall": (SNAPKV, {"recall": "host"}),
    "pyramidkv": (PyramidKV(**BUDGET), {}),
    "adakv": (AdaKV(SNAPKV), {}),
    "criticalkv": (CriticalKV(SNAPKV), {}),
    "keydiff": (KeyDiff(**BUDGET), {}),
    "lagkv": (LagKV(**BUDGET, lag_size=6), {}),
    "expected attention": (ExpectedAttention(**BUDGET), {}),
    "random": (Random(**BUDGET), {}),
    "h2o": (H2O(24), {}),
    "tova": (TOVA(24), {}),
    "streaming-llm": (StreamingLLM(24), {}),
    "streaming-llm, original": (StreamingLLM(24, positions="original"), {}),
    "scissorhands": (Scissorhands(24), {}),
    "r-kv": (RKV(24, evict_every=2), {}),
    "fastgen": (FastGen(special_ids=(1, 2), punctuation_ids=(5, 6)), {}),
    "prompt, then decode": (PromptThenDecode(prompt=SNAPKV, decode=TOVA(24)), {}),
    "full": (FullCache(), {}),
}
OPTIONS = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
IDS = random_ids(2, PROMPT)


@pytest.fixture
def require_same(monkeypatch):
    """Run something on the CPU and on the device: it must give the same, and give it there."""
    monkeypatch.setattr(fidelity, "_is_behind", lambda states: isinstance(states, Pretended))

    def require(run, family="llama", implementation="sdpa"):
        here = tiny_model(family, implementation)
        expected = run(here, lambda tensor: tensor)
        with pretending() as device:
            there = copy.deepcopy(here).to(device)
            got = run(there, lambda tensor: tensor.to(device))
            assert got.device == device
            got = got.cpu()
        torch.testing.assert_close(got, expected)

    return require


def new_cache(model, name):
    policy, options = CACHES[name]
    return CompressedCache(model, policy, **options)


def generated(model, put, name="snapkv", ids=IDS, **options):
    cache = new_cache(model, name)
    return model.generate(put(ids), past_key_values=cache, **OPTIONS, **options)


MIXED = {
    "sum": lambda here, there: there + here,
    "index of the host": lambda here, there: here[there.long()],
    "values put from the host": lambda here, there: there.index_put_((there.long(),), here),
    "joined numbers": lambda here, there: torch.stack([there.sum(), here.sum()]),
}


@pytest.mark.parametrize("mix", MIXED.values(), ids=MIXED)
def test_tensors_of_two_devices_are_refused(mix):
    with pretending() as device, pytest.raises(RuntimeError, match="all tensors on one device"):
        mix(torch.ones(3), torch.ones(3, device=device))


@pytest.mark.parametrize("pads", [0, 9])
@pytest.mark.parametrize("name", CACHES)
def test_every_method_and_storage(name, pads, require_same):
    mask = torch.ones_like(IDS)
    mask[1, :pads] = 0
    require_same(lambda model, put: generated(model, put, name, attention_mask=put(mask)))


@pytest.mark.parametrize(("family", "implementation"), ONCE)
def test_every_family(family, implementation, require_same):
    require_same(lambda model, put: generated(model, put), family, implementation)


@pytest.mark.parametrize("name", ["snapkv", "adakv", "h2o", "int4"])
def test_beams(name, require_same):
    require_same(lambda model, put: generated(model, put, name, num_beams=3))


@pairs(name=("snapkv", "static", "adakv", "full"), drafts=("medusa", "prompt lookup"))
def test_drafts(name, drafts, require_same):
    def run(model, put):
        options = {"prompt_lookup_num_tokens": 3}
        if drafts == "medusa":
            tree = CandidateTree.likeliest([(0.3, 0.3)] * 3, 12)
            options = {"custom_generate": Medusa(random_heads(model), tree)}
        return generated(model, put, name, IDS[:1], **options)

    require_same(run)


@pytest.mark.parametrize(
    "reading",
    [
        lambda model: prefill.layer_by_layer(model, chunk_tokens=16),
        lambda model: prefill.selective(model, layer=2, least_tokens=4),
        lambda model: prefill.gemfilter(model, layer=2, least_tokens=4),
    ],
    ids=["layer by layer", "selective", "gemfilter"],
)
def test_long_prompts(reading, require_same):
    def run(model, put):
        with reading(model):
            return generated(model, put)

    require_same(run)


def test_a_second_reading(require_same):
    def run(model, put):
        cache = read_context(
            model, put(IDS), AdaKV(KVzip(24, window_size=4)), instruction_ids=(7, 8)
        )
        asked = torch.cat([put(IDS), put(IDS[:, :5])], dim=1)
        return model.generate(asked, past_key_values=cache, **OPTIONS)

    require_same(run)


def test_questions_to_a_document_that_was_saved(require_same, tmp_path):
    def run(model, put):
        path = tmp_path / model.device.type
        Document(model, put(IDS[:1]), SNAPKV).save(path)
        document = Document.load(path, model)
        inputs = document.inputs([[9, 8, 7], [6, 5, 4, 3, 2]])
        return model.generate(**inputs, **OPTIONS)

    require_same(run)


@pytest.mark.parametrize("name", ["snapkv", "static", "adakv", "int4", "h2o", "recall"])
def test_a_saved_cache_goes_on(name, require_same, tmp_path):
    def run(model, put):
        cache, path = new_cache(model, name), tmp_path / model.device.type
        text = model.generate(put(IDS), past_key_values=cache, **OPTIONS)
        cache.save(path)
        loaded = CompressedCache.load(path, model)
        return model.generate(text, past_key_values=loaded, **OPTIONS)

    require_same(run)
