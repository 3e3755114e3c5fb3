"""Workers on a Ray cluster that answer questions, on this machine or on many."""

import contextlib
import socket
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from snapkv.errors import OutOfMemoryError, SnapKVError, missing_package, wrong
from snapkv.validation import first_line
from snapkv_lab.evaluate.asking import Answerer, SampleJob
from snapkv_lab.rows import Row

LOCAL, AUTO = "local", "auto"

MOST_TRIES = 3
"""How many workers a question may end before it is recorded as lost. Also, how often in a row each
worker may end before it has loaded the model.
"""

_SECONDS_TO_ANSWER = 5
_SECONDS_BETWEEN_LOOKS = 10


class _EndedError(Exception):
    """An error which says that a worker ended before it could answer.

    It was killed, ran out of memory, or lost its machine.
    """


class _NotLoadedError(Exception):
    """An error which says that a worker ended before it had loaded the model.

    So no question is the cause.
    """


class OnRay:
    """An executor that answers questions with workers on a Ray cluster.

    It connects to the cluster when it is made, unless Ray is connected already. The caller must use
    it in a `with` block, at whose end the workers are stopped and a connection that was made here
    is closed. There is one worker for each GPU, or one for each node without GPUs. The longest
    questions come first, and each goes to a worker that is free. If a worker ends, its question is
    asked again with one method at a time, which needs less memory. If that ends workers too, the
    answers are recorded as lost.

    Args:
        address: "local", "auto" or the address of a cluster.
        load: arguments of `snapkv_app.models.load`, except the device.
        workers: how many workers to start; None for one per GPU or node.

    Raises:
        InvalidArgumentError: there is no such cluster, or it has no room for so many workers.
        MissingDependencyError: Ray is not installed.
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
            self.device = "cuda:0" if has_gpus else "cpu"  # a worker only sees its own GPU
            self._answering = (dict(load), self.device, max(1, cpus // self._count))
            self._idle, self._busy = list[_Worker](), list[_Worker]()
        except BaseException:
            self._disconnect()
            raise

    def _workers(self, wanted: int | None) -> int:
        """Return the number of workers that will be started.

        Args:
            wanted: this number; None for the number of GPUs, or, on a cluster without GPUs, for the
                number of nodes that have a processor.

        Raises:
            InvalidArgumentError: the cluster has no room for `wanted` workers, or not even for one.
        """
        places = [_places(node, self._needs) for node in _nodes()]
        on_gpus = self._needs["num_gpus"]
        count = wanted or (sum(places) if on_gpus else sum(map(bool, places)))
        if not 1 <= count <= sum(places):
            kind = "GPUs" if on_gpus else "processors"
            problem = (
                f"expected at most {sum(places)}, the cluster's {kind}, but got {max(1, count)}"
            )
            raise wrong("workers", problem, "Start fewer workers, or add nodes to the cluster")
        return count

    def answers(self, work: Sequence[SampleJob]) -> Iterator[Row]:
        """Yield a record for every method and turn of every question, as soon as it is known.

        The order is that of the answers, and not that of `work`. If the caller stops early, workers
        that are busy are ended.

        Raises:
            OutOfMemoryError: no worker can start and load the model.
            SnapKVError: a worker raised it while it answered.
        """
        waiting = deque(sorted(work, key=lambda each: len(each.sample.context), reverse=True))
        unloaded, why = 0, "no machine has room for one"
        try:
            while waiting or self._busy:
                while waiting and (self._idle or self._free_places() > 0):
                    worker = self._idle.pop() if self._idle else self._start_worker()
                    worker.ask(waiting.popleft())
                    self._busy.append(worker)
                if not self._busy or unloaded == MOST_TRIES * self._count:
                    raise wrong(
                        "workers",
                        f"no worker could start and load the model: {why}",
                        "Free memory for this many workers, install the same release of snapkv on "
                        "every machine, and repeat the command, which continues the run",
                        OutOfMemoryError,
                    )
                worker = self._wait_for_worker()
                self._busy.remove(worker)
                job = worker.job
                try:
                    records = worker.records()
                except _NotLoadedError as error:
                    waiting.appendleft(job)
                    unloaded, why = unloaded + 1, str(error)
                except _EndedError:  # a question that ended a worker comes first, or is lost
                    if job.tries + 1 < MOST_TRIES:
                        waiting.extendleft(reversed(list(job.split_by_method())))
                    else:
                        yield from job.lost_records()
                else:
                    self._idle.append(worker)
                    unloaded = 0
                    yield from records
        finally:
            self._end(self._busy)  # nobody waits for their answers any more

    def _free_places(self) -> int:
        """Return how many more workers the cluster has room for, up to the wanted number.

        The number is negative if the node of a worker is gone.
        """
        places = sum(_places(node, self._needs) for node in _nodes())
        return min(self._count, places) - len(self._idle) - len(self._busy)

    def _start_worker(self) -> "_Worker":
        actor = _ray().remote(max_restarts=0, **self._needs)(_Answering).remote(*self._answering)
        return _Worker(actor)

    def _wait_for_worker(self) -> "_Worker":
        """Wait until the records of a busy worker are complete or can no longer come, and return
        the worker.

        In both cases `_Worker.records` does not wait: it returns the records, or raises the error
        that says why there are none. At least one worker must be busy, and the returned one stays
        in the list of busy workers. If a node is gone, a worker that has not loaded the model is
        ended and returned.
        """
        coming = {worker.answers: worker for worker in self._busy}
        while True:
            complete, _ = _ray().wait(list(coming), num_returns=1, timeout=_SECONDS_BETWEEN_LOOKS)
            if complete:
                return coming[complete[0]]
            if self._free_places() < 0:  # a node is gone, and a worker may still wait for it
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
            self._disconnect()

    def _end(self, workers: "list[_Worker]") -> None:
        while workers:
            workers.pop().end()

    def _disconnect(self) -> None:
        if self._joined:
            _ray().shutdown()


class _Worker:
    """A handle of a remote actor, which loads the model and then answers one question at a time.

    Attributes:
        job: the question that the actor was given last.
        answers: a reference to the records of its answers.
    """

    job: SampleJob
    answers: Any

    def __init__(self, actor: Any) -> None:
        self._actor, self._loaded = actor, actor.load.remote()

    @property
    def is_loaded(self) -> bool:
        return bool(_ray().wait([self._loaded], timeout=0)[0])

    def ask(self, job: SampleJob) -> None:
        self.job, self.answers = job, self._actor.records.remote(job)

    def records(self) -> list[Row]:
        """Wait for the answers to the last question and return their records. The caller must have
        called `ask`.

        Raises:
            _NotLoadedError: the worker ended before it had loaded the model.
            _EndedError: the worker ended before it had answered.
            SnapKVError: the worker raised it while it loaded the model or answered.
        """
        if self._actor is None:
            raise _NotLoadedError("its node is gone")
        self._wait_for(self._loaded, _NotLoadedError)
        records: list[Row] = self._wait_for(self.answers, _EndedError)
        return records

    def _wait_for(self, ref: Any, ended: type[Exception]) -> Any:
        """Wait for the result of a remote call and return it.

        Args:
            ref: the reference to the result.
            ended: the error to raise if the actor has ended, or if its result is gone with its
                node. The actor is then stopped.

        Raises:
            SnapKVError: the remote call raised it. Any other error of the call is raised as Ray's
                `RayTaskError`, which says where it was raised.
        """
        ray = _ray()
        try:
            return ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, SnapKVError):
                raise error.cause from None
            raise  # with the place where it was raised
        except ray.exceptions.RayError as error:  # it ended, or its result is gone with its node
            self.end()
            raise ended(_last_line(error)) from None

    def end(self) -> None:
        """Stop the actor at once. No error is raised if it is gone already."""
        with contextlib.suppress(Exception):  # its node may be gone
            _ray().kill(self._actor)
        self._actor = None


class _Answering:
    """The remote actor, which loads the model and answers questions with it."""

    def __init__(self, load: dict[str, Any], device: str, threads: int) -> None:
        self._load, self._threads = load | {"device": device}, threads

    def load(self) -> None:
        """Load the model without warnings, since the process that asks has shown them already."""
        import torch
        import transformers

        from snapkv_app.models import load

        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()  # a killed process would leave its lock behind
        torch.set_num_threads(self._threads)
        self._answerer = Answerer(loaded=load(**self._load))

    def records(self, job: SampleJob) -> list[Row]:
        return list(self._answerer.records(job))


def _nodes() -> list[dict[str, Any]]:
    return [node["Resources"] for node in _ray().nodes() if node["Alive"]]


def _places(node: dict[str, Any], needs: dict[str, int]) -> int:
    names = {"num_cpus": "CPU", "num_gpus": "GPU"}
    return min(int(node.get(names[key], 0) // count) for key, count in needs.items() if count)


def _last_line(error: Exception) -> str:
    """Return the last line of an error's message, or the name of its class if it has none."""
    return [type(error).__name__, *filter(str.strip, str(error).splitlines())][-1].strip()


def _ray() -> Any:
    """Import Ray, and return the module.

    Raises:
        MissingDependencyError: Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise missing_package("ray: workers on a cluster", "ray") from None
    return ray


def require_cluster(address: str) -> None:
    """Check that the cluster exists, because Ray itself would try for minutes and end the process.

    The addresses "local" and "auto" are not checked. At other addresses, a connection is made and
    closed.

    Raises:
        InvalidArgumentError: nothing answers at the address within 5 seconds, or the address has no
            port.
        MissingDependencyError: Ray is not installed.
    """
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
    """Connect to a cluster, or start one on this machine if the address is "local".

    Raises:
        InvalidArgumentError: the connection failed.
    """
    quiet = {"include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", **quiet)
    except Exception as error:  # no class of its own where a node does not start in time
        raise _no_cluster(address, error) from error


def _no_cluster(address: str, error: Exception) -> SnapKVError:
    return wrong(
        "ray",
        "expected local, auto or the address of a running cluster such as ray://head:10001, but "
        f"got {address!r}: {first_line(error)}",
        "Start a cluster with `ray start --head`, or pass local",
    )
