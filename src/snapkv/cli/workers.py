"""From `--devices`, `--ray` and `--workers` to who answers a run."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from snapkv.cli import panels
from snapkv.cli.options import ModelOptions
from snapkv.cli.whole_numbers import WholeNumber
from snapkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    from snapkv.app.models import LoadedModel
    from snapkv.lab.evaluate.runner import Run
    from snapkv.lab.evaluate.workers.base import Executor


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(ModelOptions):
    """Who answers: this process, unless one of these is given."""

    devices: Annotated[
        str | None,
        panels.sweep(help="A worker on each of these, with commas: cuda:0,cuda:1 or cpu,cpu"),
    ] = None
    ray: Annotated[
        str | None,
        panels.sweep(help="Workers on Ray: local, auto or the address of a cluster"),
    ] = None
    workers: Annotated[
        int | None,
        panels.sweep(help="With --ray", show_default="one for each GPU, else for each node"),
        WholeNumber(1),
    ] = None


def load_for(options: WorkerOptions) -> "LoadedModel":
    """Load the model here; where workers answer, only to check and to cut texts, on the CPU.

    Raises:
        InvalidArgumentError: options that do not go together.
        SnapKVError: the options name no model that works.
    """
    from snapkv.cli.loading import load_model

    _require_one(options)
    elsewhere = options.devices is not None or options.ray is not None
    return load_model(replace(options, device="cpu") if elsewhere else options)


def executor(options: WorkerOptions, run: "Run") -> "Executor":
    """Who answers a run.

    Raises:
        MissingDependencyError: Ray is asked for, and not installed.
        InvalidArgumentError: an unknown device or cluster, or more workers than it has room for.
    """
    if options.devices is None and options.ray is None:
        return run.serial()
    from snapkv.cli.loading import load_arguments
    from snapkv.lab.evaluate.workers.equipment import Equipment

    load: dict[str, Any] = load_arguments(options)
    load.pop("device", None)
    equipment = Equipment(
        load=load, task=run.task, template=run.template, reference_loss=run.reference_loss
    )
    if options.ray is not None:
        from snapkv.lab.evaluate.workers.on_ray import OnRay

        return OnRay(options.ray, equipment, options.workers)
    from snapkv.lab.evaluate.workers.processes import Processes

    return Processes(_devices(options), equipment)


def _devices(options: WorkerOptions) -> list[str]:
    return [device.strip() for device in (options.devices or "").split(",")]


def _require_one(options: WorkerOptions) -> None:
    """Raise where it is not clear where the workers are."""
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
    if options.devices is not None:
        from snapkv.app.models import chosen_device

        for device in _devices(options):
            chosen_device(device)
