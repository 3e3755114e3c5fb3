"""Load models without the messages of other libraries, and show the progress of slow steps.

Progress bars are shown on standard error, and only if that is a terminal.
"""

import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import transformers
from huggingface_hub.utils.tqdm import enable_progress_bars
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from snapkv.errors import SnapKVError
from snapkv_app import conversion
from snapkv_app.answering import TextSink
from snapkv_app.cli.announcing import announce
from snapkv_app.cli.interrupts import started
from snapkv_app.cli.options import ModelOptions
from snapkv_app.models import LoadedModel, load
from snapkv_app.packages import DEMO
from snapkv_app.reading import telling_of_reading

_LOAD_OPTIONS = ("device", "dtype", "revision", "attn_implementation", "trust_remote_code")

_OTHERS = ("Qwen/Qwen3-4B", "microsoft/Phi-4-mini-instruct", "HuggingFaceTB/SmolLM3-3B")
"""Small models to suggest, which give useful answers."""


def load_model(options: ModelOptions) -> LoadedModel:
    """Load the model of the options, and hide the messages of other libraries unless verbose.

    Raises:
        SnapKVError: the model cannot be loaded, see `snapkv_app.models.load`.
    """
    begin(verbose=options.verbose)
    return load(**load_arguments(options))


def load_arguments(options: ModelOptions) -> dict[str, Any]:
    """Return the arguments with which `snapkv_app.models.load` follows the options.

    They are a new dict, in which options that were not given are missing.
    """
    given = {name: value for name in _LOAD_OPTIONS if (value := getattr(options, name))}
    return given if options.model is None else given | {"name": options.model}


def load_other(name: str, options: ModelOptions) -> LoadedModel:
    """Load a draft model on the device and in the dtype of the main model.

    Raises:
        SnapKVError: the draft model cannot be loaded; the message begins with "assistant".
    """
    announce(f"loading {name}")
    try:
        return load_model(replace(options, model=name, revision=None, attn_implementation=None))
    except SnapKVError as error:  # the message begins with the option of the main model
        raise type(error)(re.sub("^model: ", "assistant: ", str(error))) from error


def say_if_demo(loaded: LoadedModel) -> None:
    """Warn on standard error that answers are often wrong, if the demo model has been loaded."""
    if loaded.name == DEMO:
        sys.stderr.write(
            "snapkv: this is the demo model, a small model for trying the commands, whose answers "
            f"are often wrong. Choose another one with --model, such as {', '.join(_OTHERS[:-1])} "
            f"or {_OTHERS[-1]}.\n"
        )


def begin(*, verbose: bool) -> None:
    """Prepare for a slow step: let Ctrl-C end it properly, and hide messages of other libraries.

    Errors of other libraries are still shown, and so is the progress of downloads on a terminal.
    With `verbose`, all messages are shown. The change is for the rest of the process.
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
    """A handler that writes each message of snapkv as a line on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"snapkv: {record.getMessage()}\n")


@dataclass(frozen=True, kw_only=True)
class ReadingBar:
    """The progress bar of `reading_progress`, which may be invisible."""

    bar: Progress
    task: TaskID

    def show(self, tokens: int, of_tokens: int) -> None:
        reached = f"{tokens:,} of {of_tokens:,} tokens"
        self.bar.update(self.task, completed=tokens, total=of_tokens, reached=reached)

    def next(self, description: str, done: int, total: int) -> None:
        """Reset the bar for the next text, after `done` of `total` texts have been read."""
        self.bar.reset(self.task, description=f"{description}, {done + 1:,} of {total:,}")

    def before(self, on_text: TextSink) -> TextSink:
        """Return a function that passes each text on to `on_text`, and removes the bar before."""

        def write(text: str) -> None:
            self.bar.stop()
            on_text(text)

        return write


@contextmanager
def reading_progress(model: Any, label: str) -> Iterator[ReadingBar]:
    """Show within this block how many tokens of a text the model has read, and the time left.

    The bar is on standard error, if that is a terminal, and is removed at the end.

    Args:
        model: the model that reads.
        label: the description of what is read.

    Yields:
        The bar.
    """
    with _bar(
        TextColumn("reading ({task.description})"),
        BarColumn(),
        TextColumn("{task.fields[reached]}"),
        TimeRemainingColumn(),
    ) as bar:
        found = ReadingBar(bar=bar, task=bar.add_task(label, total=None, reached=""))
        with nullcontext() if bar.disable else telling_of_reading(model, found.show):
            yield found


@contextmanager
def answers_progress(label: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar within this block, which counts the finished answers of a run.

    It is on standard error, if that is a terminal.

    Yields:
        A function to call before each answer, with its description, the number of finished answers
        and their total.
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
    # On a terminal that cannot redraw a bar, rich would end a line at each word of an answer.
    return Progress(*columns, console=console, transient=True, disable=not console.is_interactive)
