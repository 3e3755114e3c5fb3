"""Workers in processes of their own on this machine, one for each device that is named."""

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from snapkv.errors import InvalidArgumentError, SnapKVError
from snapkv_lab.evaluate.asking import Answerer, Asked
from snapkv_lab.evaluate.store import Record
from snapkv_lab.evaluate.workers.base import (
    Equipment,
    Worker,
    WorkerEndedError,
    WorkerNotLoadedError,
    WorkerPool,
)

_LOADED = "loaded"
"""What a process says when it has the model."""


class Processes(WorkerPool):
    """Workers in processes of this machine."""

    def __init__(self, devices: Sequence[str], equipment: Equipment) -> None:
        threads = equipment.threads or max(1, (os.cpu_count() or 1) // len(devices))
        equipment = replace(equipment, threads=threads)
        workers = [_Process(device, equipment) for device in devices]
        super().__init__(workers, one_device(devices))

    def ready(self, busy: Sequence[Worker]) -> Sequence[Worker]:
        """Those whose answers are there, or will never come."""
        workers: list[Any] = list(busy)  # all are processes
        while True:
            pipes = {worker.pipe: worker for worker in workers if worker.pipe is not None}
            there = [worker for worker in workers if worker.pipe is None]
            there = there or [pipes[pipe] for pipe in wait(list(pipes))]
            if answered := [worker for worker in there if worker.has_answered()]:
                return answered


def one_device(devices: Sequence[str]) -> str:
    """The device that stands for all of them in results: the first of their kind."""
    from snapkv.app.models import chosen_device

    kinds = {chosen_device(device).type for device in devices}
    if len(kinds) != 1:
        raise InvalidArgumentError(
            "devices: expected devices of one kind, whose answers are alike, got "
            f"{', '.join(devices) or 'none'}; leave the others out"
        )
    (kind,) = kinds
    return kind if kind == "cpu" else f"{kind}:0"


class _Process(Worker):
    """One process; it is started with the first question, and anew where it has ended."""

    def __init__(self, device: str, equipment: Equipment) -> None:
        self._device, self._equipment = device, equipment
        self._process: Any = None
        self._given: Any = None
        self._is_loaded = False
        self.pipe: Connection | None = None

    def begin(self, asked: Asked) -> None:
        self._given = None
        for _ in range(2):  # one that ended while it was idle is started anew
            if self._process is None:
                self._start()
            assert self.pipe is not None
            with contextlib.suppress(OSError):
                self.pipe.send(asked)
                return
            self.end()

    def has_answered(self) -> bool:
        """Take what its pipe holds; False where it has only said that it has the model."""
        try:
            self._given = None if self.pipe is None else self.pipe.recv()
        except (EOFError, OSError):
            self._given = None
        if self._given == _LOADED:
            self._is_loaded = True
            return False
        return True

    def records(self) -> list[Record]:
        if self._given is None:
            raise self._ended()
        if isinstance(self._given, BaseException):
            raise self._given
        records: list[Record] = self._given
        return records

    def _ended(self) -> WorkerEndedError:
        """That it ended, and how where that is no question's fault."""
        error, code = WorkerEndedError(), None
        if not self._is_loaded:
            if self._process is not None:
                self._process.join(_SECONDS_TO_END)
                code = self._process.exitcode
            error = WorkerNotLoadedError(f"a process ended with code {code} before it had it")
        self.end()
        return error

    def end(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.join()
        assert self.pipe is not None
        self.pipe.close()
        self._process, self.pipe, self._is_loaded = None, None, False

    def _start(self) -> None:
        spawned = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawned.Pipe()
        self._process = spawned.Process(
            target=_work, args=(theirs, self._equipment, self._device), daemon=True
        )
        with _interrupts_put_off():
            self._process.start()
        theirs.close()


_SECONDS_TO_END = 5
"""What a process whose pipe is closed may take until it has ended."""


@contextlib.contextmanager
def _interrupts_put_off() -> Iterator[None]:
    """Ctrl-C is for this process; one that is started here never gets it, not while it imports."""
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(pipe: Connection, equipment: Equipment, device: str) -> None:
    """Answer until nobody asks any more. Ctrl-C is for the process that asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answerer: Answerer | None = None
    with contextlib.suppress(EOFError, OSError):  # whoever asked has ended
        while True:
            asked = pipe.recv()
            given: list[Record] | Exception
            try:
                if answerer is None:
                    answerer = equipment.answerer(device)
                    pipe.send(_LOADED)
                given = list(answerer.records(asked))
            except SnapKVError as error:
                given = error
            except Exception:  # not every one can be sent, and none with where it was raised
                given = RuntimeError(f"in a worker:\n{traceback.format_exc()}")
            pipe.send(given)
