"""The page beside kvpress says what its rows say."""

from benchmarks import kvpress
from benchmarks.records import read_rows


def test_no_median_is_further_apart_than_three_percent_and_single_runs_are():
    ours = [row["against_kvpress"] for row in read_rows(kvpress.ROWS) if row["cache"] == "snapkv"]
    assert len(ours) == 2 * len(kvpress.LENGTHS)
    for ratio in ours:
        assert 0.97 < ratio["p50"] < 1.03
        assert ratio["p80"] - ratio["p20"] > 0.05


def test_the_page_is_what_its_rows_render_to():
    assert kvpress.PAGE.read_text("utf-8") == kvpress.render(read_rows(kvpress.ROWS))
