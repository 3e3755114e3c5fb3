"""The GPU benchmark, in its small form: every part gives rows that say what they are."""

import json

import pytest

from snapkv.storage.append_buffer import ROOM_TOKENS
from snapkv_lab.experiments import gpu

SMALL = gpu.GPU.given(small=True)

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers on static caches


def rows_of(tmp_path, *arguments):
    path = tmp_path / "rows.jsonl"
    gpu.GPU.main(["--small", "--output", str(path), *arguments])
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_part_measures_something(tmp_path):
    rows = rows_of(tmp_path)
    assert {row["part"] for row in rows} == {*gpu.PARTS, "flat"}
    assert all(row["environment"]["torch"] and row["budget"] == 96 for row in rows)
    assert all(row.get("status", "ok") == "ok" for row in rows)
    decode = [row for row in rows if row["part"] == "decode"]
    assert {(row["batch"], row["length"]) for row in decode} == {
        (batch, length) for batch in SMALL.batches for length in SMALL.lengths
    }
    assert {row["cache"] for row in decode} == {
        "transformers",
        "transformers-static",
        "snapkv@96 static",
        "snapkv@96 dynamic",
    }
    assert all(row["ms_per_token"]["p50"] > 0 and row["of_ceiling"] > 0 for row in decode)
    drafts = [row for row in rows if row["part"] == "medusa"]
    assert {row["acceptance"] for row in drafts} == {"set, not measured"}
    held = {row["cache"]: row["held_bytes"] for row in decode if row["length"] == 512}
    generated = 1 + 3 * SMALL.tokens  # room is made at the first of them
    stored = (96 + 1 + ROOM_TOKENS) / (512 + generated)
    assert held["snapkv@96 dynamic"] == pytest.approx(stored * held["transformers"], rel=0.02)


def test_a_part_that_the_time_does_not_suffice_for_is_named(tmp_path):
    (row,) = rows_of(tmp_path, "--part", "decode", "--minutes", "0.01")
    assert row["part"] == "decode"
    assert row["status"].startswith("skipped")


def test_without_a_gpu_the_full_form_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="pass --small"):
        gpu.GPU.main(["--output", str(tmp_path / "rows.jsonl")])
