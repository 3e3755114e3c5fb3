"""Blocks of histories, lent, replaced and dropped, against a worker that remembers every slot."""

import random
from dataclasses import dataclass, field

import pytest

from snapkv_vllm.agents.held import Sessions
from snapkv_vllm.names import PREFIX, SESSION
from snapkv_vllm.spans import NAME
from tests.serving.vllm.test_accounting import (
    TOKEN_BYTES,
    abort,
    answer,
    engine_config,
    request,
    simulation,
)

MOST_TOKENS = 40


@pytest.fixture(scope="module")
def config(folder):
    sessions = Sessions(most_bytes=MOST_TOKENS * TOKEN_BYTES)
    return engine_config(folder, 60, sessions=sessions)


@dataclass
class Session:
    """One that goes on until its prompts are too long."""

    name: str
    budget: int
    ids: list[int] = field(default_factory=list)
    results: list[tuple[int, int]] = field(default_factory=list)
    asks: list[str] = field(default_factory=list)  # requests under way

    def turn(self, draw):
        """The next prompt, and what becomes of its spans; now and then another than was sent."""
        start = len(self.ids) + draw.randrange(3)
        self.results.append((start, start + draw.randrange(2, 6)))
        behind = self.results[-1][1] + draw.randrange(1, 9)
        self.ids += [draw.randrange(1, 90) for _ in range(behind - len(self.ids))]
        if draw.random() < 0.1:
            self.ids[draw.randrange(len(self.ids))] = 91
        said = [{"start": a, "end": b, "do": "drop"} for a, b in self.results[:-1]]
        said += [{"start": a, "end": b, "do": "protect"} for a, b in self.results[-1:]]
        spans = {NAME: said} if self.budget % 2 == 0 else {}
        return {PREFIX + SESSION: self.name, "snapkv_budget": self.budget, **spans}


@pytest.mark.parametrize("ahead", [0, 1], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("caching", [False, True], ids=["plain", "prefix-caching"])
@pytest.mark.parametrize("seed", range(3))
def test_every_request_finds_its_historys_tokens_and_every_block_comes_back(
    config, caching, ahead, seed
):
    """Turns come while others are answered, are aborted and preempted; histories have no room."""
    draw = random.Random(seed)
    running = simulation(config, caching=caching, ahead=ahead)
    scheduler, expected, aborted = running.scheduler, {}, set()
    held, pool = scheduler._sessions, scheduler.kv_cache_manager.block_pool
    free, sessions, went_on = pool.get_num_free_blocks(), [], 0
    for number in range(150):
        sessions = [one for one in sessions if len(one.ids) < 30]
        while len(sessions) < 8:
            budget = draw.choice([0, 11, 12, 13])
            sessions.append(Session(f"{draw.choice('ab')}/{number}{len(sessions)}", budget))
        one = draw.choice(sessions)
        one.asks = [name for name in one.asks if name in scheduler.requests]
        if not one.asks or draw.random() < 0.1:
            own, name, tokens = one.turn(draw), f"r{number}", draw.randrange(1, 14)
            scheduler.add_request(request(name, list(one.ids), tokens, own))
            assert name in held._turns
            went_on += held._turns[name].history is not None
            one.asks.append(name)
            expected[name] = answer(one.ids, tokens)
            one.ids = list(expected[name])
        for _ in range(draw.randrange(4)):
            running.step()
        if draw.random() < 0.1 and scheduler.requests:
            abort(scheduler, draw.choice(sorted(scheduler.requests)), aborted)
        assert sum(history.held_tokens for history in held._held) <= MOST_TOKENS
        assert not set(held.forgotten()) & {history.first_block for history in held._held}
    while scheduler.requests:
        running.step()
    running.drain()
    for name, tokens in expected.items():
        if name not in aborted:
            assert running.worker.tokens[name][: len(tokens)] == tokens, name
    assert went_on > 10
    assert running.preempted > 0
    assert running.worker.compressed["prompt"] > 10
    assert scheduler.reset_prefix_cache()
    assert pool.get_num_free_blocks() == free
    assert not any((held._held, held._turns, scheduler._plans))
    for manager in scheduler._blocks._managers.values():
        assert not any((manager.dropped_tokens, manager._borrows, +manager._lendable))
