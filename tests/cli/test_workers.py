"""`snapkv eval` with workers: the answers of one process, and what does not go together."""

import importlib.util
import json

import pytest

from tests.lab.evaluate.tiny import save_tiny, untimed

NEEDLE = ("eval", "needle", "--lengths", "300", "--depths", 2, "--digits", 1, "--cloze")


@pytest.fixture
def model(tmp_path, demo):
    return save_tiny(tmp_path / "model", demo.tokenizer)


def test_two_workers_answer_as_one_process(snapkv, model, here):
    given = (*NEEDLE, "--model", model, "--budget", "64,40", "--json", "--output")
    alone = snapkv(*given, "alone", "--device", "cpu")
    two = snapkv(*given, "two", "--devices", "cpu,cpu")
    assert (alone.status, two.status) == (0, 0)
    found = [json.loads(done.out) for done in (alone, two)]
    assert found[0]["run"] == found[1]["run"]
    rows = [untimed(one["rows"]) for one in found]
    assert rows[0] == rows[1]
    again = snapkv(*given, "two", "--device", "cpu")
    assert untimed(json.loads(again.out)["rows"]) == rows[0]


def test_workers_are_told_of_the_loss_of_the_references(snapkv, model, here):
    given = (*NEEDLE, "--model", model, "--budget", 64, "--limit", 1, "--reference-loss", "--json")
    done = snapkv(*given, "--devices", "cpu")
    assert done.status == 0
    rows = json.loads(done.out)["rows"]
    assert len(rows) == 4
    assert all(row["loss"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--devices", "cpu", "--device", "cpu"), "expected one of device, devices and ray, got"),
        (("--devices", "cpu", "--ray", "local"), "got devices and ray; leave one out"),
        (("--workers", "2"), "workers: expected it with ray, got 2 without"),
        (("--ray", "local", "--workers", "0"), "workers: expected at least 1, got 0"),
        (("--devices", "cpu,tpu:7"), "got 'tpu:7'"),
        (("--devices", "cpu,"), "got ''"),
    ],
)
def test_workers_nowhere_are_refused_before_a_model_is_loaded(snapkv, here, options, message):
    done = snapkv(*NEEDLE, *options)
    assert done.status == 2
    assert message in done.err
    assert done.err.count("\n") == 1


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_ray_that_is_not_installed_is_said_with_the_command(snapkv, model, here):
    done = snapkv(*NEEDLE, "--model", model, "--ray", "local")
    assert done.status == 2
    assert "needs the package ray, which is not installed; run pip install 'ray" in done.err
