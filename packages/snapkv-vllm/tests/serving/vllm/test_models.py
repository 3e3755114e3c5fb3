"""The models that users serve: kept tokens and answers equal those of the library."""

import pytest

from snapkv import default_policy
from snapkv.policies.default import by_layer
from snapkv.validation import DEFAULT
from tests.serving.vllm.engines import require_same_as_library, small_engine
from tests.serving.vllm.models import SmallModel, ids_of

BUDGET = 64
POLICY = by_layer(default_policy(BUDGET))
FAMILIES = (
    "gemma3_text",
    "gpt_oss",
    "deepseek_v3",
    *(pytest.param(one, marks=pytest.mark.slow) for one in ("gemma2", "cohere2")),
)
LENGTHS = (40, 64, 70, 150, 151, 200, 350)


@pytest.fixture(scope="module", params=FAMILIES)
def small(request, tmp_path_factory):
    return SmallModel(tmp_path_factory.mktemp(request.param), request.param)


def test_kept_tokens_and_answers_equal_those_of_the_library(small):
    """Prompts are asked two times, the second time with cached prefixes."""
    is_latent = small.model.config.model_type == "deepseek_v3"
    options = {
        "block_size": 16 if is_latent else 32,
        "max_num_batched_tokens": 150,
        "enable_prefix_caching": True,
    }
    prompts = [ids_of(length, seed=length) for length in LENGTHS]
    with small_engine(small, policy=DEFAULT, budget=BUDGET, **options) as engine:
        for _ in range(2):
            require_same_as_library(engine, small, prompts, POLICY, 16)
