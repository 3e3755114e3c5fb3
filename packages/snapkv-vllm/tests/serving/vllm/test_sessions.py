"""Sessions that continue from a compressed history answer as one cache of the library."""

import random

import pytest
import torch

from snapkv import CompressedCache, FullCache, default_policy
from snapkv.policies.default import adapt_to_question, by_layer
from snapkv.validation import DEFAULT, SMALL_WINDOW
from snapkv_vllm import Sessions
from snapkv_vllm.admission.names import PREFIX, SESSION
from snapkv_vllm.admission.spans import SPANS_FIELD
from tests.serving.vllm.conftest import SECOND_RUNNER
from tests.serving.vllm.engines import greedy, small_engine
from tests.serving.vllm.models import generated, ids_of

PAGE, BUDGET = 32, 96
TURNS = 4 if SECOND_RUNNER else 8


def options(small, blocks=100, **more):
    sizes = {"kv_cache_memory_bytes": small.blocks_bytes(blocks, PAGE), "max_model_len": 1600}
    sessions = Sessions(most_bytes=small.blocks_bytes(40, PAGE))
    own = {"budget": BUDGET, "policy": DEFAULT, "sessions": sessions}
    return {**sizes, **own, "max_num_batched_tokens": 120, **more}


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "prefix-caching"])
def engine(small, request):
    with small_engine(small, **options(small), enable_prefix_caching=request.param) as running:
        yield running


def own(name, **more):
    return {PREFIX + SESSION: name, **more}


def reused(engine):
    """How many tokens of histories have not been read again."""
    return int(engine.scheduler.sessions._metrics.get("session_tokens_not_read")._value.get())


def forget(engine):
    """Nothing is left of sessions once they are dropped, on the scheduler's side or a worker's."""
    engine.scheduler.sessions.remove_idle()
    engine.require_empty()
    assert not engine.scheduler.sessions._turns
    assert not engine.runner._compressor.positions._positions


def test_every_turn_answers_as_a_compressing_cache_of_the_library(engine, small):
    """Turns and answers are short or long, and the question of each votes if it is known."""
    draw = random.Random(1)
    policy = by_layer(default_policy(BUDGET))
    cache = CompressedCache(small.model, policy, turns="compress")
    ids, read, before = [], 0, reused(engine)
    for turn in range(TURNS):
        ids += ids_of(draw.choice([40, 90, 150]), seed=turn)
        tokens, question = draw.choice([5, 40, 70]), draw.choice([None, 5, 30, 40])
        voters = adapt_to_question(policy, question).voters
        asked = {} if voters is None else {"snapkv_voters": voters}
        cache.expect_question(question)
        expected = generated(small.model, ids, cache, tokens)
        (found,) = engine.answers([ids], greedy(tokens, extra_args=own("one", **asked)))
        assert found == expected, turn
        read += len(ids)
        ids += found
    assert reused(engine) - before > read / 2
    forget(engine)


def answered_without(model, cache, ids, spans, tokens):
    """The library's greedy answer with a cache that drops spans behind the prompt."""
    answer = []
    while len(answer) < tokens:
        new = torch.tensor([[*ids, *answer][cache.get_seq_length() :]])
        with torch.no_grad():
            answer.append(int(model(new, past_key_values=cache).logits[0, -1].argmax()))
        if len(answer) == 1:
            cache.drop(spans)
    return answer


def agents_turns(seed, turns=TURNS):
    """What an agent reads each time, where its result stands, and how much it answers."""
    draw = random.Random(seed)
    for turn in range(turns):
        before, result, behind = (draw.choice(sizes) for sizes in ((8, 30), (20, 90), (5, 20)))
        texts = ids_of(before + result + behind, seed=100 * seed + turn)
        yield texts, (before, before + result), draw.choice([2, 12, 40])


