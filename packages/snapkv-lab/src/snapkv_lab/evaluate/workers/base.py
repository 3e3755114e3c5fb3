"""Dealing questions out to workers, whatever they are, and to those that take their place."""

import warnings
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

from snapkv.errors import OutOfMemoryError
from snapkv_lab.evaluate.asking import Answerer, Asked
from snapkv_lab.evaluate.store import Record

MOST_TRIES = 3
"""How many workers a question may end before it is recorded as lost, and how often in a row a
worker may end before it has the model."""


class WorkerEndedError(Exception):
    """A worker ended before it had answered: killed, out of memory, or its machine is gone."""


class WorkerNotLoadedError(WorkerEndedError):
    """A worker ended before it had the model, so that no question is to blame; says how it did."""


class Executor(AbstractContextManager["Executor"], ABC):
    """Answers questions in any order. Leaving its block ends the workers."""

    device: str | None = None

    @abstractmethod
    def answers(self, work: Sequence[Asked]) -> Iterator[Record]:
        """A record for every method of every question, as they come."""

    def __enter__(self) -> Self:
        return self


class Serial(Executor):
    """This process answers, one question after the other."""

    def __init__(self, answerer: Answerer) -> None:
        self._answerer = answerer

    def answers(self, work: Sequence[Asked]) -> Iterator[Record]:
        """See `Executor.answers`."""
        for asked in work:
            yield from self._answerer.records(asked)

    def __exit__(self, *error: object) -> None:
        """Nothing has to end."""


@dataclass(frozen=True, kw_only=True)
class Equipment:
    """What a worker needs before the first question."""

    load: Mapping[str, Any]
    threads: int | None = None

    def answerer(self, device: str) -> Answerer:
        """Load the model there, quietly: the process that asks has said what there is to say."""
        import torch
        import transformers

        from snapkv.app.models import load

        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()  # its lock is left behind by a killed process
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return Answerer(loaded=load(**self.load, device=device))


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
        """The answers to what was handed over."""

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
        """See `Executor.answers`."""
        waiting = deque(sorted(work, key=lambda asked: len(asked.sample.context), reverse=True))
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
                    raise OutOfMemoryError(
                        "workers: expected at least one that has a place and gets as far as having "
                        f"the model, got none: {why}; see that there is memory for as many as are "
                        "asked for, and the same release of snapkv on every machine; the same "
                        "command continues"
                    )
                for worker in self.ready(list(busy)):
                    asked = busy.pop(worker)
                    try:
                        given = worker.records()
                    except WorkerNotLoadedError as error:
                        waiting.appendleft(asked)
                        unloaded[worker] += 1
                        why = str(error)
                    except WorkerEndedError:  # what ended a worker comes first, or is lost
                        if asked.tries + 1 < MOST_TRIES:
                            waiting.extendleft(reversed(list(asked.by_method())))
                        else:
                            yield from asked.lost()
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
