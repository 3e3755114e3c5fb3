"""Progress bars, on standard error and only on a terminal."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from snapkv.app.answering import TextSink


class _Shown:
    """A bar that is there while its block runs."""

    _progress: Progress

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()


class ReadingProgress(_Shown):
    """Shows how far through the layers the prompt is, and is gone when the answer begins.

    Args:
        console: where to draw; nothing is drawn unless it is a terminal.
        policy: the method's name, for the label.
    """

    def __init__(self, console: Console, policy: str) -> None:
        self._progress = Progress(
            TextColumn("reading the prompt ({task.description})"),
            BarColumn(),
            TextColumn("layer {task.completed} of {task.total}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(policy, total=None)

    def advance(self, layers: int, of_layers: int) -> None:
        """Note that `layers` of `of_layers` layers have begun to read the prompt."""
        self._progress.update(self._task, completed=layers, total=of_layers)

    def ending_with(self, on_text: TextSink | None) -> TextSink | None:
        """The sink, with the bar out of its way before the first text."""
        if on_text is None:
            return None

        def write(text: str) -> None:
            self._progress.stop()
            on_text(text)

        return write


class AnswersProgress(_Shown):
    """Shows how many answers of a run are there.

    Args:
        console: where to draw; nothing is drawn unless it is a terminal.
        task: what is run, for the label.
    """

    def __init__(self, console: Console, task: str) -> None:
        self._progress = Progress(
            TextColumn(task),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None)

    def advance(self, description: str, done: int, total: int) -> None:
        """Note that `done` of `total` answers are there, and which one comes next."""
        self._progress.update(self._task, description=description, completed=done, total=total)
