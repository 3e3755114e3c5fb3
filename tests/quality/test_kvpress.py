"""The page beside kvpress says what its rows say."""

from benchmarks import kvpress
from benchmarks.records import read_rows


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
