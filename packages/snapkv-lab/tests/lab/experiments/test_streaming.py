"""The streaming measurement: losses that do not depend on the chunks, and a page of its rows."""

import math

import pytest

from snapkv import FullCache, StreamingLLM
from snapkv_lab.experiments.streaming import bucket_means, stream
from tests.families import random_ids, tiny_model


def test_with_a_full_cache_the_chunks_do_not_matter():
    model, ids = tiny_model("llama"), random_ids(1, 100)[0].tolist()
    losses = [stream(model, FullCache(), ids, chunk) for chunk in (7, 99)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3, abs=1e-3)
    assert len(losses[0]) == 99


def test_a_budget_that_is_never_reached_is_the_full_cache():
    model, ids = tiny_model("llama"), random_ids(1, 60)[0].tolist()
    roomy = stream(model, StreamingLLM(64), ids, 10)
    assert roomy == pytest.approx(stream(model, FullCache(), ids, 10))


def test_buckets_are_means_and_a_rest_is_left_out():
    assert bucket_means([1.0, 2.0, 3.0, 4.0, 100.0], 2) == [1.5, 3.5]
    assert math.isclose(bucket_means([2.0] * 8, 8)[0], 2.0)
