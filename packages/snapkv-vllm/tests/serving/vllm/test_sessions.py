"""Sessions whose next request finds its history compressed: answers are those of one cache."""

import random

import pytest

from snapkv import CompressedCache, SnapKV
from snapkv_vllm.agents.held import Sessions
from snapkv_vllm.names import PREFIX, SESSION
from tests.serving.vllm.conftest import SECOND_RUNNER
from tests.serving.vllm.engines import greedy, small_engine
from tests.serving.vllm.models import generated, ids_of

PAGE, WINDOW, BUDGET = 32, 8, 96
TURNS = 4 if SECOND_RUNNER else 8


def options(small, blocks=60, **more):
    sizes = {"kv_cache_memory_bytes": small.blocks_bytes(blocks, PAGE), "max_model_len": 1024}
    own = {"budget": BUDGET, "parameters": {"window_size": WINDOW}, "sessions": Sessions()}
    return {**sizes, **own, "max_num_batched_tokens": 120, **more}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    from tests.serving.vllm.models import SmallModel

    return SmallModel(tmp_path_factory.mktemp("sessions"), max_position_embeddings=2048)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "prefix-caching"])
def engine(small, request):
    with small_engine(small, **options(small), enable_prefix_caching=request.param) as running:
        yield running


def own(name, **more):
    return {PREFIX + SESSION: name, **more}


def lent(engine):
    """How many tokens of histories have not been read again."""
    return int(engine.scheduler._sessions._metrics._series["not_read"]._value.get())


def forget(engine):
    engine.scheduler._sessions.drop_idle()
    engine.require_empty()


def test_every_turn_answers_as_one_cache_of_the_library(engine, small):
    """Turns short and long, answers too; some turns bring fewer tokens than a window."""
    draw = random.Random(1)
    policy = SnapKV(BUDGET, window_size=WINDOW)
    cache = CompressedCache(small.model, policy, turns="compress")
    ids, read, before = [], 0, lent(engine)
    for turn in range(TURNS):
        ids += ids_of(draw.choice([40, 90, 150]), seed=turn)
        tokens = draw.choice([5, 40, 70])
        expected = generated(small.model, ids, cache, tokens)
        (found,) = engine.answers([ids], greedy(tokens, extra_args=own("one")))
        assert found == expected, turn
        read += len(ids)
        ids += found
    assert lent(engine) - before > read / 2
    forget(engine)
