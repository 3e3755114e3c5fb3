"""Dealing questions out to workers, whatever they are, and to those that take their place."""

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Self

from snapkv.errors import OutOfMemoryError
from snapkv_lab.evaluate.asking import Asked
from snapkv_lab.evaluate.store import Record

MOST_TRIES = 3
"""How many workers a question may end before it is recorded as lost, and how often in a row a
worker may end before it has the model."""


class WorkerEndedError(Exception):
    """A worker ended before it had answered: killed, out of memory, or its machine is gone."""


class WorkerNotLoadedError(WorkerEndedError):
    """A worker ended before it had the model, so that no question is to blame; says how it did."""


class Executor(AbstractContextManager["Executor"], ABC):
    """Answers questions in any order. Leaving its block ends the workers.

    Attributes:
        device: where they are, as results say it; None for where the model of the run is.
    """

    device: str | None = None

    @abstractmethod
    def answers(self, work: Sequence[Asked]) -> Iterator[Record]:
        """A record for every method of every question, as they come.

        Raises:
            SnapKVError: an answer failed for a reason that will not go away.
        """

    def __enter__(self) -> Self:
        return self


class Worker(ABC):
    """One of several, with the model; answers one question at a time."""

    @property
    def has_place(self) -> bool:
        """Whether it can begin: a machine that is gone may leave none for it."""
        return True

    @abstractmethod
    def begin(self, asked: Asked) -> None:
        """Hand a question over; a worker that has ended is started anew."""

    @abstractmethod
    def records(self) -> list[Record]:
        """The answers to what was handed over.

        Raises:
            WorkerEndedError: it has ended.
            SnapKVError: as in the process of the worker.
        """

    @abstractmethod
    def end(self) -> None:
        """Stop it at once, whatever it does."""


class WorkerPool(Executor):
    """Workers that are alike: the longest questions first, each to whoever is free.

    The question that a worker was at when it ended is asked again, of one method at a time, which
    needs less memory; where that ends workers too, its records say that it was lost.
    """

    def __init__(self, workers: Sequence[Worker], device: str) -> None:
        self._workers, self.device = workers, device

    @abstractmethod
    def ready(self, busy: Sequence[Worker]) -> Sequence[Worker]:
        """Wait until some of the workers have answered or ended, and say which."""

    def answers(self, work: Sequence[Asked]) -> Iterator[Record]:
        """See `Executor.answers`.

        Raises:
            OutOfMemoryError: no worker has a place and gets as far as having the model.
        """
        waiting = deque(sorted(work, key=lambda asked: asked.characters, reverse=True))
        idle, busy = list(self._workers), dict[Worker, Asked]()
        unloaded, why = Counter[Worker](), "no machine has room for one"
        try:
            while waiting or busy:
                for worker in list(idle):
                    if waiting and worker.has_place:
                        idle.remove(worker)
                        busy[worker] = waiting.popleft()
                        worker.begin(busy[worker])
                if not busy:
                    raise _none_left(why)
                for worker in self.ready(list(busy)):
                    asked = busy.pop(worker)
                    try:
                        given = worker.records()
                    except WorkerNotLoadedError as error:
                        waiting.appendleft(asked)
                        unloaded[worker] += 1
                        why = str(error)
                    except WorkerEndedError:
                        yield from _again(asked, waiting)
                    else:
                        del unloaded[worker]
                        yield from given
                    if unloaded[worker] < MOST_TRIES:
                        idle.append(worker)
        finally:
            for worker in busy:  # what they were at is nobody's any more
                worker.end()

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            worker.end()


def _again(asked: Asked, waiting: deque[Asked]) -> Iterator[Record]:
    """Put what ended a worker first, of one method at a time; its records where it is lost."""
    if asked.tries + 1 < MOST_TRIES:
        waiting.extendleft(reversed(list(asked.by_method())))
    else:
        yield from asked.lost()


def _none_left(why: str) -> OutOfMemoryError:
    return OutOfMemoryError(
        "workers: expected at least one that has a place and gets as far as having the model, got "
        f"none: {why}; see that there is memory for as many as are asked for, and the same "
        "release of snapkv on every machine; the same command continues"
    )
