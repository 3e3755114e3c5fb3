"""One budget for all layers in an engine: what is kept and answered is what the library does."""

import pytest

from snapkv import default_policy
from tests.serving.vllm.conftest import SECOND_RUNNER, SLOW_ON_SECOND
from tests.serving.vllm.engines import greedy, small_engine
from tests.serving.vllm.families import FamilyModel
from tests.serving.vllm.models import ids_of

BUDGET, CHUNK, PAGE = 64, 150, 32
TOKENS = 16 if SECOND_RUNNER else 70
LENGTHS = [40, 64, 65, 66, 95, 96, 97, 127, 128, 150, 151, 182, *range(190, 430, 20)]


@pytest.fixture(scope="module", params=[False, True], ids=["in place", "prefix caching"])
def engine(small, request):
    """Kept tokens go to the first blocks of a prompt, or to others where these may be shared."""
    options = {"policy": "across-layers", "enable_prefix_caching": request.param}
    with small_engine(small, budget=BUDGET, max_num_batched_tokens=CHUNK, **options) as running:
        yield running


def tokens_of(kept, prompt):
    """Of (1, H, K) positions and -1, those of every head that lie in the prompt."""
    return [[p for p in head if 0 <= p < len(prompt)] for head in kept[0].tolist()]


def require_the_librarys(engine, small, prompts, tokens):
    """Kept sets and answers of prompts that come together; how many tokens layers have kept."""
    with engine.watching() as kept:
        answers = engine.answers(prompts, greedy(tokens))
    of_layers = set()
    for prompt, answer in zip(prompts, answers, strict=True):
        expected, cache = small.library(prompt, default_policy(BUDGET), tokens)
        assert answer == expected, len(prompt)
        if len(prompt) <= BUDGET:
            continue
        mine = [tokens_of(keep, prompt) for keep in kept.of(prompt)]
        layers = small.compressed_layers
        assert mine == [tokens_of(cache.kept_positions(layer), prompt) for layer in layers]
        counts = [sum(map(len, layer)) for layer in mine]
        assert sum(counts) == BUDGET * small.kv_heads * len(layers)
        of_layers |= set(counts)
    engine.require_empty()
    return of_layers


def test_kept_tokens_and_answers_equal_those_of_the_library(engine, small):
    """Answers are long enough for every head to need new pages, some of them twice."""
    prompts = [ids_of(length, seed=length) for length in LENGTHS]
    assert len(require_the_librarys(engine, small, prompts, TOKENS)) > 20


def test_all_blocks_but_one_reserve_block_are_freed(engine):
    # the prompt in pieces of 150 tokens, then 64 + 31 tokens and up to 39 more
    assert engine.blocks_in_turn(ids_of(430, seed=1), greedy(40)) == [5, 10, 3, 4, 5, 0]


def test_protected_first_tokens_are_kept_in_every_head(engine, small):
    prompt = ids_of(250)
    with engine.watching() as kept:
        engine.answers([prompt], greedy(4, extra_args={"snapkv_protect_first": 5}))
    heads = [head for keep in kept.of(prompt) for head in tokens_of(keep, prompt)]
    assert all(head[:5] == [0, 1, 2, 3, 4] for head in heads)
    assert sum(map(len, heads)) == BUDGET * len(heads)


@pytest.mark.parametrize("family", [pytest.param("gemma2", marks=SLOW_ON_SECOND)])
def test_layers_with_sliding_windows_are_not_compressed(tmp_path, family):
    small = FamilyModel(tmp_path, family)
    prompts = [ids_of(length, seed=length) for length in (40, 70, 150, 200, 350)]
    options = {"max_num_batched_tokens": CHUNK, "enable_prefix_caching": True}
    with small_engine(small, budget=BUDGET, policy="across-layers", **options) as engine:
        for _ in range(2):  # the second time there are prefixes in the cache to begin with
            require_the_librarys(engine, small, prompts, 16)
