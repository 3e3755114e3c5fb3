"""The simulated fleet: worked by hand, beside a law of queues, and what must hold of any load."""

import random
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapkv.errors import InvalidArgumentError
from snapkv_lab.experiments.scale import fitted, linear
from snapkv_lab.measure.fleet import Engine, Step, Turn, Work, simulate


def first(turn, engines):
    return 0


def test_two_requests_worked_by_hand():
    """Steps of 10 tokens, a second and a tenth for each; 4 tokens of a prompt are kept."""
    engine = Engine(
        seconds=lambda work: 1 + work.tokens / 10,
        blocks=6,
        block_tokens=4,
        step_tokens=10,
        kept=4,
    )
    turns = [Turn(new=8, answer=3), Turn(session=1, new=6, answer=2, arrived=0.5)]
    ended = simulate([engine], turns, first)
    assert [step.work for step in engine.steps] == [
        Work(8, 1, pairs=36, held=0),  # 1 + 2 + ... + 8
        Work(7, 2, pairs=21, held=5),  # a token behind the 4 that are kept
        Work(2, 2, pairs=0, held=6 + 5),
    ]
    assert [turn.first for turn in turns] == pytest.approx([1.8, 3.5])
    assert [turn.finished for turn in turns] == pytest.approx([4.7, 4.7])
    assert (ended, engine.free) == (pytest.approx(4.7), 6)


@pytest.mark.parametrize("kept", [None, 4])
def test_who_lacks_a_block_takes_those_of_the_youngest_which_reads_again(kept):
    """5 blocks of 2 tokens: both prompts of 4 are read, then the first answer takes the fifth."""
    engine = Engine(seconds=lambda work: 1.0, blocks=5, block_tokens=2, step_tokens=8, kept=kept)
    turns = [Turn(session=number, new=4, answer=3) for number in range(2)]
    simulate([engine], turns, first)
    again = [5] if kept is None else [4, 1]  # a prompt is compressed at its end, then the answer
    assert [step.work.tokens for step in engine.steps] == [8, 1, 1, *again, 1]
    assert [step.lacking for step in engine.steps[:4]] == [False, True, True, False]


@pytest.mark.parametrize(
    ("kept", "share", "tokens"),
    [(None, 1.0, [10, 5 + 4]), (3, 1.0, [10, 4 + 1]), (3, 0.0, [10, 15])],
)
def test_a_turn_goes_on_from_what_its_engine_holds_of_the_history(kept, share, tokens):
    """A cached prefix has full blocks of 6 tokens; what is kept has all that was computed."""
    engine = Engine(
        seconds=lambda work: 1.0,
        blocks=9,
        block_tokens=6,
        step_tokens=99,
        kept=kept,
        history_share=share,
    )
    later = Turn(history=11, new=4, answer=1, think=2.0)
    simulate([engine], [Turn(new=10, answer=1, then=later)], first)
    assert [step.work.tokens for step in engine.steps] == tokens
    assert (later.arrived, later.first) == (3.0, 4.0)


def test_a_prompt_beyond_the_pool_is_refused():
    engine = Engine(seconds=lambda work: 1.0, blocks=2, block_tokens=4, step_tokens=8)
    with pytest.raises(InvalidArgumentError, match="enough for 9 tokens, got 2 of 4"):
        simulate([engine], [Turn(new=8, answer=1)], first)


def test_waits_of_one_server_are_those_of_the_law_of_queues():
    """M/D/1: each by Lindley's recursion, the mean about Pollaczek and Khinchine's."""
    draw, now, turns = random.Random(0), 0.0, []
    for number in range(4000):
        now += draw.expovariate(0.5)
        turns.append(Turn(session=number, new=1, answer=1, arrived=now))
    engine = Engine(seconds=lambda work: 1.0, blocks=2, block_tokens=1, step_tokens=1)
    simulate([engine], turns, first)
    waits = [turn.first - turn.arrived - 1 for turn in turns]
    expected = [0.0]
    for one, after in pairwise(turns):
        expected.append(max(0.0, expected[-1] + 1 - (after.arrived - one.arrived)))
    assert waits == pytest.approx(expected, abs=1e-6)
    assert fmean(waits) == pytest.approx(0.5 / (2 * (1 - 0.5)), rel=0.1)


sizes = st.tuples(st.integers(1, 12), st.integers(1, 6), st.integers(0, 8), st.integers(0, 5))


@given(
    sessions=st.lists(st.lists(sizes, min_size=1, max_size=3), min_size=1, max_size=8),
    engines=st.integers(1, 3),
    spare=st.integers(0, 4),
    block=st.integers(1, 5),
    most=st.integers(1, 9),
    kept=st.none() | st.integers(1, 9),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 9),
)
def test_any_load(sessions, engines, spare, block, most, kept, share, seed):
    turns, firsts = [], []
    for number, session in enumerate(sessions):
        own = []
        for new, answer, arrived, think in session:
            history = own[-1].prompt + own[-1].answer if own else 0
            sizes = {"session": number, "history": history, "new": new, "answer": answer}
            own.append(Turn(arrived=arrived, think=think, **sizes))
        for turn, then in pairwise(own):
            turn.then = then
        turns += own
        firsts.append(own[0])
    blocks = spare + max(-(-(turn.prompt + turn.answer) // block) for turn in turns)
    fleet = []

    def seconds(work):
        assert 0 < work.tokens <= most
        assert work.requests > 0
        for engine in fleet:  # every block is free, idle or somebody's
            held = sum(turn.blocks for turn in engine.running)
            assert engine.free + engine.idle + held == blocks
            assert min(engine.free, engine.idle) >= 0
            assert engine.idle == sum(had for *_, had in engine.histories.values())
            assert all(turn.held <= turn.blocks * block for turn in engine.running)
        return 1.0 + work.tokens

    same = {"blocks": blocks, "block_tokens": block, "step_tokens": most, "kept": kept}
    fleet += [Engine(seconds=seconds, history_share=share, **same) for _ in range(engines)]
    draw = random.Random(seed)
    ended = simulate(fleet, firsts, lambda turn, them: draw.randrange(len(them)))
    assert all(turn.generated == turn.answer for turn in turns)
    assert all(turn.arrived < turn.first <= turn.finished <= ended for turn in turns)
    assert not any(engine.running or engine.waiting for engine in fleet)
    computed = sum(step.work.tokens for engine in fleet for step in engine.steps)
    assert computed >= sum(turn.new + turn.answer - 1 for turn in turns)
    if engines == 1:  # it never rests while there is something to do
        busy = sum(step.seconds for step in fleet[0].steps)
        gaps = _gaps([(turn.arrived, turn.finished) for turn in turns])
        assert busy == pytest.approx(ended - gaps)


def _gaps(spans):
    """Seconds from 0 in which no span lies."""
    gaps = until = 0.0
    for start, end in sorted(spans):
        gaps += max(0.0, start - until)
        until = max(until, end)
    return gaps


def test_costs_are_found_again_and_none_is_below_zero():
    draw, costs = random.Random(1), [0.01, 0.002, 0.0, 3e-6, 0.0]
    works = [Work(*(draw.randrange(1, 2000) for _ in range(4))) for _ in range(50)]
    found = fitted([Step(work, linear(costs, work) * draw.uniform(0.99, 1.01)) for work in works])
    assert min(found) >= 0
    for work in works:
        assert linear(found, work) == pytest.approx(linear(costs, work), rel=0.05)
