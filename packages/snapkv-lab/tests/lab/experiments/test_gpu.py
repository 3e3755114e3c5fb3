"""The experiment for a GPU: its small form on a CPU, interruptions, and the end of its time."""

import re
import time

import pytest
import torch

from snapkv_lab.experiments import experiment, gpu
from snapkv_lab.experiments.experiment import Size
from snapkv_lab.rows import read_rows

SMALL = {name: each.small for name, each in gpu.GPU.options.items() if isinstance(each, Size)}

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers on static caches


@pytest.mark.slow
def test_every_part_measures_something_in_half_precision(monkeypatch):
    monkeypatch.setattr(gpu, "_device", lambda context: torch.device("cpu"))
    context = gpu.GPU.context(**SMALL, model="not stored")
    rows = list(gpu.GPU.measure_rows(context))
    assert {row["part"] for row in rows} == set(gpu.GPU.parts)
    assert all(row.get("status", "ok") == "ok" for row in rows), rows
    tokens = {row["cache"]: row for row in rows if row["part"] == "token" and row["batch"] == 1}
    assert tokens.keys() == {"transformers", "snapkv, eager", *gpu.GRAPHS}
    assert all(row["ms_per_token"]["p50"] > 0 and row["first_ms"] > 0 for row in tokens.values())
    assert tokens["snapkv"]["held_bytes"] < 0.7 * tokens["full"]["held_bytes"]


def test_gpu_experiment_fits_into_its_stated_time():
    context = gpu.GPU.context()
    seconds = sum(seconds for cells in gpu.DECLARED.values() for _, seconds, *_ in cells(context))
    assert seconds <= 60 * context.minutes


def test_gpu_experiment_without_a_gpu_is_refused_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(experiment, "RESULTS", tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"device: expected .*, but got none; pass --small.*CPU$"):
        gpu.GPU.main([])
    assert not any(tmp_path.iterdir())


@pytest.fixture
def day(tmp_path, monkeypatch):
    """A run with few cells that take no time: what ran, what fails, and a function that runs it."""
    monkeypatch.setattr(experiment, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu, "_device", lambda context: torch.device("cpu"))
    ran = []

    def cell(context, name):
        ran.append(name)
        if name in failing:
            raise failing.pop(name)
        yield {"cache": name, "length": 9, "ms": one, "ratio": one}

    def declared(context):
        return ((name, 60, cell, name) for name in "abc")

    failing: dict[str, BaseException] = {}
    one = dict.fromkeys(("p20", "p50", "p80"), 1.0)
    monkeypatch.setattr(gpu, "DECLARED", dict.fromkeys(gpu.GPU.parts, declared))
    return ran, failing, lambda *arguments: gpu.GPU.main(["--part", "reading", *arguments])


def test_gpu_experiment_continues_after_an_interruption(day, capsys):
    ran, failing, call = day
    failing["b"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        call()
    call()
    assert ran == ["a", "b", "b", "c"]
    assert [row["cache"] for row in read_rows(gpu.GPU.rows)[1:]] == ["a", "b", "c"]
    assert re.search(r"reading +2 of 3 cells, 2\.0 minutes", capsys.readouterr().err)
    assert "| 9 | c | 1 | 1.000 (1.000 to 1.000) |" in gpu.GPU.page.read_text("utf-8")


def test_failed_cell_has_a_row_and_a_cell_without_time_has_none(day, capsys, monkeypatch):
    ran, failing, call = day
    failing["a"] = ValueError("why\nmore")
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    call("--minutes", "0.5")
    assert ran == []
    call()
    assert ran == ["a", "b", "c"]
    failed = read_rows(gpu.GPU.rows)[1]
    assert failed["status"] == "failed: ValueError: why"
    assert "failed: ValueError: why" in gpu.GPU.page.read_text("utf-8")
    assert "30 seconds are left; the same command continues" in capsys.readouterr().err
    call()
    assert ran == ["a", "b", "c"]


def test_no_cell_is_measured_after_the_device_is_lost(day, monkeypatch):
    ran, failing, call = day
    failing["a"] = RuntimeError("CUDA error: an illegal memory access")
    monkeypatch.setattr(gpu, "_lost", lambda: "the device is lost")
    call()
    assert ran == ["a"]
    call()
    assert ran == ["a", "b", "c"]
