"""Workers on a Ray cluster: on this machine, or on as many as there are."""

import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from snapkv.errors import InvalidArgumentError, SnapKVError, missing_package
from snapkv.validation import first_line
from snapkv_lab.evaluate.asking import Asked
from snapkv_lab.evaluate.store import Record
from snapkv_lab.evaluate.workers.base import (
    Equipment,
    Worker,
    WorkerEndedError,
    WorkerNotLoadedError,
    WorkerPool,
)

LOCAL, AUTO = "local", "auto"


class OnRay(WorkerPool):
    """Workers on Ray: one for each GPU of the cluster, or where it has none, for each node."""

    def __init__(self, address: str, equipment: Equipment, workers: int | None = None) -> None:
        require_cluster(address)
        ray = _ray()
        self._joined = not ray.is_initialized()
        if self._joined:
            _join(ray, address)
        try:
            has_gpus = any(node.get("GPU", 0) >= 1 for node in _nodes())
            self._needs = {"num_gpus": 1 if has_gpus else 0, "num_cpus": 1}
            count = self._count(workers)
            cpus = sum(int(node.get("CPU", 0)) for node in _nodes())
            equipment = replace(equipment, threads=equipment.threads or max(1, cpus // count))
            device = "cuda:0" if has_gpus else "cpu"  # of its own, whatever the node calls it
            actors = [_Actor(equipment, device, self._needs, self._free) for _ in range(count)]
            super().__init__(actors, device)
        except BaseException:
            self._leave()
            raise

    def _count(self, workers: int | None) -> int:
        places = [_places(node, self._needs) for node in _nodes()]
        on_gpus = self._needs["num_gpus"]
        count = workers or (sum(places) if on_gpus else sum(map(bool, places)))
        if not 1 <= count <= sum(places):
            kind = "GPUs" if on_gpus else "processors"
            raise InvalidArgumentError(
                f"workers: expected at most {sum(places)}, the cluster's {kind}, got "
                f"{max(1, count)}; start fewer, or add nodes to the cluster"
            )
        return count

    def _free(self) -> int:
        """Places of nodes that are there beside those that are begun; below 0 where one is gone."""
        begun = sum(worker.is_begun for worker in self._workers)  # type: ignore[attr-defined] # all are actors
        return sum(_places(node, self._needs) for node in _nodes()) - begun

    def ready(self, busy: Sequence[Worker]) -> Sequence[Worker]:
        """Those whose answers are there, or will never come."""
        actors: list[Any] = list(busy)
        coming = {actor.answers: actor for actor in actors}
        while True:
            there, _ = _ray().wait(list(coming), num_returns=1, timeout=_SECONDS_BETWEEN_LOOKS)
            if there:
                return [coming[ref] for ref in there]
            if self._free() < 0:  # a node is gone, and one waits for a place on it
                for actor in actors:
                    if not actor.is_loaded:
                        actor.end()
                        return [actor]

    def __exit__(self, *error: object) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._joined:
            _ray().shutdown()


class _Actor(Worker):
    """An actor of the cluster; it is made with the first question, and anew where it has ended."""

    def __init__(
        self, equipment: Equipment, device: str, needs: dict[str, int], free: Callable[[], int]
    ) -> None:
        self._equipment, self._device, self._needs = equipment, device, needs
        self._free = free
        self._actor: Any = None
        self._loaded: Any = None
        self.answers: Any = None

    @property
    def is_begun(self) -> bool:
        """Whether it has a place, or waits for one."""
        return self._actor is not None

    @property
    def is_loaded(self) -> bool:
        """Whether it has the model."""
        return bool(_ray().wait([self._loaded], timeout=0)[0])

    @property
    def has_place(self) -> bool:
        return self.is_begun or self._free() > 0

    def begin(self, asked: Asked) -> None:
        if self._actor is None:
            made = _ray().remote(max_restarts=0, **self._needs)(_Answering)
            self._actor = made.remote(self._equipment, self._device)
            self._loaded = self._actor.load.remote()
        self.answers = self._actor.records.remote(asked)

    def records(self) -> list[Record]:
        if self._actor is None:
            raise WorkerNotLoadedError("its node is gone")
        self._given(self._loaded, WorkerNotLoadedError)
        records: list[Record] = self._given(self.answers, WorkerEndedError)
        return records

    def _given(self, ref: Any, ended: type[WorkerEndedError]) -> Any:
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
        if self._actor is not None:
            with contextlib.suppress(Exception):  # its node may be gone
                _ray().kill(self._actor)
        self._actor = self._loaded = self.answers = None


class _Answering:
    """What an actor is: it loads the model before its first question."""

    def __init__(self, equipment: Equipment, device: str) -> None:
        self._equipment, self._device = equipment, device

    def load(self) -> None:
        """Load it."""
        self._answerer = self._equipment.answerer(self._device)

    def records(self, asked: Asked) -> list[Record]:
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


_SECONDS_TO_ANSWER = 5
_SECONDS_BETWEEN_LOOKS = 10
