"""Options of several commands; and from `--devices`, `--ray`, `--workers` to who answers a run."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from snapkv.cli import panels
from snapkv.cli.amounts import WholeNumber
from snapkv.cli.options import ModelOptions
from snapkv.cli.outputs import Output
from snapkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    from snapkv.app.models import LoadedModel
    from snapkv_lab.evaluate.workers.base import Executor


SettingWord = Annotated[
    Literal["visible", "hidden", "both"],
    panels.sweep(help="The question is visible to the vote, hidden from it, or both"),
]
Plot = Annotated[str | None, panels.output(help="Write the figure: .png, .svg or .pdf"), Output()]


def results_in(kind: str, what: str = "answers; a run") -> Any:
    """The option that names a folder of results, which are continued."""
    return panels.output(
        help=f"Folder of the {what} that was stopped is continued there",
        show_default=f"snapkv-results/{kind}-MODEL-HASH",
    )


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(ModelOptions):
    """Who answers: this process, unless one of these is given."""

    devices: Annotated[
        str | None,
        panels.sweep(help="A worker on each of these, with commas: cuda:0,cuda:1 or cpu,cpu"),
    ] = None
    ray: Annotated[
        str | None, panels.sweep(help="Workers on Ray: local, auto or the address of a cluster")
    ] = None
    workers: Annotated[
        int | None,
        panels.sweep(help="With --ray", show_default="one for each GPU, else for each node"),
        WholeNumber(1),
    ] = None

    @property
    def is_here(self) -> bool:
        return self.devices is None and self.ray is None


@contextlib.contextmanager
def answering(options: WorkerOptions) -> Iterator[tuple["LoadedModel", "Executor"]]:
    """The model, and who answers in this block: this process, or workers, which end with it.

    Where workers answer, the model is here only to check and to cut texts, on the CPU.
    """
    from snapkv.cli.loading import load_model
    from snapkv_lab.evaluate.asking import Answerer
    from snapkv_lab.evaluate.workers.base import Serial

    _require_one(options)
    if options.is_here:
        loaded = load_model(options)
        yield loaded, Serial(Answerer(loaded=loaded))
        return
    loaded = load_model(replace(options, device="cpu"))
    with _workers(options) as who:
        yield replace(loaded, answers_on=who.device), who


def _workers(options: WorkerOptions) -> "Executor":
    from snapkv.cli.loading import load_arguments
    from snapkv_lab.evaluate.workers.base import Equipment

    load = load_arguments(options)
    load.pop("device", None)
    if options.model is not None and os.path.exists(options.model):
        load["name"] = os.path.abspath(options.model)  # a node of a cluster is in another folder
    equipment = Equipment(load=load)
    if options.ray is not None:
        from snapkv_lab.evaluate.workers.on_ray import OnRay

        return OnRay(options.ray, equipment, options.workers)
    from snapkv_lab.evaluate.workers.processes import Processes

    return Processes(_devices(options), equipment)


def _devices(options: WorkerOptions) -> list[str]:
    return [device.strip() for device in (options.devices or "").split(",")]


def _require_one(options: WorkerOptions) -> None:
    """Raise where it is not clear where the workers are, or where they cannot be."""
    given = [name for name in ("device", "devices", "ray") if getattr(options, name) is not None]
    if len(given) > 1:
        raise InvalidArgumentError(
            f"{given[0]}: expected one of device, devices and ray, got {' and '.join(given)}; "
            "leave one out"
        )
    if options.workers is not None and options.ray is None:
        raise InvalidArgumentError(
            f"workers: expected it with ray, got {options.workers} without; name a device for each "
            "worker with --devices instead"
        )
    if options.ray is not None:
        from snapkv_lab.evaluate.workers.on_ray import require_cluster

        require_cluster(options.ray)
    if options.devices is not None:
        from snapkv_lab.evaluate.workers.processes import one_device

        one_device(_devices(options))
