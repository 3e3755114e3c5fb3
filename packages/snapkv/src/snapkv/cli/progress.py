"""Progress bars, on standard error and only on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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

from snapkv.app.answering import TextSink
from snapkv.policies import Policy
from snapkv.policies.default import method_name


@contextmanager
def reading_progress(method: Policy | str, on_text: TextSink | None) -> Iterator[dict[str, Any]]:
    """Show how far through the layers the prompt is, until the answer begins.

    Args:
        method: who reads, for the label.
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
        label = method if isinstance(method, str) else method_name(method.describe())
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
