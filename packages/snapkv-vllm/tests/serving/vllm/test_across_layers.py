"""One budget for all layers in an engine: kept tokens and answers equal the library's."""

import pytest

from snapkv import AdaKV, SnapKV, default_policy
from snapkv_vllm.layers import LayerRun
from tests.serving.vllm.conftest import SECOND_RUNNER, SLOW_ON_SECOND
from tests.serving.vllm.engines import require_same_as_library, small_engine
from tests.serving.vllm.models import SmallModel, ids_of

BUDGET, CHUNK = 64, 150
TOKENS = 16 if SECOND_RUNNER else 70
LENGTHS = [40, 64, 65, 66, 95, 96, 97, 127, 128, 150, 151, 182, *range(190, 430, 20)]


@pytest.fixture(scope="module", params=[False, True], ids=["in-place", "prefix-caching-in-one-run"])
def engine(small, request):
    """Kept tokens go to the first blocks of a prompt, or to others where these may be shared.

    Layers are compressed one by one, or in one run as in half precision.
    """
    options = {"policy": "across-layers", "enable_prefix_caching": request.param}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerRun, "_is_half_on_cpu", property(lambda _: request.param))
        with small_engine(small, budget=BUDGET, max_num_batched_tokens=CHUNK, **options) as made:
            yield made


def test_kept_tokens_and_answers_equal_those_of_the_library(engine, small):
    """Answers are long enough for every head to need new pages, some of them twice."""
    prompts = [ids_of(length, seed=length) for length in LENGTHS]
    kept = require_same_as_library(engine, small, prompts, default_policy(BUDGET), TOKENS)
    long = [prompt for prompt in prompts if len(prompt) > BUDGET]
    assert len({sum(map(len, layer)) for ids in long for layer in kept.of(ids)}) > 20


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        pytest.param("gemma2", default_policy(BUDGET), marks=SLOW_ON_SECOND),
        pytest.param("gemma2", AdaKV(SnapKV(BUDGET)), marks=SLOW_ON_SECOND),
        pytest.param("gemma3_text", AdaKV(SnapKV(BUDGET)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layers_with_sliding_windows_are_not_compressed(tmp_path, family, policy):
    small = SmallModel(tmp_path, family)
    prompts = [ids_of(length, seed=length) for length in (40, 70, 150, 200, 350)]
    options = {"max_num_batched_tokens": CHUNK, "enable_prefix_caching": True}
    with small_engine(small, budget=BUDGET, policy=policy.name, **options) as engine:
        for _ in range(2):  # the second time there are prefixes in the cache to begin with
            require_same_as_library(engine, small, prompts, policy, 16)
