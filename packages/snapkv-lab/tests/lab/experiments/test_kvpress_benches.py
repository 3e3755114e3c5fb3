"""The benches of `snapkv bench` with the real kvpress in them, which `make kvpress` installs."""

import json

import pytest

from snapkv_lab.experiments import kvpress

pytestmark = [
    pytest.mark.kvpress,
    pytest.mark.filterwarnings("ignore"),  # transformers on what is saved
]

SMALL = ("--layers", "2", "--lengths", "160", "320", "--rounds", "2")


@pytest.fixture
def rows_of(capsys):
    def call(*arguments):
        kvpress.main(["--bench", *arguments, *SMALL])
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return call


def test_a_bench_has_its_rows_and_its_versions(rows_of):
    rows = rows_of("prefill", "--budget", "48", "96")
    assert [(row["cache"], row["length"]) for row in rows] == [
        (name, length)
        for length in (160, 320)
        for name in (
            "transformers",
            "kvpress snapkv@48",
            "kvpress snapkv@96",
            "snapkv@48 dynamic",
            "snapkv@96 dynamic",
        )
    ]
    assert all(row["ms"]["p50"] > 0 for row in rows)
    versions = [row["kvpress"] for row in rows if "kvpress" in row]
    assert len(versions) == 4
    assert all(version["transformers"].startswith("5.2.") for version in versions)


@pytest.mark.parametrize(
    ("bench", "stored_tokens"),
    [("memory", 48), ("decode", 48 + 1 + 3 * 16)],
)
def test_decoding_and_memory_have_it_too(rows_of, bench, stored_tokens):
    rows = rows_of(bench, "--budget", "48")
    theirs = [row for row in rows if row["cache"] == "kvpress snapkv@48"]
    assert [row["length"] for row in theirs] == [160, 320]
    assert all(row["held_bytes"] == 2 * 2 * 3 * 64 * 4 * stored_tokens for row in theirs)
    others = {"transformers", "snapkv@48 dynamic"} if bench == "decode" else set()
    assert {row["cache"] for row in rows} - {"kvpress snapkv@48"} == others
