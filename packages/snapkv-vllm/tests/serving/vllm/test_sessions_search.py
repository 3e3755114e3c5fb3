"""The history from which a request continues, and the cost of finding it."""

import pytest

from snapkv.policies.spans import Spans
from snapkv_vllm import Sessions
from snapkv_vllm.admission.names import PREFIX, SESSION
from snapkv_vllm.admission.settings import ServingSettings
from snapkv_vllm.histories import DigestedTokens
from tests.serving.vllm.test_accounting import engine_config, simulation
from tests.serving.vllm.test_sessions_accounting import turn

POOL = 120


@pytest.fixture(scope="module")
def config(folder):
    return engine_config(folder, 96, sessions=Sessions())


@pytest.fixture
def running(config, monkeypatch):
    monkeypatch.setattr("snapkv_vllm.histories.BLOCK", 4)  # prompts of the model are short
    return simulation(config, caching=False, ahead=0, full_blocks=POOL)


@pytest.fixture
def plans(monkeypatch):
    """The plans that are made of turns, each by how many tokens are held at its end."""
    made, plan_turn = [], ServingSettings.plan_turn

    def counted(self, given, held_tokens, spans, **options):
        made.append(held_tokens)
        return plan_turn(self, given, held_tokens, spans, **options)

    monkeypatch.setattr(ServingSettings, "plan_turn", counted)
    return made


def history(ids, owner="a/1", **more):
    from snapkv_vllm.histories import CompressedPrefix, History

    tokens, own = DigestedTokens.from_ids(ids), {"compressed": CompressedPrefix(), **more}
    return History(owner=(owner, "", ""), prompt=b"", tokens=tokens, **own)


def test_chosen_history_saves_the_most_tokens_of_those_that_may_be_used(running):
    from snapkv_vllm.histories import CompressedPrefix

    held, text = running.scheduler.sessions, list(range(1, 41))
    drop = CompressedPrefix(tokens=36, kept_tokens=32, drop=Spans(((2, 6),)))
    best = history([*text[:24], 90])
    held._held = [
        history(text[:12]),
        history(text[:30], owner="a/2"),  # of another session
        history(text[:36], compressed=drop),  # without tokens that the request keeps
        history(text[:23], requests={"other"}),  # of which a request in use lends full blocks alone
        best,
        history([91, *text[1:]]),  # that begins otherwise
    ]
    running.send("r", text, 1, {PREFIX + SESSION: "a/1", "snapkv_budget": 0})
    turn = held._turns["r"]
    held._choose_history(turn)
    assert turn.history is best
    assert turn.plan.prefix_tokens == 24


def test_histories_are_compared_by_their_tokens_before_the_voters(running):
    """Six of 40 tokens vote; 36 are in full blocks of four, and 32 can be used."""
    from snapkv_vllm.histories import CompressedPrefix

    held, text = running.scheduler.sessions, list(range(1, 41))
    best = history(text[:35], compressed=CompressedPrefix(tokens=34, kept_tokens=12))
    held._held = [history(text), best]
    running.send("r", text, 1, {PREFIX + SESSION: "a/1", "snapkv_budget": 12})
    turn = held._turns["r"]
    held._choose_history(turn)
    assert turn.history is best
    assert turn.plan.prefix_tokens == 34


@pytest.mark.parametrize("does_begin", [True, False], ids=["branches", "others"])
def test_few_of_many_histories_are_planned(running, plans, does_begin):
    """The others begin like the prompt and end differently, or are different texts."""
    held, text = running.scheduler.sessions, list(range(1, 61))
    begins = text if does_begin else text[::-1]
    held._held = [history([*begins, number]) for number in range(512)]
    running.send("r", [*text, 90, 91, 92], 1, {PREFIX + SESSION: "a/1", "snapkv_budget": 0})
    plans.clear()
    held._choose_history(held._turns["r"])
    assert held._turns["r"].plan.prefix_tokens == (60 if does_begin else 0)
    assert len(plans) <= 1


def test_waiting_request_searches_again_only_after_its_session_changed(running, monkeypatch):
    held, pool = running.scheduler.sessions, running.scheduler.kv_cache_manager.block_pool
    looks, choose = [], held._choose_history
    search = "_choose_history"
    monkeypatch.setattr(held, search, lambda turn: (looks.append(turn.owner[0]), choose(turn)))
    turn(running, "before", "a/one", range(1, 31))
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 2)
    monkeypatch.setattr(held, "evict_least_recent", lambda: False)
    own = {PREFIX + SESSION: "a/one", "snapkv_budget": 0}
    running.send("r", range(40, 80), 1, own)
    looks.clear()
    for _ in range(5):
        running.step()
    assert looks == ["a/one"]
    turns = held._turns["r"]
    held._reset_searches(("a/two", "", ""))
    running.step()
    assert looks == ["a/one"]
    # It is refused, because one request is running.
    assert held.delete_session("a/one") == {"histories": 1, "requests": 1}
    held._forget(held._held[0])
    running.step()
    assert looks == ["a/one", "a/one"]
    assert turns.history is None
    pool.free_blocks(taken)
    running.finish()


def test_session_evicts_its_least_recently_used_history_at_the_limit(running, monkeypatch):
    """Other sessions keep theirs; if all histories of a session are in use, none is stored."""
    monkeypatch.setattr("snapkv_vllm.sessions._MAX_HISTORIES_PER_SESSION", 3)
    held = running.scheduler.sessions
    turn(running, "other", "a/two")
    for number in range(5):
        turn(running, f"r{number}", "a/one", [number + 10, 2, 3, 4, 5])
    assert [one.owner[0] for one in held._held] == ["a/two", *["a/one"] * 3]
    assert [int(one.tokens.ids[0]) for one in held._held[1:]] == [12, 13, 14]
    for one in held._held[1:]:
        one.requests.add("in use")
    turn(running, "last", "a/one", [20, 2, 3, 4, 5])
    assert [int(one.tokens.ids[0]) for one in held._held[1:]] == [12, 13, 14]
