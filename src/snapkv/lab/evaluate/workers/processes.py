"""WorkerPool in processes of their own on this machine, one for each device that is named."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from snapkv.lab.evaluate.asking import Answerer, Asked
from snapkv.lab.evaluate.store import Record
from snapkv.lab.evaluate.workers.base import Worker, WorkerEndedError, WorkerPool
from snapkv.lab.evaluate.workers.equipment import Equipment


class Processes(WorkerPool):
    """WorkerPool in processes of this machine.

    Args:
        devices: one worker for each; a device may be named several times.
        equipment: what each of them has.
    """

    def __init__(self, devices: Sequence[str], equipment: Equipment) -> None:
        threads = max(1, (os.cpu_count() or 1) // len(devices))
        equipment = replace(equipment, threads=threads)
        super().__init__([_Process(device, equipment) for device in devices], devices[0])

    def ready(self, busy: Sequence[Worker]) -> Sequence[Worker]:
        """Those whose pipe has something to read, if only its end."""
        ends: dict[Any, Worker] = {worker.pipe: worker for worker in busy}  # type: ignore[attr-defined] # all are processes
        return [ends[pipe] for pipe in wait(list(ends))]


class _Process(Worker):
    """One process; it is started with the first question, and anew where it has ended."""

    def __init__(self, device: str, equipment: Equipment) -> None:
        self._device, self._equipment = device, equipment
        self._process: Any = None
        self.pipe: Connection | None = None

    def begin(self, asked: Asked) -> None:
        for _ in range(2):  # one that ended while it was idle is started anew
            if self._process is None:
                self._start()
            assert self.pipe is not None
            with contextlib.suppress(OSError):
                self.pipe.send(asked)
                return
            self.end()

    def records(self) -> list[Record]:
        assert self.pipe is not None
        try:
            given = self.pipe.recv()
        except (EOFError, OSError):
            self.end()
            raise WorkerEndedError from None
        if isinstance(given, BaseException):
            raise given
        records: list[Record] = given
        return records

    def end(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.join()
        assert self.pipe is not None
        self.pipe.close()
        self._process = self.pipe = None

    def _start(self) -> None:
        spawned = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawned.Pipe()
        self._process = spawned.Process(
            target=_work, args=(theirs, self._equipment, self._device), daemon=True
        )
        self._process.start()
        theirs.close()


def _work(pipe: Connection, equipment: Equipment, device: str) -> None:
    """Answer until nobody asks any more. Ctrl-C is for the process that asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answerer: Answerer | None = None
    with contextlib.suppress(EOFError, OSError):  # whoever asked has ended
        while True:
            asked = pipe.recv()
            try:
                if answerer is None:
                    answerer = equipment.answerer(device)
                pipe.send(list(answerer.records(asked)))
            except Exception as error:
                pipe.send(error)
