"""A run that is killed again and again ends as if nothing had happened."""

import json
import random
import signal
import time

import pytest

from snapkv_lab.evaluate.store import key
from tests.lab.evaluate.killed import TASK, started
from tests.lab.evaluate.tiny import METHODS, save_tiny, untimed

KILLS = 10
ANSWERS = len(TASK.lengths) * TASK.depths * len(METHODS) * 2


def parsed(folder, name="samples.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def written(folder):
    path = folder / "samples.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def completed(model, folder):
    process = started(model, folder)
    process.join(timeout=120)
    assert process.exitcode == 0
    return parsed(folder)


def kill_after(process, folder, answers, seconds):
    """SIGKILL some time after so many answers are there."""
    deadline = time.monotonic() + 60
    while written(folder) < answers:
        assert process.is_alive(), "the run ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(seconds)
    process.kill()
    process.join(timeout=30)
    assert process.exitcode == -signal.SIGKILL


def cut_last_line(folder, draw):
    """What a machine that goes down can leave: a part of the last line."""
    path = folder / "samples.jsonl"
    data = path.read_bytes()
    begin = data.rfind(b"\n", 0, len(data) - 1) + 1
    path.write_bytes(data[: draw.randrange(begin + 1, len(data))])


@pytest.mark.slow
def test_ten_kills_lose_nothing_and_double_nothing(tmp_path, demo):
    model = save_tiny(tmp_path / "model", demo.tokenizer)
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    expected = completed(model, whole)
    assert len(expected) == ANSWERS

    draw = random.Random(4)
    landed = []
    for number in range(KILLS):
        more = draw.randrange(1, ANSWERS // KILLS) if number else 0
        process = started(model, folder)
        kill_after(process, folder, written(folder) + more, draw.uniform(0, 0.02))
        landed.append(written(folder))
        if number in (3, 5, 8):
            cut_last_line(folder, draw)
            assert not (folder / "samples.jsonl").read_bytes().endswith(b"\n")
    assert landed[0] == 0  # before the first answer
    assert 0 < landed[1] < landed[-1] < ANSWERS
    assert len(set(landed)) >= KILLS // 2
    assert not (folder / "summary.jsonl").exists()

    found = completed(model, folder)
    assert len({key(record) for record in found}) == len(found)
    assert untimed(found) == untimed(expected)
    summaries = [untimed(parsed(place, "summary.jsonl")) for place in (folder, whole)]
    assert summaries[0] == summaries[1]
    assert (folder / "run.json").read_bytes() == (whole / "run.json").read_bytes()
