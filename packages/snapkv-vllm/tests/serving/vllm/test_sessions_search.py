"""Which history a request goes on from, against a plain search, and how much is looked at."""

import random

import pytest

from snapkv.policies.spans import Spans
from snapkv_vllm import Sessions
from snapkv_vllm.admission.names import PREFIX, SESSION
from snapkv_vllm.admission.settings import ServingSettings
from snapkv_vllm.admission.spans import SPANS_FIELD
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


def beginning(history, prompt, most_tokens, block_tokens):
    """How many first tokens a history stands for, token by token."""
    same, at = 0, history.compressed
    for mine, its in zip(history.tokens.ids, prompt[:most_tokens], strict=False):
        if mine != its:
            break
        same += 1
    if same < max(1, at.tokens):
        return 0
    full = (same - at.dropped_tokens) // block_tokens * block_tokens + at.dropped_tokens
    if full >= at.tokens:
        return full if full > at.dropped_tokens else 0
    return 0 if history.requests else same


def found_plainly(held, turn):
    """Plan with every history of the session, and return the most tokens that one stands for."""
    tokens, longest = len(turn.prompt), 0
    for history in held._held:
        at = history.compressed
        is_own = history.owner == turn.owner
        left = at.remaining_edits(turn.spans, turn.protected) if is_own else None
        if left is None:
            continue
        plan = held._settings.plan_turn(turn.extra_args, tokens - at.dropped_tokens, left)
        ends = plan.next_compression(0, 0)
        voters = 0 if ends is None else max(1, ends.selector.query_tokens)
        if tokens - voters < at.tokens:
            voters = 1
        most = tokens - max(1, voters)
        longest = max(longest, beginning(history, turn.prompt.ids, most, held._block_tokens))
    return longest


def drawn(draw, texts):
    """A prompt that begins like one of the texts, as far as drawn, and goes on in its own way."""
    text = draw.choice(texts)
    own = [draw.randrange(1, 4) for _ in range(draw.randrange(1, 30))]
    return [*text[: draw.randrange(len(text) + 1)], *own]


def history_of(draw, texts, owner):
    from snapkv_vllm.histories import CompressedPrefix, History

    ids = drawn(draw, texts)
    seen = draw.choice([0, draw.randrange(1, len(ids) + 1)])
    drop = Spans(((2, 4),)) if draw.random() < 0.2 and seen > 4 else Spans(())
    compressed = CompressedPrefix(tokens=seen, kept_tokens=draw.randrange(seen + 1), drop=drop)
    requests = {"another"} if draw.random() < 0.3 else set()
    tokens = DigestedTokens.from_ids(ids)
    return History(owner=owner, prompt=b"", tokens=tokens, compressed=compressed, requests=requests)


@pytest.mark.parametrize("seed", range(4))
def test_chosen_history_is_as_good_as_in_a_plain_search(running, seed):
    """Histories with common beginnings, compressed or not, in use or not, of two sessions."""
    draw, held = random.Random(seed), running.scheduler.sessions
    texts = [[draw.randrange(1, 4) for _ in range(40)] for _ in range(2)]
    went_on = 0
    for number in range(60):
        owners = [(f"a/{name}", "", "") for name in "12"]
        held._held = [history_of(draw, texts, draw.choice(owners)) for _ in range(12)]
        ids = drawn(draw, texts)
        spans = [{"start": 2, "end": 4, "do": "drop"}] if len(ids) > 5 and number % 3 == 0 else []
        own = {PREFIX + SESSION: "a/1", "snapkv_budget": draw.choice([0, 12]), SPANS_FIELD: spans}
        running.send("r", ids, 1, own)
        turn = held._turns["r"]
        expected = found_plainly(held, turn)
        held._choose_history(turn)
        assert turn.plan.prefix_tokens == expected
        if turn.history is not None:
            went_on += 1
            assert turn.history.owner == turn.owner
            assert turn.compressed is turn.history.compressed
            found = list(turn.history.tokens.ids[:expected])
            assert found == ids[:expected]
        held._held, turn.history = [], None
        running.abort(draw)
    assert went_on > 10


@pytest.mark.parametrize("does_begin", [True, False], ids=["branches", "others"])
def test_few_of_many_histories_are_planned(running, plans, does_begin):
    """Whether they begin like the prompt and end otherwise, or are other texts."""
    from snapkv_vllm.histories import CompressedPrefix, History

    held, text = running.scheduler.sessions, list(range(1, 61))
    held._held = [
        History(
            owner=("a/1", "", ""),
            prompt=b"",
            tokens=DigestedTokens.from_ids([*(text if does_begin else text[::-1]), number]),
            compressed=CompressedPrefix(),
        )
        for number in range(512)
    ]
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
    """Others keep theirs; where all of a name are in use, the new one is not held."""
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
