"""Times of compressions on a CPU and on a device that runs behind its host."""

import time

import pytest
import torch

from snapkv_vllm.metrics import Stopwatch


def test_stopwatch_reports_times_at_once_on_a_cpu():
    told = []
    with Stopwatch(torch.device("cpu"), told.append).timing():
        time.sleep(0.02)
    (seconds,) = told
    assert 0.02 <= seconds < 2


class Device:
    """An accelerator that gets on when the test says so; its events stand at its own time."""

    def __init__(self):
        self.now = 0.0
        self.recorded = []

    def event(self, device, *, enable_timing):
        assert enable_timing
        return Event(self)

    def pass_one(self, milliseconds):
        self.now += milliseconds
        self.recorded.pop(0).at = self.now


class Event:
    def __init__(self, device):
        self.device, self.at = device, None

    def record(self):
        self.device.recorded.append(self)

    def query(self):
        return self.at is not None

    def elapsed_time(self, end):
        return end.at - self.at


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(torch, "Event", made.event)
    return made


def test_stopwatch_reports_times_after_the_device_has_passed_the_events(device):
    told = []
    stopwatch = Stopwatch(torch.device("cuda"), told.append)
    for _ in range(2):
        with stopwatch.timing():
            pass
    stopwatch.report()
    assert told == []
    device.pass_one(1.0)
    device.pass_one(4.0)
    device.pass_one(100.0)
    stopwatch.report()
    assert told == [0.004]
    device.pass_one(8.0)
    stopwatch.report()
    stopwatch.report()
    assert told == [0.004, 0.008]
