"""Options that several commands share, and the executor that `--ray` and `--workers` choose."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from snapkv.errors import wrong
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
    """Return the option for a folder of results, in which a stopped run continues.

    Args:
        kind: the beginning of the default folder's name, for the help.
        what: what the folder holds and what was stopped, with a semicolon between, for the help.
    """
    return panels.output(
        help=f"Folder of the {what} that was stopped continues there",
        show_default=f"snapkv-results/{kind}-MODEL-HASH",
    )


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(ModelOptions):
    """The command-line options that choose where the answers are computed."""

    ray: Annotated[
        str | None,
        panels.sweep(help="Answer with workers on Ray: local, auto or the address of a cluster"),
    ] = None
    workers: Annotated[
        int | None,
        panels.sweep(
            help="Number of workers with --ray", show_default="one for each GPU, else for each node"
        ),
        WholeNumber(1),
    ] = None


@contextlib.contextmanager
def open_executor(options: WorkerOptions) -> Iterator[tuple["LoadedModel", "Executor"]]:
    """Load the model and open the executor that answers questions within this block.

    The executor is this process, or a group of workers. With workers, the model of this process is
    on the CPU and only used to check and to cut texts. The workers end with the block.

    Yields:
        The model and the executor.

    Raises:
        InvalidArgumentError: `--workers` is given without `--ray`, or `--device` with it; there is
            no such cluster, or it has no room for the workers.
        MissingDependencyError: Ray is not installed.
    """
    from snapkv_app.cli.loading import load_model
    from snapkv_lab.evaluate.asking import Answerer

    if options.ray is None:
        if options.workers is not None:
            problem = f"this option can only be used with --ray, but got {options.workers}"
            raise wrong("workers", problem, "Add the option --ray local")
        loaded = load_model(options)
        yield loaded, Answerer(loaded=loaded)
        return
    if options.device is not None:
        problem = f"only one of device and ray can be used, but got {options.device} and ray"
        raise wrong("device", problem, "Remove one of the two options")
    from snapkv_lab.evaluate.on_ray import require_cluster

    require_cluster(options.ray)
    loaded = load_model(replace(options, device="cpu"))
    with start_workers(options, options.ray) as who:
        yield replace(loaded, answers_on=who.device), who


def start_workers(options: WorkerOptions, address: str) -> "OnRay":
    """Return an executor with workers on a cluster, which the caller must use in a `with` block.

    A path of a model is made absolute, because workers run in other folders.

    Raises:
        InvalidArgumentError: there is no such cluster, or it has no room for the workers.
        MissingDependencyError: Ray is not installed.
    """
    from snapkv_app.cli.loading import load_arguments
    from snapkv_lab.evaluate.on_ray import OnRay

    load = load_arguments(options)
    load.pop("device", None)
    if options.model is not None and os.path.exists(options.model):
        load["name"] = os.path.abspath(options.model)  # a worker runs in another folder
    return OnRay(address, load, options.workers)