@pytest.mark.parametrize("seed", range(2))
def test_protected_results_are_dropped_later_without_recomputation(engine, small, seed):
    """Each result except the last two is dropped after the turn that no longer protects it."""
    ids, results, turns = [], [], 0
    cache = CompressedCache(small.model, FullCache())
    before, requests = reused(engine), went_on(engine)
    for texts, (start, end), tokens in agents_turns(seed):
        results.append((len(ids) + start, len(ids) + end))
        ids += texts
        gone = results[:-2]
        said = [{"start": a, "end": b, "do": "drop"} for a, b in gone]
        said += [{"start": a, "end": b, "do": "protect"} for a, b in results[-2:]]
        args = own("two", snapkv_budget=0, **{SPANS_FIELD: said})
        (found,) = engine.answers([ids], greedy(tokens, extra_args=args))
        assert found == answered_without(small.model, cache, ids, gone, tokens), turns
        ids += found
        turns += 1
    assert reused(engine) - before > len(ids)
    assert went_on(engine) - requests == turns - 1
    forget(engine)


def went_on(engine):
    return int(engine.scheduler.sessions._metrics.get("session_requests")._value.get())


def test_results_are_protected_and_dropped_as_whole_spans(engine):
    ids, results = [], []
    requests = went_on(engine)
    for turn, (texts, (start, end), _) in enumerate(agents_turns(5)):
        results.append((len(ids) + start, len(ids) + end))
        ids += texts
        said = [{"start": a, "end": b, "do": "drop"} for a, b in results[:-1]]
        said += [{"start": a, "end": b, "do": "protect"} for a, b in results[-1:]]
        args = own("three", snapkv_budget=128, **{SPANS_FIELD: said})
        (found,) = engine.answers([ids], greedy(12, extra_args=args))
        assert_spans(engine, results, ids, turn)
        ids += found
    assert went_on(engine) - requests == TURNS - 1
    forget(engine)


def assert_spans(engine, results, ids, turn):
    """What the worker has noted: true positions, of results all or nothing, all the last ones."""
    held = engine.scheduler.sessions._held[-1]
    for positions in engine.runner._compressor.positions._positions[held.first_block].values():
        for head in positions.tolist():
            assert head == sorted(set(head))
            assert len(head) <= 128
            for start, end in results[:-1]:
                assert not [one for one in head if start <= one < end], turn
            start, end = results[-1]
            assert [one for one in head if start <= one < end] == list(range(start, end))
            assert set(range(len(ids) - SMALL_WINDOW, len(ids))) <= set(head)


def test_tokens_that_must_be_kept_are_recomputed_if_they_were_dropped(engine):
    """A request must keep all of its prompt or its first tokens; the history then serves others."""
    first = ids_of(300, seed=11)
    longer = [*first, *ids_of(60, seed=12)]
    for more in ({"snapkv_budget": 0}, {"snapkv_protect_first": 40}):
        requests = went_on(engine)
        expected = engine.answers([longer], greedy(12, extra_args=more))
        engine.answers([first], greedy(4, extra_args=own("six")))
        (found,) = engine.answers([longer], greedy(12, extra_args=own("six", **more)))
        assert [found] == expected
        assert went_on(engine) == requests
        longest = [*longer, *found, *ids_of(60, seed=13)]
        engine.answers([longest], greedy(4, extra_args=own("six", **more)))
        assert went_on(engine) == requests + 1
        forget(engine)


def test_requests_that_do_not_match_a_history_are_computed_as_usual(engine):
    first, requests = ids_of(300, seed=1), went_on(engine)
    engine.answers([first], greedy(4, extra_args=own("four")))
    changed = [*first[:50], first[50] + 1, *first[51:], *ids_of(20, seed=2)]
    named = {SPANS_FIELD: [{"start": 10, "end": 60, "do": "drop"}]}
    longer = [*first, *ids_of(20, seed=3)]
    for ids, args in (
        (changed, own("four")),
        (longer, own("five")),
        (longer, own("four", **named)),
        (first[:200], own("four")),
    ):
        alone = engine.answers([ids], greedy(6, extra_args=args | own("alone")))
        assert engine.answers([ids], greedy(6, extra_args=args)) == alone
        engine.scheduler.sessions.remove_idle()
        engine.answers([first], greedy(4, extra_args=own("four")))
    assert went_on(engine) == requests
    forget(engine)
