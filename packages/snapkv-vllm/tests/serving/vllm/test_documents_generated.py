"""Random batches of requests, with and without documents, in too small a pool."""

import functools
import random
from dataclasses import dataclass

import pytest

from snapkv import AdaKV, SnapKV
from snapkv_vllm.documents.protocol import BUDGET, DOCUMENT, INSTRUCTION, REGISTER
from snapkv_vllm.documents.sharing import Sharing
from tests.serving.vllm.conftest import SECOND_RUNNER, SLOW_ON_SECOND
from tests.serving.vllm.engines import greedy, small_engine
from tests.serving.vllm.models import ids_of
from tests.serving.vllm.test_documents import INSTRUCTION_IDS, Library
from tests.serving.vllm.test_generated import take

PAGE, BLOCKS = 32, 24
REQUESTS = 30
ROUNDS = 1 if SECOND_RUNNER else 3
CHUNK = 60


@dataclass(frozen=True)
class Text:
    """A document: kept in so many blocks, or whole."""

    name: str
    tokens: int
    seed: int
    budget: int

    @property
    def ids(self):
        return ids_of(self.tokens, seed=self.seed)

    @property
    def kept(self):
        return -(-self.budget // PAGE) * PAGE

    @property
    def prompt(self):
        return [*self.ids, 1]

    @property
    def sampling(self):
        own = {REGISTER: self.name, INSTRUCTION: list(INSTRUCTION_IDS), BUDGET: self.budget}
        return greedy(1, extra_args=own)


@dataclass(frozen=True)
class Asked:
    """A question about a document, or one without."""

    text: Text | None
    question: int
    seed: int
    tokens: int

    @property
    def ids(self):
        return (self.text.ids if self.text else []) + self.ending

    @property
    def ending(self):
        return ids_of(self.question, seed=self.seed)

    @property
    def sampling(self):
        own = {DOCUMENT: self.text.name} if self.text else {"snapkv_window_size": 8}
        return greedy(self.tokens, extra_args=own)


@pytest.fixture(scope="module", params=["snapkv", "adakv"])
def method(request):
    """Whether heads keep different numbers of tokens."""
    return request.param


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, marks=SLOW_ON_SECOND), True],
    ids=["plain", "prefix-caching"],
)
def engine(small, method, request):
    """Of few blocks and short steps, so that requests are preempted and pieces are cut."""
    with small_engine(
        small,
        budget=64,
        policy=method,
        sharing=Sharing(chunk_tokens=CHUNK, most_bytes=small.blocks_bytes(7, PAGE)),
        max_model_len=512,
        kv_cache_memory_bytes=small.blocks_bytes(BLOCKS, PAGE),
        max_num_batched_tokens=90,
        enable_prefix_caching=request.param,
    ) as running:
        yield running
        assert running.preempted > 0, "the pool was large enough"


@pytest.fixture(scope="module")
def expected(small, method):
    def answer(asked):
        if asked.text is None:
            policy = SnapKV(64, window_size=8)
            policy = AdaKV(policy) if method == "adakv" else policy
            return small.answer(asked.ids, policy, asked.tokens)
        text = asked.text
        if text.kept >= text.tokens // PAGE * PAGE:
            return small.answer(asked.ids, SnapKV(4096), asked.tokens)
        library = Library(small.model, text.kept, CHUNK, method=method)
        return library.answer(text.ids, asked.ending, asked.tokens)

    return functools.cache(answer)


def draw_text(draw, name, seed):
    return Text(
        name=name,
        tokens=draw.randrange(35, 400),
        seed=seed,
        budget=draw.choice([1, 20, 33, 64, 70, 160]),
    )


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_every_answer_is_the_librarys(engine, expected, seed):
    """Documents come and go while they are used, registrations are aborted and preempted."""
    draw = random.Random(seed)
    texts, refused, asked, answers, under_way = [], [], {}, {}, {}
    for number in range(REQUESTS):
        if len(texts) + len(under_way) < 3 and not under_way and draw.random() < 0.6:
            text = draw_text(draw, f"text-{seed}-{number}", seed=100 * seed + number)
            (name,) = engine.start([text.prompt], text.sampling)
            under_way[name] = text
        if texts and draw.random() < 0.15:
            gone = texts.pop(draw.randrange(len(texts)))
            engine.asked("drop", gone.name)
        one = Asked(
            text=draw.choice([*texts, *texts, None]),
            question=draw.randrange(1, 60),
            seed=1000 * seed + number,
            tokens=draw.randrange(1, 90),
        )
        (name,) = engine.start([one.ids], one.sampling)
        asked[name] = one
        for _ in range(draw.randrange(6)):
            take(engine.step(), answers)
        for name in [name for name in under_way if name in answers]:
            text = under_way.pop(name)
            if text.name in engine.scheduler._documents._held:
                texts.append(text)
            else:  # others leave no room, among them some that were dropped and are in use
                refused.append(text)
        running = sorted({*asked, *under_way} - answers.keys())
        if running and draw.random() < 0.15:
            gone = draw.choice(running)
            engine.abort(gone)
            asked.pop(gone, None)
            under_way.pop(gone, None)
    while engine.scheduler.requests:
        take(engine.step(), answers)
    assert {name: answers[name] for name in asked} == {
        name: expected(one) for name, one in asked.items()
    }
    assert len(refused) < 5
    for text in [*texts, *under_way.values()]:
        engine.asked("drop", text.name)
    engine.require_empty()
