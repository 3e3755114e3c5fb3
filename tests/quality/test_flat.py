"""The margins that are promised of a machine with two cores, held on the committed rows."""

from benchmarks import flat
from benchmarks.records import read_rows


def rows_of(benchmark):
    found = [row for row in read_rows(flat.ROWS) if row["benchmark"] == benchmark]
    assert found, benchmark
    assert all(row["environment"]["threads"] == flat.THREADS for row in found)
    return found


def test_a_token_takes_as_long_behind_8k_as_behind_1k():
    rows = rows_of("flat")
    assert [row["prompt_tokens"] for row in rows] == list(flat.Sizes().lengths)
    assert all(row["ratio"]["p50"] <= 1.05 for row in rows)


def test_a_batch_decodes_twice_as_fast_as_with_full_caches():
    ours, *others = rows_of("batch")
    assert (ours["cache"], ours["batch"], ours["length"]) == ("snapkv", 4, 8192)
    assert len(others) == 2
    assert all(row["ratio"]["p50"] >= 2 for row in others)


def test_vote_selection_and_gather_are_a_small_part_of_reading():
    shares = {row["prompt_tokens"]: row["share"]["p50"] for row in rows_of("overhead")}
    assert shares[4096] <= 0.02
    assert shares[8192] <= 0.01


def test_memory_peaks_no_higher_and_falls_by_prompt_over_budget():
    rows = {row["cache"]: row for row in rows_of("peak memory")}
    ours, plain = rows["snapkv"], rows["transformers"]
    assert ours["peak_growth_bytes"] <= plain["peak_growth_bytes"]
    factor = ours["prompt_tokens"] / ours["budget"]
    assert plain["kept_bytes"] == factor * ours["kept_bytes"]
    assert ours["held_bytes"] <= 1.01 * ours["kept_bytes"]  # beside them, the kept positions


def test_the_page_is_what_its_rows_render_to():
    rows_of("flat")
    assert flat.PAGE.read_text("utf-8") == flat.render(read_rows(flat.ROWS))


def spread(value):
    return {"p20": value, "p50": value, "p80": value}


def test_every_part_has_its_table():
    described = {
        "model": {
            "name": "demo",
            "dtype": "float32",
            "attn_implementation": "sdpa",
            "device": "cpu",
        },
        "environment": dict.fromkeys(
            ("processor", "threads", "torch", "transformers", "commit"), "x"
        ),
    }
    rows = [
        {"benchmark": "flat", "prompt_tokens": 1024, "budget": 512, "tokens": 9}
        | {"ms_per_token": spread(31.5), "ratio": spread(1.0)},
        {"benchmark": "batch", "cache": "transformers", "batch": 4, "length": 8192}
        | {"ms_per_token": spread(95.0), "ratio": spread(2.5), "held_bytes": 2**20},
        {"benchmark": "overhead", "prompt_tokens": 4096, "reading_ms": spread(9700.0)}
        | {"compressing_ms": spread(120.0), "share": spread(0.0124)},
        {"benchmark": "peak memory", "cache": "snapkv", "prompt_tokens": 8192}
        | {"peak_growth_bytes": 2**27, "held_bytes": 2**24},
    ]
    page = flat.render([row | described for row in rows])
    for shown in ("| 1,024 | 31.5 |", "| 2.500 (2.500 to 2.500) |", "| 1.24% |", "| 128.0 MiB |"):
        assert shown in page
