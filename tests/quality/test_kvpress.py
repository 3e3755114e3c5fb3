"""The peer that runs kvpress, where `make kvpress` has made its environment."""

import pytest
from benchmarks import kvpress
from benchmarks.records import read_rows

from snapkv import SnapKV
from tests.families import random_ids, tiny_model

needs_kvpress = pytest.mark.skipif(
    not kvpress.PYTHON.is_file(), reason="needs kvpress's own environment: make kvpress"
)


@pytest.mark.slow
@needs_kvpress
def test_the_peer_keeps_the_budget_and_every_cache_has_its_rows(monkeypatch):
    monkeypatch.setattr(kvpress, "POLICY", SnapKV(64, window_size=16, kernel_size=5, pooling="avg"))
    prompts = {200: random_ids(1, 200)[0].tolist()}
    rows = list(kvpress.measure(tiny_model("llama"), prompts, prefill_rounds=2, decode_rounds=3))
    assert [(row["benchmark"], row["cache"]) for row in rows] == [
        (benchmark, cache)
        for benchmark in ("prefill", "decode")
        for cache in ("kvpress", "kvpress full", "snapkv", "transformers")
    ]
    assert all(row["peer"]["kept_tokens"] == 64 for row in rows)
    assert all(row["ms"]["p50"] > 0 for row in rows)
    assert all(row["against_kvpress"]["p50"] == 1 for row in rows if row["cache"] == "kvpress")


def test_what_the_page_says_is_in_the_rows():
    shares = {
        (row["benchmark"], row["cache"], row["prompt_tokens"]): row["against_full"]["p50"]
        for row in read_rows(kvpress.ROWS)
    }
    for length in kvpress.LENGTHS:
        assert shares["decode", "snapkv", length] < shares["decode", "kvpress", length] < 1
    ours, theirs = shares["prefill", "snapkv", 1024], shares["prefill", "kvpress", 1024]
    assert 1.02 < theirs < ours < 1.05
    assert 0.005 < ours - theirs < 0.015
    assert max(shares["prefill", "snapkv", 4096], shares["prefill", "kvpress", 4096]) < 1


def test_the_page_is_what_its_rows_render_to():
    assert kvpress.PAGE.read_text("utf-8") == kvpress.render(read_rows(kvpress.ROWS))
