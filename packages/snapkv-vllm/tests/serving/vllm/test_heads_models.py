"""Heads of different length beside layers with sliding windows, and with a soft cap."""

import pytest

from snapkv import AdaKV, SnapKV
from tests.serving.vllm.engines import greedy, small_engine
from tests.serving.vllm.families import FamilyModel
from tests.serving.vllm.models import ids_of

BUDGET = 64


@pytest.mark.parametrize("family", ["gemma2", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_kept_tokens_and_answers_equal_those_of_the_library(tmp_path, family):
    small = FamilyModel(tmp_path, family)
    prompts = [ids_of(length, seed=length) for length in (40, 70, 150, 200, 350)]
    policy = AdaKV(SnapKV(BUDGET))
    options = {"max_num_batched_tokens": 150, "enable_prefix_caching": True}
    with small_engine(small, budget=BUDGET, policy="adakv", **options) as engine:
        for _ in range(2):  # the second time there are prefixes in the cache to begin with
            with engine.watching() as kept:
                answers = engine.answers(prompts, greedy(16))
            for prompt, answer in zip(prompts, answers, strict=True):
                expected, cache = small.library(prompt, policy, 16)
                assert answer == expected, len(prompt)
                if len(prompt) > BUDGET:
                    for layer, keep in zip(small.compressed_layers, kept.of(prompt), strict=True):
                        library = cache.kept_positions(layer)[0].tolist()
                        assert [[p for p in head if p >= 0] for head in keep[0].tolist()] == [
                            [p for p in head if 0 <= p < len(prompt)] for head in library
                        ]
        engine.require_empty()
