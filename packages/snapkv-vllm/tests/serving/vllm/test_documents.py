"""Documents that an engine has read twice, and requests that begin with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from snapkv import AdaKV, KVzip
from snapkv.kvzip import read_context
from snapkv_vllm.documents.protocol import BUDGET, DOCUMENT, INSTRUCTION, REGISTER
from snapkv_vllm.documents.sharing import Sharing
from tests.serving.vllm.conftest import SECOND_RUNNER
from tests.serving.vllm.engines import greedy, small_engine
from tests.serving.vllm.models import generated, ids_of
from tests.serving.vllm.test_heads import of_prompt

SIZES = {"max_model_len": 2048, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 100 << 20}
INSTRUCTION_IDS = (5, 9, 2)
SHARING = Sharing(chunk_tokens=100)
PAGE = 32
KEPT = {"snapkv": 64, "adakv": 160}


@pytest.fixture(scope="module", params=[("snapkv", False), ("adakv", True)], ids=str)
def served(request):
    """The method, by which heads may keep different numbers of tokens, and prefix caching."""
    return request.param


@pytest.fixture(scope="module")
def method(served):
    return served[0]


@pytest.fixture(scope="module")
def engine(small, served):
    method, caching = served
    options = SIZES | {"enable_prefix_caching": caching}
    with small_engine(
        small, budget=KEPT[method], policy=method, sharing=SHARING, **options
    ) as running:
        yield running


def register(engine, name, ids, **more):
    """What the engine holds then."""
    own = {REGISTER: name, INSTRUCTION: list(INSTRUCTION_IDS), **more}
    engine.outputs([[*ids, 1]], greedy(1, extra_args=own))
    assert engine.asked("holds", name)
    return engine.scheduler._documents._held[name]


def ask(engine, name, prompts, tokens=6):
    return engine.answers(prompts, greedy(tokens, extra_args={DOCUMENT: name}))


@dataclass(frozen=True)
class Library:
    """What the library keeps of a document, and answers from it."""

    model: Any
    kept: int
    chunk: int = 100
    instruction: Sequence[int] = INSTRUCTION_IDS
    method: str = "snapkv"

    def cache(self, ids):
        chunk = min(self.chunk, len(ids) - len(self.instruction))
        policy = KVzip(self.kept, window_size=min(32, self.kept // 2), chunk_tokens=chunk)
        if self.method == "adakv":
            policy = AdaKV(policy, page_tokens=PAGE)
        row = torch.tensor([ids])
        return read_context(self.model, row, policy, instruction_ids=self.instruction)

    def answer(self, ids, question, tokens=6):
        return generated(self.model, ids + question, self.cache(ids), tokens)


@pytest.mark.parametrize("tokens", [203, 1200] if SECOND_RUNNER else [203, 256, 300, 311, 1200])
def test_a_document_is_kept_as_by_the_library_and_answers_as_there(engine, small, method, tokens):
    ids, before, kept = ids_of(tokens, seed=tokens), engine.free_blocks, KEPT[method]
    with engine.watching() as watched:
        held = register(engine, "one", ids)
    assert (len(held.prefix.token_ids), held.prefix.kept_tokens) == (tokens, kept)
    assert len(held.blocks[0]) == kept // PAGE
    library = Library(small.model, kept, method=method)
    expected, lengths = library.cache(ids), set()
    for layer, found in enumerate(watched.of(ids)):
        mine = of_prompt(found, ids)
        assert mine == of_prompt(expected.kept_positions(layer), ids), layer
        lengths |= {len(head) for head in mine}
    assert all(length % PAGE == 0 for length in lengths)
    assert lengths == {kept} if method == "snapkv" else tokens != 1200 or len(lengths) > 2
    assert engine.free_blocks == before - kept // PAGE
    questions = [ids_of(length, seed=length) for length in (1, 7, 31, 32, 70)]
    prompts = [ids + question for question in questions]
    answers = [library.answer(ids, question) for question in questions]
    assert ask(engine, "one", prompts) == answers
    assert [ask(engine, "one", [prompt])[0] for prompt in prompts] == answers
    assert engine.free_blocks == before - kept // PAGE
    engine.asked("drop", "one")
    assert engine.free_blocks == before
    assert not engine.leftovers()


def test_a_document_without_a_block_to_move_to_waits_for_some_and_hurts_nobody(small):
    """Others share the blocks it was read into, and hold nearly all of the rest."""
    sizes = {"kv_cache_memory_bytes": small.blocks_bytes(21, 32), "max_model_len": 384}
    sharing = Sharing(chunk_tokens=30, most_bytes=small.blocks_bytes(8, 32))
    options = sizes | {"enable_prefix_caching": True, "sharing": sharing}
    ids, own = (
        ids_of(320, seed=1),
        {REGISTER: "one", INSTRUCTION: list(INSTRUCTION_IDS), BUDGET: 256},
    )
    with small_engine(small, budget=4096, **options) as engine:
        others = [ids + ids_of(5, seed=2), ids_of(150, seed=3)]
        alone = engine.answers(others, greedy(20))
        for prompt in others:
            engine.start([prompt], greedy(20))
            engine.step()
        (name,) = engine.start([[*ids, 1]], greedy(1, extra_args=own))
        ended = {}
        while engine.scheduler.requests:
            ended |= {one.request_id: one for one in engine.step() if one.finished}
        assert ended.pop(name)
        assert engine.asked("holds", "one")
        assert [list(one.outputs[0].token_ids) for one in ended.values()] == alone
        assert engine.free_blocks == engine.all_blocks - 256 // PAGE
        engine.asked("drop", "one")
        engine.require_empty()
