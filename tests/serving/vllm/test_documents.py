"""Documents that an engine has read twice, and requests that begin with them."""

import pytest
import torch

from snapkv import KVzip
from snapkv.kvzip import read_context
from snapkv.serving.documents.sharing import Sharing
from snapkv.serving.documents.words import DOCUMENT, DROP, INSTRUCTION, REGISTER, ROOM
from tests.serving.vllm.engines import greedy, small_engine
from tests.serving.vllm.models import SmallModel, ids_of

SIZES = {"max_model_len": 2048, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 100 << 20}
INSTRUCTION_IDS = [5, 9, 2]
SHARING = Sharing(chunk_tokens=100)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return SmallModel(tmp_path_factory.mktemp("documents"), max_position_embeddings=4096)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "prefix-caching"])
def engine(small, request):
    options = SIZES | {"enable_prefix_caching": request.param}
    with small_engine(small, budget=64, sharing=SHARING, **options) as running:
        yield running


def register(engine, name, ids, **more):
    """What the engine says it holds."""
    own = {REGISTER: name, INSTRUCTION: INSTRUCTION_IDS, **more}
    (output,) = engine.outputs([[*ids, 1]], greedy(1, extra_args=own))
    return output.kv_transfer_params


def ask(engine, name, prompts, tokens=6):
    return engine.answers(prompts, greedy(tokens, extra_args={DOCUMENT: name}))


def drop(engine, name):
    engine.outputs([[1]], greedy(1, extra_args={DROP: name}))


def room(engine):
    (output,) = engine.outputs([[1]], greedy(1, extra_args={ROOM: "all"}))
    return output.kv_transfer_params


def library(small, ids, kept, chunk=100):
    """The cache of the document, as the library reads it."""
    chunk = min(chunk, len(ids) - len(INSTRUCTION_IDS))
    policy = KVzip(kept, window_size=min(32, kept // 2), chunk_tokens=chunk)
    return read_context(small.model, torch.tensor([ids]), policy, instruction_ids=INSTRUCTION_IDS)


def librarys_answer(small, ids, question, kept, tokens=6, chunk=100):
    prompt = torch.tensor([ids + question])
    output = small.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=library(small, ids, kept, chunk),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
    )
    return output[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("tokens", [103, 256, 300, 311, 700])
def test_a_document_is_kept_as_by_the_library_and_answers_as_there(engine, small, tokens):
    ids, before = ids_of(tokens, seed=tokens), engine.free_blocks
    with engine.watching() as watched:
        held = register(engine, "one", ids)
    assert (held["tokens"], held["kept_tokens"], len(held["blocks"][0])) == (tokens, 64, 2)
    expected = library(small, ids, 64)
    for layer, kept in enumerate(watched.of(ids)):
        assert torch.equal(kept, expected.kept_positions(layer)), layer
    assert engine.free_blocks == before - 2
    questions = [ids_of(length, seed=length) for length in (1, 7, 31, 32, 70)]
    prompts = [ids + question for question in questions]
    answers = [librarys_answer(small, ids, question, 64) for question in questions]
    assert ask(engine, "one", prompts) == answers
    assert [ask(engine, "one", [prompt])[0] for prompt in prompts] == answers
    assert engine.free_blocks == before - 2
    drop(engine, "one")
    assert engine.free_blocks == before
    assert not engine.leftovers()
