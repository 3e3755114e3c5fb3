"""`snapkv bench --baseline kvpress` with the real kvpress, which `make kvpress` installs."""

import json

import pytest
from benchmarks.kvpress import PYTHON

pytestmark = [
    pytest.mark.kvpress,
    pytest.mark.filterwarnings("ignore"),  # transformers on what is saved
]

PREFILL = ("bench", "prefill", "--shape", "smollm2-135m", "--layers", "2", "--lengths", "160,320")


def test_a_bench_has_its_rows_and_its_versions(snapkv, tmp_path):
    out = tmp_path / "rows.jsonl"
    done = snapkv(
        *PREFILL,
        *("--baseline", "transformers,kvpress", "--kvpress-python", PYTHON, "--budget", "48,96"),
        *("--policy", "snapkv,streaming-llm", "--rounds", "2", "--json", "--output", out),
    )
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert [(row["cache"], row["length"]) for row in found["rows"]] == [
        (name, length)
        for length in (160, 320)
        for name in (
            "transformers",
            "kvpress snapkv@48",
            "kvpress snapkv@96",
            "snapkv@48 dynamic",
            "snapkv@96 dynamic",
            "streaming-llm@48 dynamic",
            "streaming-llm@96 dynamic",
        )
    ]
    assert all(row["ms"]["p50"] > 0 for row in found["rows"])
    versions = [row["kvpress"] for row in found["rows"] if "kvpress" in row]
    assert len(versions) == 4
    assert all(version["transformers"].startswith("5.2.") for version in versions)
    stored = [json.loads(line) for line in out.read_text().splitlines()]
    assert all({**row, **one} == row for row, one in zip(stored, found["rows"], strict=True))


@pytest.mark.parametrize(("command", "value"), [("decode", "ms_per_token"), ("memory", "held")])
def test_decoding_and_memory_have_it_too(snapkv, command, value, monkeypatch):
    monkeypatch.setenv("SNAPKV_BENCH_ONLY", "kvpress snapkv@48")
    done = snapkv(
        *("bench", command, *PREFILL[2:], "--baseline", "kvpress", "--kvpress-python", PYTHON),
        *("--budget", "48", "--json"),
    )
    assert done.status == 0, done.err
    rows = json.loads(done.out)["rows"]
    assert [(row["cache"], row["length"]) for row in rows] == [
        ("kvpress snapkv@48", 160),
        ("kvpress snapkv@48", 320),
    ]
    stored = 2 * 2 * 3 * 64 * 4 * (48 if value == "held" else 48 + 1 + 6 * 16)
    assert all(row["held_bytes"] == stored for row in rows)
