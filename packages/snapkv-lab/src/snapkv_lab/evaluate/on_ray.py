"""Answers from workers on a Ray cluster: on this machine, or on as many as there are."""

import contextlib
import socket
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from snapkv.errors import InvalidArgumentError, OutOfMemoryError, SnapKVError, missing_package
from snapkv.validation import first_line
from snapkv_lab.evaluate.asking import Answerer, AskedSample
from snapkv_lab.rows import Row

LOCAL, AUTO = "local", "auto"

MOST_TRIES = 3
"""How many workers a question may end before it is recorded as lost, and how often in a row each
worker may end before it has the model."""

_SECONDS_TO_ANSWER = 5
_SECONDS_BETWEEN_LOOKS = 10


class _EndedError(Exception):
    """A worker ended before it had answered: killed, out of memory, or its machine is gone."""


class _NotLoadedError(Exception):
    """A worker ended before it had the model, so that no question is to blame; says how it did."""


class OnRay:
    """One worker for each GPU of the cluster, or where it has none, for each node; alike.

    The longest questions come first, each to whoever is free. The question that a worker was at
    when it ended is asked again, of one method at a time, which needs less memory; where that ends
    workers too, its records say that it was lost.

    `load` are arguments of `snapkv_app.models.load` but for the device, which is that of each.
    """

    def __init__(self, address: str, load: Mapping[str, Any], workers: int | None = None) -> None:
        require_cluster(address)
        ray = _ray()
        self._joined = not ray.is_initialized()
        if self._joined:
            _join(ray, address)
        try:
            has_gpus = any(node.get("GPU", 0) >= 1 for node in _nodes())
            self._needs = {"num_gpus": 1 if has_gpus else 0, "num_cpus": 1}
            self._count = self._workers(workers)
            cpus = sum(int(node.get("CPU", 0)) for node in _nodes())
            self.device = "cuda:0" if has_gpus else "cpu"  # of its own, whatever the node calls it
            self._answering = (dict(load), self.device, max(1, cpus // self._count))
            self._idle, self._busy = list[_Worker](), list[_Worker]()
        except BaseException:
            self._leave()
            raise

    def _workers(self, wanted: int | None) -> int:
        places = [_places(node, self._needs) for node in _nodes()]
        on_gpus = self._needs["num_gpus"]
        count = wanted or (sum(places) if on_gpus else sum(map(bool, places)))
        if not 1 <= count <= sum(places):
            kind = "GPUs" if on_gpus else "processors"
            raise InvalidArgumentError(
                f"workers: expected at most {sum(places)}, the cluster's {kind}, got "
                f"{max(1, count)}; start fewer, or add nodes to the cluster"
            )
        return count

    def answers(self, work: Sequence[AskedSample]) -> Iterator[Row]:
        """A record for every method of every question, as they come."""
        waiting = deque(sorted(work, key=lambda each: len(each.sample.context), reverse=True))
        unloaded, why = 0, "no machine has room for one"
        try:
            while waiting or self._busy:
                while waiting and (self._idle or self._room() > 0):
                    worker = self._idle.pop() if self._idle else self._begun()
                    worker.ask(waiting.popleft())
                    self._busy.append(worker)
                if not self._busy or unloaded == MOST_TRIES * self._count:
                    raise OutOfMemoryError(
                        "workers: expected at least one that has a place and gets as far as having "
                        f"the model, got none: {why}; see that there is memory for as many as are "
                        "asked for, and the same release of snapkv on every machine; the same "
                        "command continues"
                    )
                worker = self._ready()
                self._busy.remove(worker)
                asked = worker.asked
                try:
                    records = worker.records()
                except _NotLoadedError as error:
                    waiting.appendleft(asked)
                    unloaded, why = unloaded + 1, str(error)
                except _EndedError:  # what ended a worker comes first, or is lost
                    if asked.tries + 1 < MOST_TRIES:
                        waiting.extendleft(reversed(list(asked.by_method())))
                    else:
                        yield from asked.lost()
                else:
                    self._idle.append(worker)
                    unloaded = 0
                    yield from records
        finally:
            self._end(self._busy)  # what they were at is nobody's any more

    def _room(self) -> int:
        """For how many more workers there is a place; below 0 where one of theirs is gone."""
        places = sum(_places(node, self._needs) for node in _nodes())
        return min(self._count, places) - len(self._idle) - len(self._busy)

    def _begun(self) -> "_Worker":
        actor = _ray().remote(max_restarts=0, **self._needs)(_Answering).remote(*self._answering)
        return _Worker(actor)

    def _ready(self) -> "_Worker":
        """One whose answers are there, or will never come."""
        coming = {worker.answers: worker for worker in self._busy}
        while True:
            there, _ = _ray().wait(list(coming), num_returns=1, timeout=_SECONDS_BETWEEN_LOOKS)
            if there:
                return coming[there[0]]
            if self._room() < 0:  # a node is gone, and one may wait for a place on it
                for worker in self._busy:
                    if not worker.is_loaded:
                        worker.end()
                        return worker

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._end(self._idle)
            self._end(self._busy)
        finally:
            self._leave()

    def _end(self, workers: "list[_Worker]") -> None:
        while workers:
            workers.pop().end()

    def _leave(self) -> None:
        if self._joined:
            _ray().shutdown()


class _Worker:
    """An actor that loads the model first, and the question it was asked last."""

    asked: AskedSample
    answers: Any

    def __init__(self, actor: Any) -> None:
        self._actor, self._loaded = actor, actor.load.remote()

    @property
    def is_loaded(self) -> bool:
        return bool(_ray().wait([self._loaded], timeout=0)[0])

    def ask(self, asked: AskedSample) -> None:
        self.asked, self.answers = asked, self._actor.records.remote(asked)

    def records(self) -> list[Row]:
        """The answers to what it was asked last."""
        if self._actor is None:
            raise _NotLoadedError("its node is gone")
        self._given(self._loaded, _NotLoadedError)
        records: list[Row] = self._given(self.answers, _EndedError)
        return records

    def _given(self, ref: Any, ended: type[Exception]) -> Any:
        """What a call gave, or the error it raised; `ended` where the actor is no more."""
        ray = _ray()
        try:
            return ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, SnapKVError):
                raise error.cause from None
            raise  # with where it was raised
        except ray.exceptions.RayError as error:  # it ended, or what it gave is gone with its node
            self.end()
            raise ended(_last_line(error)) from None

    def end(self) -> None:
        """Stop it at once, whatever it does."""
        with contextlib.suppress(Exception):  # its node may be gone
            _ray().kill(self._actor)
        self._actor = None


class _Answering:
    """What an actor is: it loads the model before its first question."""

    def __init__(self, load: dict[str, Any], device: str, threads: int) -> None:
        self._load, self._threads = load | {"device": device}, threads

    def load(self) -> None:
        """Load it, quietly: the process that asks has said what there is to say."""
        import torch
        import transformers

        from snapkv_app.models import load

        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()  # its lock is left behind by a killed process
        torch.set_num_threads(self._threads)
        self._answerer = Answerer(loaded=load(**self._load))

    def records(self, asked: AskedSample) -> list[Row]:
        return list(self._answerer.records(asked))


def _nodes() -> list[dict[str, Any]]:
    return [node["Resources"] for node in _ray().nodes() if node["Alive"]]


def _places(node: dict[str, Any], needs: dict[str, int]) -> int:
    named = {"num_cpus": "CPU", "num_gpus": "GPU"}
    return min(int(node.get(named[key], 0) // count) for key, count in needs.items() if count)


def _last_line(error: Exception) -> str:
    """Of a message that goes on for pages, what is said at the end."""
    return [type(error).__name__, *filter(str.strip, str(error).splitlines())][-1].strip()


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise missing_package("ray: workers on a cluster", "ray") from None
    return ray


def require_cluster(address: str) -> None:
    """Raise where there is no such cluster: Ray would try for minutes, and end the process."""
    _ray()
    if address in (LOCAL, AUTO):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if not host:
            raise ValueError("it has no port")
        socket.create_connection((host, int(port)), timeout=_SECONDS_TO_ANSWER).close()
    except (OSError, ValueError, OverflowError) as error:
        raise _no_cluster(address, error) from error


def _join(ray: Any, address: str) -> None:
    quiet = {"include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", **quiet)
    except Exception as error:  # no class of its own where a node does not start in time
        raise _no_cluster(address, error) from error


def _no_cluster(address: str, error: Exception) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"ray: expected local, auto or the address of a cluster that runs, such as "
        f"ray://head:10001, got {address!r}: {first_line(error)}; start one with "
        "`ray start --head`, or pass local"
    )
