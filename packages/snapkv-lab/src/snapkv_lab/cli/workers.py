"""Options of several commands; and from `--ray` and `--workers` to who answers a run."""

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
    from snapkv_lab.evaluate.asking import Executor
    from snapkv_lab.evaluate.on_ray import OnRay


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

    ray: Annotated[
        str | None, panels.sweep(help="Workers on Ray: local, auto or the address of a cluster")
    ] = None
    workers: Annotated[
        int | None,
        panels.sweep(help="With --ray", show_default="one for each GPU, else for each node"),
        WholeNumber(1),
    ] = None


@contextlib.contextmanager
def answering(options: WorkerOptions) -> Iterator[tuple["LoadedModel", "Executor"]]:
    """The model, and who answers in this block: this process, or workers, which end with it.

    Where workers answer, the model is here only to check and to cut texts, on the CPU.
    """
    from snapkv.cli.loading import load_model
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
    with on_ray(options, options.ray) as who:
        yield replace(loaded, answers_on=who.device), who


def on_ray(options: WorkerOptions, address: str) -> "OnRay":
    """Workers of a cluster, which find the model wherever their nodes are."""
    from snapkv.cli.loading import load_arguments
    from snapkv_lab.evaluate.on_ray import OnRay

    load = load_arguments(options)
    load.pop("device", None)
    if options.model is not None and os.path.exists(options.model):
        load["name"] = os.path.abspath(options.model)  # a node of a cluster is in another folder
    return OnRay(address, load, options.workers)
