"""Random batches of requests whose heads hold different numbers of tokens, in too small a pool."""

import functools
import random
from dataclasses import dataclass

import pytest

from snapkv import AdaKV, SnapKV
from tests.serving.vllm.conftest import SECOND_RUNNER
from tests.serving.vllm.engines import greedy, small_engine
from tests.serving.vllm.models import ids_of
from tests.serving.vllm.test_generated import take

PAGE = 32
BLOCKS = 15
REQUESTS = 20
ROUNDS = 1 if SECOND_RUNNER else 3


@dataclass(frozen=True)
class Asked:
    """A request: an opening that others share, an ending of its own; a share of 1 parts nothing."""

    opening: int
    ending: int
    seed: int
    budget: int
    safeguard: float
    tokens: int

    @classmethod
    def random(cls, draw, seed):
        return cls(
            opening=draw.choice([0, 32, 70, 140]),
            ending=draw.randrange(1, 170),
            seed=seed,
            budget=draw.choice([0, 512, 20, 33, 64, 65, 100]),
            safeguard=draw.choice([0.01, 0.2, 0.2, 0.5, 1]),
            tokens=draw.randrange(1, 70),
        )

    @property
    def ids(self):
        return ids_of(self.opening) + ids_of(self.ending, seed=self.seed)

    @property
    def policy(self):
        return AdaKV(SnapKV(self.budget or 512, window_size=8), safeguard=self.safeguard)

    @property
    def sampling(self):
        own = {"snapkv_budget": self.budget, "snapkv_safeguard": self.safeguard}
        return greedy(self.tokens, extra_args=own | {"snapkv_window_size": 8})


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "prefix-caching"])
def engine(small, request):
    """Of few blocks and short chunks, so that requests are preempted and prompts are cut."""
    with small_engine(
        small,
        budget=64,
        policy="adakv",
        max_model_len=384,
        kv_cache_memory_bytes=small.blocks_bytes(BLOCKS, PAGE),
        max_num_batched_tokens=90,
        enable_prefix_caching=request.param,
    ) as running:
        yield running
        assert running.preempted > 0, "the pool was large enough"


@pytest.fixture(scope="module")
def expected(small):
    return functools.cache(lambda asked: small.answer(asked.ids, asked.policy, asked.tokens))


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_every_answer_is_the_librarys(engine, expected, seed):
    """Preempted requests replay their answers over the heads' own tokens, several in a step."""
    draw = random.Random(seed)
    asked, answers = {}, {}
    for number in range(REQUESTS):
        one = Asked.random(draw, seed=1000 * seed + number)
        (name,) = engine.start([one.ids], one.sampling)
        asked[name] = one
        for _ in range(draw.randrange(5)):
            take(engine.step(), answers)
        if draw.random() < 0.15:
            gone = draw.choice(sorted(asked))
            if gone not in answers:
                engine.abort(gone)
                del asked[gone]
    while engine.scheduler.requests:
        take(engine.step(), answers)
    for name, one in asked.items():
        assert answers[name] == expected(one), one
    assert engine.free_blocks == engine.all_blocks
    assert engine.leftovers() == []
