"""What any method has kept of a document, in any bits, answers in an engine as in the library."""

import random

import pytest
import torch

from snapkv import (
    AdaKV,
    CompressedCache,
    FullCache,
    KeyDiff,
    KVzap,
    KVzip,
    PyramidKV,
)
from snapkv.cache.saving.files import seal_of
from snapkv.hf.identity import identity_of
from snapkv.kvzip import read_context
from snapkv.library.blending import blend
from snapkv.library.joining import Part
from snapkv.library.stored import read_document
from snapkv_vllm.documents.prefix import CachedPrefix
from tests.gates import drawn_gate
from tests.serving.vllm.engines import small_engine
from tests.serving.vllm.models import generated, ids_of
from tests.serving.vllm.test_documents import SHARING, ask

PAGE = 32
TOKENS_ASKED = 40
BITS = (None, None, "int8", "int4", "K8V4")
SIZES = {"max_model_len": 2048, "max_num_batched_tokens": 96, "kv_cache_memory_bytes": 100 << 20}


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "prefix-caching"])
def engine(small, request):
    """In steps so short that a question takes several."""
    options = SIZES | {"enable_prefix_caching": request.param}
    with small_engine(small, budget=64, policy="adakv", sharing=SHARING, **options) as running:
        yield running
        running.require_empty()


def drawn_method(small, draw, tokens):
    """Of any kind: equal heads, heads of different length, and layers."""
    budget, config = draw.randrange(20, tokens * 3 // 4), small.model.config
    sizes = {"budget": budget, "window_size": draw.choice([1, 4, 8])}
    gate = drawn_gate(config.num_hidden_layers, small.kv_heads, config.head_dim)
    scores = [KVzip(**sizes), KVzap(**sizes, gate=gate), KeyDiff(**sizes)]
    one = draw.choice(scores)
    kinds = [FullCache(), one, one, AdaKV(one), AdaKV(one), PyramidKV(**sizes)]
    return draw.choice(kinds)


def read(small, ids, policy):
    row = torch.tensor([ids])
    if policy.needs_reconstruction_pass:
        return read_context(small.model, row, policy, instruction_ids=(5, 9, 2))
    cache = CompressedCache(small.model, policy)
    with torch.no_grad():
        small.model(row, past_key_values=cache)
    return cache


def held(engine, small, name, path):
    """Have an engine hold the document of a file."""
    model = identity_of(small.model)
    document = read_document(path, model=model)
    ids, head_tokens = document.token_ids.tolist(), document.head_tokens.tolist()
    blocks = engine.asked("adopt", name, vars(CachedPrefix.laid_out(ids, head_tokens, PAGE)))
    given = (str(path), blocks, model, seal_of(path), 1 << 28)
    assert engine.llm.collective_rpc("snapkv_fill_document", args=given) == [""]


def librarys(small, path, prompts):
    """What a library answers whose document the file is, with nothing read again."""
    answers = []
    for prompt in prompts:
        cache, beside = CompressedCache.load_with(path, small.model)
        part = Part(input_ids=beside["input_ids"], cache=cache)
        joined = blend(small.model, [part], FullCache(), recompute=0)
        answers.append(generated(small.model, prompt, joined, TOKENS_ASKED))
    return answers


@pytest.mark.parametrize("seed", range(4))
def test_every_record_answers_as_in_the_library(engine, small, tmp_path, seed):
    draw, before = random.Random(seed), engine.free_blocks
    expected, prompts = {}, {}
    for number in range(3):
        ids = ids_of(draw.randrange(30, 400), seed=10 * seed + number)
        name, path = str(number), tmp_path / str(number)
        policy = drawn_method(small, draw, len(ids))
        beside = {"input_ids": torch.tensor([ids])}
        read(small, ids, policy).save(path, beside=beside, bits=draw.choice(BITS))
        held(engine, small, name, path)
        prompts[name] = [ids + ids_of(draw.randrange(1, 150), seed=one) for one in range(2)]
        expected[name] = librarys(small, path, prompts[name])
    taken = engine.free_blocks
    for name, asked in prompts.items():
        assert ask(engine, name, asked, TOKENS_ASKED) == expected[name], name
        assert [ask(engine, name, [one], TOKENS_ASKED)[0] for one in asked] == expected[name]
    assert engine.free_blocks == taken
    for name in prompts:
        engine.asked("drop", name)
    assert engine.free_blocks == before
    assert not engine.leftovers()
