"""Options of several commands, and the executor that `--ray` and `--workers` choose."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from snapkv.errors import InvalidArgumentError
from snapkv_app.cli import panels
from snapkv_app.cli.amounts import WholeNumber
from snapkv_app.cli.options import ModelOptions
from snapkv_app.cli.outputs import Output

if TYPE_CHECKING:
    from snapkv_app.models import LoadedModel
    from snapkv_lab.evaluate.asking import Executor
    from snapkv_lab.evaluate.on_ray import OnRay


SettingWord = Annotated[
    Literal["visible", "hidden", "both"],
    panels.sweep(help="Whether the question is visible to the vote, hidden from it, or both"),
]
Plot = Annotated[str | None, panels.output(help="Write the figure: .png, .svg or .pdf"), Output()]


def results_option(kind: str, what: str = "answers; a run") -> Any:
    """The option for a folder of results; a stopped run continues there."""
    return panels.output(
        help=f"Folder of the {what} that was stopped continues there",
        show_default=f"snapkv-results/{kind}-MODEL-HASH",
    )


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(ModelOptions):
    """Where answers are computed: in this process by default."""

    ray: Annotated[
        str | None, panels.sweep(help="Workers on Ray: local, auto or the address of a cluster")
    ] = None
    workers: Annotated[
        int | None,
        panels.sweep(help="With --ray", show_default="one for each GPU, else for each node"),
        WholeNumber(1),
    ] = None


@contextlib.contextmanager
def open_executor(options: WorkerOptions) -> Iterator[tuple["LoadedModel", "Executor"]]:
    """The model and the executor for this block: this process, or workers that end with it.

    With workers, the local model is on the CPU, only to check and to cut texts.
    """
    from snapkv_app.cli.loading import load_model
    from snapkv_lab.evaluate.asking import Answerer

    if options.ray is None:
        if options.workers is not None:
            raise InvalidArgumentError(
                f"workers: expected it with ray, got {options.workers} without; add --ray local"
            )
        loaded = load_model(options)
        yield loaded, Answerer(loaded=loaded)
        return
    if options.device is not None:
        raise InvalidArgumentError(
            f"device: expected one of device and ray, got {options.device} and ray; leave one out"
        )
    from snapkv_lab.evaluate.on_ray import require_cluster

    require_cluster(options.ray)
    loaded = load_model(replace(options, device="cpu"))
    with start_workers(options, options.ray) as who:
        yield replace(loaded, answers_on=who.device), who


def start_workers(options: WorkerOptions, address: str) -> "OnRay":
    """Workers of a cluster, which find the model wherever their nodes are."""
    from snapkv_app.cli.loading import load_arguments
    from snapkv_lab.evaluate.on_ray import OnRay

    load = load_arguments(options)
    load.pop("device", None)
    if options.model is not None and os.path.exists(options.model):
        load["name"] = os.path.abspath(options.model)  # a node of a cluster is in another folder
    return OnRay(address, load, options.workers)
