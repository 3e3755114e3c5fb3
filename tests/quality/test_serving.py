"""What is promised of the vLLM plugin, held against the committed rows."""

from statistics import median

from benchmarks import serving
from benchmarks.records import read_rows

ROWS = read_rows(serving.ROWS)


def rows_of(part):
    return [row for row in ROWS if row["part"] == part]


def test_a_budget_of_the_prompt_gives_stock_vllms_tokens():
    (row,) = rows_of("budget of the prompt")
    assert row["same_answers"] == row["prompts"] == 64


def test_what_is_kept_is_what_the_library_keeps():
    (row,) = rows_of("library")
    assert row["same_sets"] == row["sets"] == row["prompts"] * 30 * 3
    assert row["same_answers"] >= row["stock_like_transformers"]


def test_reading_alone_takes_no_longer():
    (row,) = rows_of("reading")
    for clock in ("against_stock", "processor_against_stock"):
        assert row[clock]["p50"] <= 1.02
    assert (row["prompts_at_once"], row["pairs"]) == (1, 16)


def test_five_times_as_many_requests_decode_five_times_as_fast():
    fast = rows_of("speed")
    decode = {
        name: median(row["decode_seconds"] for row in fast if row["engine"] == name)
        for name in ("stock", "snapkv")
    }
    assert decode["snapkv"] < 15.3
    assert decode["stock"] / decode["snapkv"] > 5
    whole = {
        name: median(row["seconds"] for row in fast if row["engine"] == name) for name in decode
    }
    assert 0.5 < whole["snapkv"] / whole["stock"] < 0.6
    assert {row["most_running"] for row in fast if row["engine"] == "snapkv"} == {16}
    assert max(row["most_running"] for row in fast if row["engine"] == "stock") == 3
    assert all(row["needles"] == row["requests"] == 16 for row in fast)
