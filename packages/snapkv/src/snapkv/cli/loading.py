"""What takes long: loading a model without other libraries' chatter, and progress bars.

Bars are on standard error, and only on a terminal.
"""

import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import transformers
from huggingface_hub.utils.tqdm import enable_progress_bars
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from snapkv.app import conversion
from snapkv.app.answering import TextSink
from snapkv.app.models import LoadedModel, load
from snapkv.cli.interrupts import started
from snapkv.cli.options import ModelOptions
from snapkv.errors import SnapKVError

_LOAD_OPTIONS = ("device", "dtype", "revision", "attn_implementation", "trust_remote_code")


def load_model(options: ModelOptions) -> LoadedModel:
    """Load what the options name, the demo model by default; standard error says so meanwhile."""
    begin(verbose=options.verbose)
    with Console(stderr=True).status(f"loading {options.model or 'the demo model'}"):
        return load(**load_arguments(options))


def load_arguments(options: ModelOptions) -> dict[str, Any]:
    """What the options say, as arguments of `load`."""
    given = {name: value for name in _LOAD_OPTIONS if (value := getattr(options, name))}
    return given if options.model is None else given | {"name": options.model}


def load_other(name: str, options: ModelOptions) -> LoadedModel:
    """Load a model that drafts, on the device and in the dtype of the first."""
    try:
        return load_model(replace(options, model=name, revision=None, attn_implementation=None))
    except SnapKVError as error:  # which names the option of the first
        raise type(error)(re.sub("^model: ", "assistant: ", str(error))) from error


def begin(*, verbose: bool) -> None:
    """Go on to what takes long: Ctrl-C ends it in order, and other people's notes are kept off.

    Errors are ours to report. The progress of a download stays: it can take long.
    """
    started()
    converting = logging.getLogger(conversion.__name__)
    if not converting.handlers:
        converting.addHandler(_ToStandardError())
        converting.setLevel(logging.INFO)
    if verbose:
        return
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for library in ("huggingface_hub", "torch", "lm_eval"):
        logging.getLogger(library).setLevel(logging.ERROR)
    if sys.stderr.isatty():
        enable_progress_bars()


class _ToStandardError(logging.Handler):
    """Our own notes, a line each."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"snapkv: {record.getMessage()}\n")


@contextmanager
def reading_progress(label: str, on_text: TextSink | None = None) -> Iterator[dict[str, Any]]:
    """Show how far through the layers the prompt is, until the answer begins.

    Args:
        label: who reads.
        on_text: where the answer goes, if anywhere while it is made.

    Yields:
        What `answer` shall call on layers that have begun and, the bar out of the way, on text.
    """
    with _bar(
        TextColumn("reading the prompt ({task.description})"),
        BarColumn(),
        TextColumn("{task.fields[reached]}"),
        TimeElapsedColumn(),
    ) as bar:
        task = bar.add_task(label, total=None, reached="")

        def advance(layers: int, of_layers: int) -> None:
            reached = f"layer {layers} of {of_layers}"
            bar.update(task, completed=layers, total=of_layers, reached=reached)

        def write(text: str) -> None:
            assert on_text is not None
            bar.stop()
            on_text(text)

        yield {"on_layer": advance, "on_text": write if on_text else None}


@contextmanager
def answers_progress(label: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show how many answers of a run are there.

    Yields:
        What to call with a description of the next answer, how many are there, and of how many.
    """
    with _bar(
        TextColumn(label),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    ) as bar:
        task = bar.add_task("", total=None)

        def advance(description: str, done: int, total: int) -> None:
            bar.update(task, description=description, completed=done, total=total)

        yield advance


def _bar(*columns: ProgressColumn) -> Progress:
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
