"""Blocks of histories, checked by a worker that remembers the token in every slot."""

import random
from dataclasses import dataclass, field

import pytest

from snapkv_vllm import Sessions
from snapkv_vllm.admission.names import PREFIX, SESSION
from snapkv_vllm.admission.spans import SPANS_FIELD
from tests.serving.vllm.test_accounting import (
    PAGE,
    TOKEN_BYTES,
    engine_config,
    simulation,
)

MOST_BLOCKS = 10


@pytest.fixture(scope="module")
def config(folder):
    sessions = Sessions(most_bytes=MOST_BLOCKS * PAGE * TOKEN_BYTES)
    return engine_config(folder, 60, sessions=sessions)


def held_blocks(held):
    return sum(len(of_group) for one in held._held for of_group in one.blocks)


def went_on(held):
    return held._metrics.get("session_requests")._value.get()


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
        spans = {SPANS_FIELD: said} if self.budget % 2 == 0 else {}
        return {PREFIX + SESSION: self.name, "snapkv_budget": self.budget, **spans}


@pytest.mark.parametrize("ahead", [0, 1], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("caching", [False, True], ids=["plain", "prefix-caching"])
@pytest.mark.parametrize("seed", range(3))
def test_every_request_reads_its_history_and_all_blocks_are_freed(config, caching, ahead, seed):
    """Turns overlap, are aborted and preempted, and the pool is too small for histories."""
    draw = random.Random(seed)
    running = simulation(config, caching=caching, ahead=ahead)
    scheduler = running.scheduler
    held, pool = scheduler.sessions, scheduler.kv_cache_manager.block_pool
    free, sessions, before = pool.get_num_free_blocks(), [], went_on(held)
    for number in range(300):
        sessions = [one for one in sessions if len(one.ids) < 30]
        while len(sessions) < 8:
            budget = draw.choice([0, 11, 12, 13])
            sessions.append(Session(f"{draw.choice('ab')}/{number}{len(sessions)}", budget))
        one = draw.choice(sessions)
        one.asks = [name for name in one.asks if name in scheduler.requests]
        if not one.asks or draw.random() < 0.1:
            own, name, tokens = one.turn(draw), f"r{number}", draw.randrange(1, 14)
            running.send(name, one.ids, tokens, own)
            assert name in held._turns
            one.asks.append(name)
            one.ids = list(running.expected[name])
        for _ in range(draw.randrange(4)):
            running.step()
        if draw.random() < 0.1:
            running.abort(draw)
        assert held_blocks(held) <= MOST_BLOCKS
        assert not set(held.pop_forgotten()) & {history.first_block for history in held._held}
    running.finish()
    assert went_on(held) - before > 10
    assert running.preempted > 0
    assert running.worker.compressed["prompt"] > 10
    assert scheduler.reset_prefix_cache()
    assert pool.get_num_free_blocks() == free
    assert not any((held._held, held._turns, scheduler._plans))
    for manager in scheduler._blocks._managers.values():
        assert not any((manager.dropped_tokens, manager._begun_with_history, +manager._pins))


# Who waits, and whose histories go.

POOL = 120


@pytest.fixture(scope="module")
def large(folder):
    """A quarter of the pool for histories, and a longest request of 24 blocks."""
    return engine_config(folder, 96, sessions=Sessions())


@pytest.fixture(scope="module")
def without(folder):
    return engine_config(folder, 96)


def asked(draw, number, *, whose):
    """A prompt, how much to generate, and the settings of a session of its own."""
    length, tokens = draw.choice([(1, 1), (5, 1), (5, 4), (60, 30)])
    ids = [draw.randrange(1, 90) for _ in range(length)]
    own = {PREFIX + SESSION: f"{whose}/{number}", "snapkv_budget": 0}
    return ids, tokens, own


def finished_at(running, asks, each_step):
    """At which step every request has ended, of which some come with every step."""
    ends, pending, step = {}, dict(asks), 0
    while pending or running.scheduler.requests:
        for name in list(pending)[:each_step]:
            running.send(name, *pending.pop(name))
        before = set(running.scheduler.requests)
        running.step()
        step += 1
        assert step < 20 * len(asks), "the queue does not move"
        ends |= dict.fromkeys(before - set(running.scheduler.requests), step)
    running.finish()
    return ends


@pytest.mark.parametrize(("caching", "ahead"), [(False, 1), (True, 0)], ids=str)
def test_new_sessions_delay_no_request(large, without, caching, ahead):
    """Short sessions would fill the pool, and long ones follow."""
    draw = random.Random(1)
    asks = {f"r{n}": asked(draw, n, whose=draw.choice("ab")) for n in range(3 * POOL)}
    plain = {n: (ids, tokens, {"snapkv_budget": 0}) for n, (ids, tokens, _) in asks.items()}
    options = {"caching": caching, "ahead": ahead, "full_blocks": POOL}
    running = simulation(large, **options)
    standstills = running.scheduler._metrics.get("standstills")._value
    before = standstills.get()
    ends = finished_at(running, asks, each_step=3)
    assert ends == finished_at(simulation(without, **options), plain, each_step=3)
    held = running.scheduler.sessions
    assert len(ends) == len(asks)
    assert 0 < held_blocks(held) <= POOL // 4
    assert standstills.get() == before


def turn(running, name, session, ids=(1, 2, 3, 4, 5), budget=0):
    """A request of a session, of which a history of a block stays if it says nothing else."""
    own = {PREFIX + SESSION: session, "snapkv_budget": budget}
    running.send(name, ids, 1, own)
    while name in running.scheduler.requests:
        running.step()


def test_api_key_does_not_evict_histories_within_the_share_of_another(large, monkeypatch):
    """Shares of blocks and of histories are both respected."""
    running = simulation(large, caching=False, ahead=0, full_blocks=POOL)
    held = running.scheduler.sessions
    for number in range(3):
        turn(running, f"mine{number}", f"mine/{number}")
    for most in (POOL // 4, 20):
        monkeypatch.setattr("snapkv_vllm.sessions._MAX_HISTORIES", most)
        for number in range(2 * most):
            turn(running, f"r{most}{number}", f"flood/{most}{number}")
        owners = [one.owner[0] for one in held._held]
        assert {f"mine/{number}" for number in range(3)} < set(owners)
        assert len(owners) == most
        assert owners[-1] == f"flood/{most}{2 * most - 1}"


def test_repeated_turn_replaces_its_own_history(large):
    """A history that was compressed at its end is replaced, too, though it cannot be continued."""
    running = simulation(large, caching=False, ahead=0, full_blocks=POOL)
    held, text = running.scheduler.sessions, range(1, 31)
    for number in range(4):
        turn(running, f"r{number}", "a/one", text, budget=12)
    assert [history.held_tokens for history in held._held] == [12]
    turn(running, "other-text", "a/one", range(2, 31), budget=12)
    turn(running, "other-session", "a/two", text, budget=12)
    assert len(held._held) == 3


def test_sessions_are_listed_and_deleted(large):
    running = simulation(large, caching=False, ahead=0, full_blocks=POOL)
    held, pool = running.scheduler.sessions, running.scheduler.kv_cache_manager.block_pool
    free, text = pool.get_num_free_blocks(), range(1, 31)
    turn(running, "r0", "a/one", text, budget=12)
    turn(running, "r1", "a/two", text)
    turn(running, "r2", "b/one", text)
    one, two = held.list_sessions("a/")
    assert (one["session"], one["tokens"], one["kept_tokens"]) == ("one", 30, 12)
    assert (two["session"], two["tokens"], two["kept_tokens"]) == ("two", 28, 28)
    assert one["bytes"] == 3 * PAGE * TOKEN_BYTES
    assert held.delete_session("a/three") == {"histories": 0, "requests": 0}
    own = {PREFIX + SESSION: "a/one", "snapkv_budget": 12}
    running.send("r3", range(1, 40), 1, own)
    assert held.delete_session("a/one") == {"histories": 1, "requests": 1}
    running.finish()
    for name in ("a/one", "a/two", "b/one"):
        assert held.delete_session(name) == {"histories": 1, "requests": 0}
    assert pool.get_num_free_blocks() == free
    assert not held._held


def test_request_that_waits_for_pinned_blocks_is_counted_and_logged(large, caplog):
    """A request that continues from half of a history pins the other half."""
    running = simulation(large, caching=False, ahead=0, full_blocks=POOL)
    scheduler = running.scheduler
    held, pool, series = scheduler.sessions, scheduler.kv_cache_manager.block_pool, {}
    turn(running, "r0", "a/one", range(1, 41))
    for name in ("idle", "pinned"):
        series[name] = held._metrics.get("session_blocks", state=name)._value
    waits = held._metrics.get("session_waits")._value
    assert (series["idle"].get(), series["pinned"].get()) == (10, 0)
    branch = [*range(1, 21), *range(60, 80)]
    running.send("r1", branch, 4, {PREFIX + SESSION: "a/one", "snapkv_budget": 0})
    running.step()
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 8)
    before = waits.get()
    running.send("r2", range(1, 60), 1, {"snapkv_budget": 0})
    with caplog.at_level("INFO", logger="vllm.snapkv"):
        for _ in range(2):
            running.step()
    assert waits.get() == before + 1
    said = "Request r2 waits for blocks while histories of other requests pin 5 blocks"
    assert caplog.messages.count(said) == 1
    pool.free_blocks(taken)
    running.finish()
    assert series["pinned"].get() == 0


def test_history_that_is_too_short_is_not_stored(large):
    running = simulation(large, caching=False, ahead=0, full_blocks=POOL)
    turn(running, "r", "a/one", [1])
    assert not running.scheduler.sessions._held


def test_standstill_is_logged_and_counted_once(large, monkeypatch):
    from snapkv_vllm import scheduler as module

    running, said = simulation(large, caching=False, ahead=0, full_blocks=POOL), []
    monkeypatch.setattr(module.logger, "error", lambda text, *parts: said.append(text % parts))
    pool, count = running.scheduler.kv_cache_manager.block_pool, running.scheduler._metrics
    before = count.get("standstills")._value.get()
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 1)
    running.send("r", [1] * 9, 1, {})
    for _ in range(3):
        running.step()
    assert count.get("standstills")._value.get() == before + 1
    assert said == [
        "No request can continue: r waits for blocks, 1 of 120 are free, none is running"
    ]
    pool.free_blocks(taken)
    running.finish()
    assert len(said) == 1
