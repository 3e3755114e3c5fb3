"""The demo model finds a magic number from a compressed cache: the paper's Fig. 8 on a real model.

What this catches and unit tests do not: positions counted from the compressed length, values of
another head, votes of another head, a shifted or dropped window, missing pooling.
"""

import pytest

from snapkv import FullCache, Random, SnapKV
from snapkv_lab.experiments.contenders import SinksAndRecent
from snapkv_lab.experiments.magic_number import make_documents
from snapkv_lab.experiments.retrieval import measure_retrieval

METHODS = {
    "full": FullCache(),
    "kernel 13": SnapKV(256, window_size=16, kernel_size=13),
    "kernel 7": SnapKV(256, window_size=16, kernel_size=7),
    "no pooling": SnapKV(256, window_size=16, kernel_size=1),
    "sinks and recent": SinksAndRecent(256, window_size=16),
    "random": Random(256, window_size=16),
}


pytestmark = pytest.mark.slow  # two minutes of the demo model


@pytest.fixture(scope="module")
def outcomes(demo, haystack):
    documents = make_documents(demo.tokenizer, haystack, prompt_tokens=768, count=24)
    measured = measure_retrieval(demo.model, documents, list(METHODS.values()))
    return dict(zip(METHODS, measured, strict=True))


def test_the_full_cache_finds_the_number(outcomes):
    assert outcomes["full"].accuracy >= 0.95


def test_wide_pooling_finds_it_from_a_third_of_the_cache(outcomes):
    assert outcomes["kernel 13"].accuracy >= 0.9


def test_the_default_kernel_finds_most(outcomes):
    assert outcomes["kernel 7"].accuracy >= 0.75


def test_without_pooling_the_tail_of_the_number_is_lost(outcomes):
    assert outcomes["no pooling"].accuracy <= 0.25
    assert outcomes["kernel 7"].nll + 3 < outcomes["no pooling"].nll


@pytest.mark.parametrize("method", ["sinks and recent", "random"])
def test_a_selection_that_does_not_look_at_attention_loses_it(method, outcomes):
    assert outcomes[method].accuracy <= 0.45
    assert outcomes["kernel 7"].nll + 3 < outcomes[method].nll


def test_every_compressed_cache_holds_a_third_of_the_bytes(outcomes):
    for name, outcome in outcomes.items():
        share = outcome.held_bytes / outcome.full_bytes
        assert share == (1 if name == "full" else pytest.approx(256 / 768))
