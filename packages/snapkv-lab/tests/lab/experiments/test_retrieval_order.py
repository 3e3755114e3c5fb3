"""The order of the methods at 2k and 4k tokens, at every budget: the paper's Fig. 8 and more.

The margins are in nats and about half of what was measured (`docs/results/tables/quality.md`).
"""

import pytest

from snapkv import FullCache, Random, SnapKV
from snapkv_lab.experiments.contenders import SinksAndRecent
from snapkv_lab.experiments.magic_number import make_documents
from snapkv_lab.experiments.quality import BUDGETS, DOCUMENTS, policies_at
from snapkv_lab.experiments.retrieval import measure_retrieval

pytestmark = pytest.mark.slow

LENGTHS = (2048, 4096)
WINDOWS = (16, 32)


@pytest.fixture(scope="module", params=LENGTHS)
def prompt_tokens(request):
    return request.param


@pytest.fixture(scope="module")
def outcomes(prompt_tokens, demo, haystack):
    documents = make_documents(
        demo.tokenizer, haystack, prompt_tokens=prompt_tokens, count=DOCUMENTS[prompt_tokens]
    )
    policies = [FullCache(), *(policy for budget in BUDGETS for policy in policies_at(budget))]
    measured = measure_retrieval(demo.model, documents, policies)
    return {outcome.policy: outcome for outcome in measured}


def test_wide_pooling_is_as_good_as_the_full_cache(outcomes):
    assert outcomes[FullCache()].accuracy >= 0.75
    for budget in (256, 512):
        for window in WINDOWS:
            wide = outcomes[SnapKV(budget, window_size=window, kernel_size=13)]
            assert wide.accuracy >= 0.85
            assert wide.nll < outcomes[FullCache()].nll + 0.5


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_wider_the_pooling_the_better(budget, window, outcomes):
    none, five, seven, thirteen = (
        outcomes[SnapKV(budget, window_size=window, kernel_size=kernel)].nll
        for kernel in (1, 5, 7, 13)
    )
    assert thirteen + 0.1 < seven
    assert seven + 0.5 < five
    assert five + 1 < none
    assert seven + 2.5 < none


@pytest.mark.parametrize("budget", BUDGETS)
def test_pooling_by_the_average_beats_none_as_well(budget, outcomes):
    none = outcomes[SnapKV(budget, window_size=16, kernel_size=1)].nll
    for kernel in (5, 7, 13):
        average = SnapKV(budget, window_size=16, kernel_size=kernel, pooling="avg")
        assert outcomes[average].nll + 1 < none


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_attention_knows_more_than_position(budget, window, outcomes):
    voted = outcomes[SnapKV(budget, window_size=window, kernel_size=7)]
    by_position = outcomes[SinksAndRecent(budget, window_size=16)]
    assert voted.nll + 3 < by_position.nll
    assert by_position.accuracy <= 0.25


@pytest.mark.parametrize("budget", BUDGETS)
def test_position_knows_more_than_chance_at_small_budgets(budget, prompt_tokens, outcomes):
    """At a quarter of the prompt chance hits parts of the number, which recency never does."""
    recent = outcomes[SinksAndRecent(budget, window_size=16)]
    chance = outcomes[Random(budget, window_size=16)]
    assert chance.accuracy <= 0.25
    if budget <= prompt_tokens // 8:
        assert recent.nll + 2 < chance.nll
