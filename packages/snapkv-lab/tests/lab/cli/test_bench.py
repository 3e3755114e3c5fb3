"""`snapkv bench` on a tiny model: rows, tables, files, figures, and rows of caches that do
not fit.
"""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from snapkv_lab.cli import bench
from snapkv_lab.measure import contenders
from tests.families import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers on static caches

SMALL = ("--lengths", "64,128", "--budget", "48", "--rounds", "2")


@pytest.fixture
def tiny(monkeypatch):
    """Let the command load a tiny model, and copy few bytes to measure the bandwidth."""
    loaded = SimpleNamespace(model=tiny_model("llama"), description=lambda: {"name": "tiny"})
    monkeypatch.setattr("snapkv_app.cli.loading.load", lambda **options: loaded)
    monkeypatch.setattr("snapkv_lab.measure.decode._COPIED_BYTES", {"cpu": 2**20})
    yield loaded.model
    assert loaded.model.config._attn_implementation == "sdpa"


def rows_of(done):
    assert done.status == 0, done.err
    return json.loads(done.out)["rows"]


def test_decode_gives_a_row_per_length_batch_and_cache(snapkv, tiny, tmp_path):
    out = tmp_path / "rows.jsonl"
    done = snapkv(
        *("bench", "decode", "--lengths", "64,256", "--budget", "50%", "--rounds", 2, "--json"),
        *("--batch", "1,2", "--tokens", 2, "--bits", "exact,int8", "--output", out),
    )
    rows = rows_of(done)
    names = ("transformers", "default@50%", "default@50% int8")
    assert [(row["batch"], row["length"], row["cache"]) for row in rows] == [
        (batch, length, name) for batch in (1, 2) for length in (64, 256) for name in names
    ]
    for row in rows:
        assert row["status"] == "ok"
        assert (
            row["ms_per_token"]["p20"] <= row["ms_per_token"]["p50"] <= row["ms_per_token"]["p80"]
        )
        assert row["tokens_per_second"] > 0
        assert row["least_ms"] >= 0
        assert row["of_ceiling"] >= 0  # so little of a tiny model is copying that it rounds to none
    assert all(row["ratio"]["p50"] == 1 for row in rows if row["cache"] == "transformers")
    held = {row["cache"]: row["held_bytes"] for row in rows if row["length"] == 256}
    assert held[names[2]] < 1.4 * held[names[1]] < 1.4 * held["transformers"]
    stored = [json.loads(line) for line in out.read_text().splitlines()]
    assert [{name: row[name] for name in rows[0]} for row in stored] == rows
    assert stored[0]["model"] == {"name": "tiny"}
    assert stored[0]["environment"]["torch"] == torch.__version__


def test_prefill_bench_reads_in_the_requested_pieces(snapkv, tiny):
    way = "layer-by-layer:chunk_tokens=32"
    rows = rows_of(snapkv("bench", "prefill", *SMALL, "--prefill", way, "--json"))
    caches = ("transformers", f"default@48 {way}")
    assert [(row["cache"], row["length"]) for row in rows] == [
        (cache, length) for length in (64, 128) for cache in caches
    ]
    assert all(row["ms"]["p50"] > 0 for row in rows)


def test_memory_bench_runs_each_cache_alone(snapkv, tiny, monkeypatch, tmp_path):
    """The commands of separate processes run in this one."""
    started = []

    def run(command, *, env, **options):
        started.append(env[bench._ALONE])
        with monkeypatch.context() as patched:
            patched.setenv(bench._ALONE, started[-1])
            done = snapkv(*command[3:])
        return subprocess.CompletedProcess(command, done.status, stdout=done.out)

    arguments = ("bench", "memory", *SMALL, "--output", str(tmp_path / "rows.jsonl"))
    monkeypatch.setattr(bench.sys, "argv", ["snapkv", *arguments])
    monkeypatch.setattr(bench.subprocess, "run", run)
    rows = rows_of(snapkv(*arguments, "--json"))
    assert started == ["transformers", "default@48"]
    held = {(row["cache"], row["length"]): row["held_bytes"] for row in rows}
    full, ours = held["transformers", 128], held["default@48", 128]
    assert full / 128 * 48 <= ours <= 1.2 * full / 128 * 48
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(rows) == 4


@pytest.mark.slow
def test_mapped_weights_do_not_count_as_memory_of_a_cache():
    """The real demo model maps its weights, which come into memory when they are used."""
    command = (
        sys.executable,
        "-m",
        "snapkv_app",
        "bench",
        "memory",
        "--baseline",
        "none",
        "--json",
    )
    sizes = ("--lengths", "64,1k", "--budget", "48", "--json")
    done = subprocess.run([*command, *sizes], stdout=subprocess.PIPE, check=True)
    short, long = json.loads(done.stdout)["rows"]
    assert short["peak_growth_bytes"] < long["peak_growth_bytes"] < 2**27


def test_throughput_fills_the_memory_and_names_its_limit(snapkv, tiny):
    weights = sum(parameter.nbytes for parameter in tiny.parameters())
    per_token = 4 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head_dim, bytes
    memory = weights + 3.5 * 128 * per_token
    rows = rows_of(
        snapkv(
            *("bench", "throughput", "--lengths", "128", "--budget", "48", "--rounds", "2"),
            *("--tokens", "2", "--memory-gb", memory / 1e9, "--json"),
        )
    )
    full, ours = rows
    assert (full["cache"], full["batch"], full["limited_by"]) == ("transformers", 3, "memory")
    assert ours["batch"] > full["batch"]


def test_auto_dtype_of_a_shape_is_float32_on_a_cpu(snapkv):
    shape = ("--shape", "smollm2-135m", "--num-layers", 1, "--dtype", "auto", "--device", "cpu")
    done = snapkv("bench", "decode", *shape, *SMALL, "--tokens", 2, "--json")
    assert {row["status"] for row in rows_of(done)} == {"ok"}
    assert json.loads(done.out)["model"]["dtype"] == "float32"


def test_cache_that_does_not_fit_has_a_cell(snapkv, tiny, monkeypatch, tmp_path):
    make, figure = contenders.FULL_CACHES["transformers"], tmp_path / "figure.svg"

    def limited(model, prompt_tokens):
        if prompt_tokens > 100:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return make(model, prompt_tokens)

    monkeypatch.setitem(contenders.FULL_CACHES, "transformers", limited)
    rows = rows_of(snapkv("bench", "decode", *SMALL, "--json", "--plot", figure))
    status = {(row["cache"], row["length"]): row["status"] for row in rows}
    assert status == {
        ("transformers", 64): "ok",
        ("transformers", 128): "out of memory",
        ("default@48", 64): "ok",
        ("default@48", 128): "ok",
    }
    drawn = figure.read_text()
    assert drawn.count("<!-- OOM -->") == 1
    assert "<!-- default@48 -->" in drawn
