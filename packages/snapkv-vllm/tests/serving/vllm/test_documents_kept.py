"""Documents from files of the library in an engine's blocks."""

import pytest
import torch

from snapkv import CompressedCache, FullCache, SnapKV
from snapkv.cache.saving.files import seal_of
from snapkv.hf.identity import identity_of
from snapkv.library.stored import model_identity
from snapkv_vllm.documents.prefix import CachedPrefix
from snapkv_vllm.documents.protocol import DOCUMENT
from tests.serving.vllm.engines import greedy, small_engine
from tests.serving.vllm.models import generated, ids_of
from tests.serving.vllm.test_documents import SHARING, SIZES, ask
from tests.serving.vllm.test_generated import take

QUESTIONS = [ids_of(length, seed=length) for length in (1, 7, 32)]
MOST_BYTES = 1 << 28


@pytest.fixture(autouse=True)
def nothing_is_left(engine):
    """Every test drops what it has registered or adopted."""
    before = engine.free_blocks
    yield
    for name in list(engine.scheduler._documents._held):
        engine.asked("drop", name)
    assert engine.free_blocks == before


@pytest.fixture(scope="module")
def engine(small):
    options = SIZES | {"enable_prefix_caching": True}
    with small_engine(small, budget=64, sharing=SHARING, **options) as running:
        yield running


def adopt(engine, name, ids, kept):
    """The blocks that a document has, of the only group."""
    blocks = engine.asked("adopt", name, vars(CachedPrefix.laid_out(ids, [[kept]], 32)))
    return blocks and blocks[0]


def fill(engine, small, path, blocks, **changed):
    given = {"most_bytes": MOST_BYTES, **changed}
    given = {"seal": given.get("seal") or seal_of(path), **given}
    own = (str(path), [blocks], identity_of(small.model), given["seal"], given["most_bytes"])
    (said,) = engine.llm.collective_rpc("snapkv_fill_document", args=own)
    return said


def answer(small, cache, ids, question):
    """What the library answers from a cache of the document."""
    return generated(small.model, ids + question, cache, 6)


def read_once(small, ids, policy):
    cache = CompressedCache(small.model, policy)
    with torch.no_grad():
        small.model(torch.tensor([ids]), past_key_values=cache)
    return cache


def saved(small, path, ids, kept):
    """A file of the library, of a method that no server reads documents with."""
    policy = FullCache() if kept == len(ids) else SnapKV(kept, window_size=16)
    read_once(small, ids, policy).save(path, beside={"input_ids": torch.tensor([ids])})
    return path


@pytest.mark.parametrize(("tokens", "kept"), [(300, 64), (300, 96), (128, 128)])
def test_what_the_library_has_saved_answers_as_there(engine, small, tmp_path, tokens, kept):
    ids, before = ids_of(tokens, seed=tokens), engine.free_blocks
    path = saved(small, tmp_path / "document", ids, kept)
    blocks = adopt(engine, "one", ids, kept)
    assert len(blocks) * 32 == kept
    assert fill(engine, small, path, blocks) == ""
    expected = [
        answer(small, CompressedCache.load(path, small.model), ids, question)
        for question in QUESTIONS
    ]
    prompts = [ids + question for question in QUESTIONS]
    assert ask(engine, "one", prompts) == expected
    assert [ask(engine, "one", [prompt])[0] for prompt in prompts] == expected
    assert engine.free_blocks == before - kept // 32
    engine.asked("drop", "one")
    assert engine.free_blocks == before
    assert not engine.leftovers()


def test_an_adopted_document_that_is_whole_is_no_prefix_of_other_requests(engine, small, tmp_path):
    ids = ids_of(128, seed=2)
    path = saved(small, tmp_path / "document", ids, 128)
    assert fill(engine, small, path, adopt(engine, "one", ids, 128)) == ""
    question = ids_of(70, seed=3)
    ask(engine, "one", [ids + question])
    (output,) = engine.outputs([ids + question], greedy(2, extra_args={"snapkv_budget": 0}))
    assert output.num_cached_tokens in (0, None)


def test_what_does_not_fit_is_refused_in_a_line_and_the_engine_goes_on(engine, small, tmp_path):
    ids, free = ids_of(300), engine.free_blocks
    path = saved(small, tmp_path / "document", ids, 64)
    blocks = adopt(engine, "one", ids, 64)
    for changed, words in [
        ({"seal": "0" * 64}, "another one at"),
        ({"most_bytes": 1000}, "expected a saved cache of at most"),
    ]:
        assert words in fill(engine, small, path, blocks, **changed)
    missing = {"seal": "0" * 64}
    fewer = blocks[:1]
    assert "at most the 32 tokens that blocks were taken for" in fill(engine, small, path, fewer)
    assert "no file at" in fill(engine, small, tmp_path / "no", fewer, **missing)
    engine.asked("drop", "one")
    assert engine.free_blocks == free
    assert engine.answers([ids], greedy(2))


def test_no_blocks_are_taken_from_requests(engine):
    """The pool is empty but for two blocks, while a document is to hold four."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 3)
    assert adopt(engine, "one", ids_of(300), 128) is None
    pool.free_blocks(taken)
    assert len(adopt(engine, "one", ids_of(300), 128)) == 4


def test_a_document_comes_and_goes_while_requests_have_every_slot(engine, small, tmp_path):
    """Who has asked about it before it goes is answered all the same."""
    ids, before = ids_of(128, seed=5), engine.free_blocks
    engine.start([ids_of(8, seed=one) for one in range(9)], greedy(4))
    engine.step()
    assert (len(engine.scheduler.running), len(engine.scheduler.waiting)) == (8, 1)
    taken = engine.free_blocks
    path = saved(small, tmp_path / "document", ids, 128)
    assert fill(engine, small, path, adopt(engine, "one", ids, 128)) == ""
    (name,) = engine.start([ids + QUESTIONS[1]], greedy(6, extra_args={DOCUMENT: "one"}))
    engine.asked("drop", "one")
    assert (engine.free_blocks, engine.asked("holds", "one")) == (taken - 4, False)
    answers = {}
    while engine.scheduler.requests:
        take(engine.step(), answers)
    cache = CompressedCache.load(path, small.model)
    assert answers[name] == answer(small, cache, ids, QUESTIONS[1])
    assert engine.free_blocks == before


def test_documents_hold_no_more_than_they_may(engine):
    fitting = engine.asked("room")["most_tokens"] // 1600
    adopted = [adopt(engine, str(number), ids_of(1600), 1600) for number in range(fitting + 1)]
    assert all(adopted[:fitting])
    assert adopted[fitting] is None


def test_the_front_end_knows_the_model_as_the_library_does(served):
    assert model_identity(served.folder, "float32") == identity_of(served.model)
