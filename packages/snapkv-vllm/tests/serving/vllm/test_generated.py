"""Answers of random batches equal those of the library, also with ragged heads."""

import random
from dataclasses import dataclass

import pytest

from snapkv import AdaKV, SnapKV, default_policy
from snapkv.policies.default import by_layer
from snapkv.validation import DEFAULT
from tests.serving.vllm.conftest import SECOND_RUNNER
from tests.serving.vllm.engines import greedy, small_engine
from tests.serving.vllm.models import ids_of

PAGE = 32
SINKS = (DEFAULT, "across-layers")
BLOCKS = 15  # 14 to give away: the 12 of one longest request, and two more
REQUESTS = 24
ROUNDS = 1 if SECOND_RUNNER else 2


@dataclass(frozen=True)
class Asked:
    """A request: its prompt is an opening that others share, and an ending of its own."""

    opening: int
    ending: int
    seed: int
    budget: int
    window: int
    tokens: int
    method: str
    voters: int | None
    safeguard: float

    @classmethod
    def random(cls, draw, seed, method):
        """Where heads keep different numbers, a share of 1 parts nothing; the default has sinks."""
        window, least = draw.choice([1, 5, 16, 32]), 4 if method in SINKS else 1
        return cls(
            method=method,
            voters=draw.choice([None, None, 3, 16, 64]),
            safeguard=draw.choice([0.01, 0.2, 0.2, 0.5, 1]),
            opening=draw.choice([0, 32, 70, 140]),
            ending=draw.randrange(1, 170),
            seed=seed,
            budget=draw.choice([0, 512, *(window + more for more in (least, 8, 31, 32, 60))]),
            window=window,
            tokens=draw.randrange(1, 60),
        )

    @property
    def ids(self):
        return ids_of(self.opening) + ids_of(self.ending, seed=self.seed)

    @property
    def policy(self):
        given = {"budget": self.budget or 512, "window_size": self.window, "voters": self.voters}
        if self.method == DEFAULT:
            return by_layer(default_policy(**given))
        if self.method == "across-layers":
            return default_policy(**given)
        policy = SnapKV(**given)
        return AdaKV(policy, safeguard=self.safeguard) if self.method == "adakv" else policy

    @property
    def sampling(self):
        own = {"snapkv_budget": self.budget, "snapkv_window_size": self.window}
        own |= {"snapkv_voters": self.voters} if self.voters else {}
        own |= {"snapkv_safeguard": self.safeguard} if self.method == "adakv" else {}
        return greedy(self.tokens, extra_args=own)


@pytest.fixture(
    scope="module",
    params=[
        ("snapkv", True),
        (DEFAULT, True),
        ("adakv", False),
        ("adakv", True),
        ("across-layers", False),
        ("across-layers", True),
    ],
    ids=str,
)
def engine(small, request):
    """Of few blocks and short chunks, so that requests are preempted and prompts are cut."""
    policy, caching = request.param
    with small_engine(
        small,
        budget=64,
        policy=policy,
        max_model_len=384,
        kv_cache_memory_bytes=small.blocks_bytes(BLOCKS, PAGE),
        max_num_batched_tokens=90,
        enable_prefix_caching=caching,
    ) as running:
        running.method = policy
        yield running
        assert running.preempted > 0, "the pool was large enough"


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_answers_of_random_batches_equal_those_of_the_library(engine, small, seed):
    """Random lengths, budgets, windows, arrivals and aborts, in a pool that is too small."""
    draw = random.Random(seed)
    asked, answers = {}, {}
    for number in range(REQUESTS):
        one = Asked.random(draw, 1000 * seed + number, engine.method)
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
        assert answers[name] == small.answer(one.ids, one.policy, one.tokens), one
    engine.require_empty()


def take(outputs, answers):
    for output in outputs:
        answers[output.request_id] = list(output.outputs[0].token_ids)
