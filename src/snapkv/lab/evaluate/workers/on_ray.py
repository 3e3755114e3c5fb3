"""Workers on a Ray cluster: on this machine, or on as many as there are."""

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from snapkv.errors import InvalidArgumentError, missing_package
from snapkv.lab.evaluate.asking import Asked
from snapkv.lab.evaluate.store import Record
from snapkv.lab.evaluate.workers.base import Worker, WorkerEndedError, WorkerPool
from snapkv.lab.evaluate.workers.equipment import Equipment
from snapkv.validation import require_at_least

LOCAL = "local"


class OnRay(WorkerPool):
    """Workers on Ray: one for each GPU of the cluster, or where it has none, for each node.

    Args:
        address: "local" for a cluster of this machine, which ends with the block; "auto" for one
            that runs here; or the address of one, such as ``ray://head:10001``.
        equipment: what each worker has.
        workers: how many; None for as many as above.

    Raises:
        MissingDependencyError: Ray is not installed.
        InvalidArgumentError: there is no such cluster, or it has no place for so many.
    """

    def __init__(self, address: str, equipment: Equipment, workers: int | None = None) -> None:
        ray = _ray()
        self._joined = not ray.is_initialized()
        if self._joined:
            _join(ray, address)
        try:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            gpus = sum(int(node.get("GPU", 0)) for node in nodes)
            count = workers or gpus or len(nodes)
            require_at_least("workers", count, 1)
            needs = {"num_gpus": 1, "num_cpus": 1} if gpus else {"num_gpus": 0, "num_cpus": 1}
            self._require_places(count, nodes, needs)
            cpus = sum(int(node.get("CPU", 0)) for node in nodes)
            equipment = replace(equipment, threads=max(1, cpus // count))
            device = "cuda:0" if gpus else "cpu"  # of its own, whatever the node calls it
            super().__init__([_Actor(equipment, needs, device) for _ in range(count)], device)
        except BaseException:
            self._leave()
            raise

    @staticmethod
    def _require_places(count: int, nodes: Sequence[dict[str, Any]], needs: dict[str, int]) -> None:
        places = sum(_places(node, needs) for node in nodes)
        if count > places:
            kind = "GPUs" if needs["num_gpus"] else "processors"
            raise InvalidArgumentError(
                f"workers: expected at most {places}, the cluster's {kind}, got {count}; start "
                "fewer, or add nodes to the cluster"
            )

    def ready(self, busy: Sequence[Worker]) -> Sequence[Worker]:
        """Those whose answers are there, or will never come."""
        coming = {worker.answers: worker for worker in busy}  # type: ignore[attr-defined] # all are actors
        there, _ = _ray().wait(list(coming), num_returns=1)
        return [coming[ref] for ref in there]

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

    def __init__(self, equipment: Equipment, needs: dict[str, int], device: str) -> None:
        self._equipment, self._needs, self._device = equipment, needs, device
        self._actor: Any = None
        self.answers: Any = None

    @property
    def has_place(self) -> bool:
        ray = _ray()
        free: dict[str, float] = ray.available_resources()
        return self._actor is not None or _places(free, self._needs) > 0

    def begin(self, asked: Asked) -> None:
        if self._actor is None:
            made = _ray().remote(max_restarts=0, **self._needs)(_Answering)
            self._actor = made.remote(self._equipment, self._device)
        self.answers = self._actor.records.remote(asked)

    def records(self) -> list[Record]:
        ray = _ray()
        try:
            records: list[Record] = ray.get(self.answers)
        except (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError):
            self.end()
            raise WorkerEndedError from None
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        return records

    def end(self) -> None:
        if self._actor is not None:
            with contextlib.suppress(Exception):  # its node may be gone
                _ray().kill(self._actor)
        self._actor = self.answers = None


class _Answering:
    """What an actor is: it loads the model with its first question."""

    def __init__(self, equipment: Equipment, device: str) -> None:
        self._equipment, self._device = equipment, device
        self._answerer: Any = None

    def records(self, asked: Asked) -> list[Record]:
        """The answers of all its methods."""
        if self._answerer is None:
            self._answerer = self._equipment.answerer(self._device)
        return list(self._answerer.records(asked))


def _places(resources: dict[str, Any], needs: dict[str, int]) -> int:
    """How many workers a node, or what is free of it, has room for."""
    named = {"num_cpus": "CPU", "num_gpus": "GPU"}
    return min(int(resources.get(named[key], 0) // count) for key, count in needs.items() if count)


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise missing_package("ray: workers on a cluster", "ray") from None
    return ray


def _join(ray: Any, address: str) -> None:
    _require_reachable(address)
    quiet = {"include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError(
            f"ray: expected the address of a cluster that runs, got {address!r}: "
            f"{str(error).splitlines()[0]}; start one with `ray start --head`, or pass local"
        ) from error


def _require_reachable(address: str) -> None:
    """Raise where nobody listens: Ray would try for minutes, and end the process."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host:  # local and auto
        return
    try:
        socket.create_connection((host, int(port)), timeout=_SECONDS_TO_ANSWER).close()
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"ray: expected the address of a cluster that runs, got {address!r}: {error}; start "
            "one with `ray start --head`, or pass local"
        ) from error


_SECONDS_TO_ANSWER = 5
