"""`snapkv eval` with workers: the answers of one process, and what does not go together."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from snapkv_lab.cli import workers
from snapkv_lab.cli.workers import WorkerOptions
from tests.cli.test_interrupts import CONTINUES, start
from tests.lab.evaluate.tiny import save_tiny, untimed

NEEDLE = ("eval", "needle", "--lengths", "300", "--depths", 2, "--digits", 1, "--cloze")


@pytest.fixture
def model(tmp_path, demo):
    return save_tiny(tmp_path / "model", demo.tokenizer)


def test_two_workers_answer_as_one_process(snapkv, model, here):
    given = (*NEEDLE, "--model", model, "--budget", "64,40", "--json", "--results")
    alone = snapkv(*given, "alone", "--device", "cpu")
    two = snapkv(*given, "two", "--devices", "cpu,cpu")
    assert (alone.status, two.status) == (0, 0)
    found = [json.loads(done.out) for done in (alone, two)]
    assert found[0]["run"] == found[1]["run"]
    rows = [untimed(one["rows"]) for one in found]
    assert rows[0] == rows[1]
    again = snapkv(*given, "two", "--device", "cpu")
    assert untimed(json.loads(again.out)["rows"]) == rows[0]


def test_a_folder_of_a_model_is_found_from_wherever_a_worker_is(model, here):
    options = WorkerOptions(model=model.name, devices="cpu")
    with workers._workers(options) as pool:
        assert pool._workers[0]._equipment.load["name"] == str(model)


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def living(group):
    """The processes of a group that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state != "Z":
                found.append(path.parent.name)
    return found


def lines(folder):
    path = folder / "samples.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize("moment", ["while they import", "while they answer"])
def test_ctrl_c_is_one_line_leaves_no_worker_and_the_run_goes_on(snapkv, model, here, moment):
    given = ("eval", "needle", "--lengths", "300", "--depths", "40", "--digits", "1", "--cloze",
             "--model", str(model), "--budget", "64", "--results", "out")  # fmt: skip
    process = start((*given, "--devices", "cpu,cpu"), here, start_new_session=True)
    try:
        while process.poll() is None:
            if moment == "while they import" and len(children(process.pid)) > 2:
                break  # the third keeps count of what processes share
            if moment == "while they answer" and lines(here / "out"):
                break
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
        out, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, out, errors) == (130, "", CONTINUES)
    deadline = time.monotonic() + 60
    while living(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert living(process.pid) == []
    there = lines(here / "out")
    assert there < 80
    done = snapkv(*given, "--device", "cpu", "--json")
    assert done.status == 0
    assert lines(here / "out") == 80
