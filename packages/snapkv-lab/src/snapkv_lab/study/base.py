"""A study: settings in; rows, a table and a figure out."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from snapkv_lab.evaluate.store import Progress, RunSummary
from snapkv_lab.report.tables import Table
from snapkv_lab.rows import Row, group_rows, mean_value, short_hash

if TYPE_CHECKING:
    from snapkv_app.models import LoadedModel


@dataclass(frozen=True, kw_only=True)
class Findings(RunSummary):
    """The findings of a study: a record of how they were made, and rows.

    `warnings` name parts of the user's files that were not read, `notices` deviations from the
    settings, `closing` the conclusion and its use.
    """

    warnings: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    closing: str = ""


@dataclass(frozen=True, kw_only=True)
class Study(ABC):
    """One of the paper's observations: a frozen dataclass of its settings.

    The fields of a subclass are its options on the command line, with the texts under ``Args:`` of
    its docstring as their help.
    """

    name: ClassVar[str]

    @abstractmethod
    def measure(
        self, loaded: "LoadedModel", folder: Path, on_progress: Progress | None = None
    ) -> Findings:
        """Measure what is missing in the folder, and summarise everything.

        Raises:
            InvalidArgumentError: the folder holds another run.
            OutputError: a part cannot be written; those before it are in the folder.
            PromptTooLongError: the model has too few positions.
        """

    @abstractmethod
    def table(self, rows: Sequence[Row]) -> Table:
        """The rows in brief."""

    @abstractmethod
    def figure(self, rows: Sequence[Row]) -> Any:
        """A matplotlib figure of the rows."""

    def settings(self, loaded: "LoadedModel") -> Row:
        """Everything that the rows depend on, except the documents' text."""
        from snapkv_lab.measure.environment import software_versions

        study: Row = json.loads(json.dumps({"name": self.name, **asdict(self)}))
        return {"study": study, "model": loaded.description(), **software_versions()}

    def fingerprint(self, loaded: "LoadedModel") -> str:
        """A short name for the settings."""
        return short_hash(self.settings(loaded))


def mean_rows(rows: Iterable[Row], by: Sequence[str], numbers: Sequence[str]) -> list[Row]:
    """One row for all that agree in `by`, with the mean of each number where it is not None."""
    return [
        dict(zip(by, values, strict=True)) | {name: mean_value(group, name) for name in numbers}
        for values, group in group_rows(rows, lambda row: tuple(row[name] for name in by)).items()
    ]


def group_by_label(rows: Iterable[Row], by: str, label: str = "{}") -> dict[str, list[Row]]:
    """Rows by one key, under the labels of the curves of a figure."""
    return {label.format(value): own for value, own in group_rows(rows, by).items()}


def format_range_over_layers(rows: Sequence[Row], name: str) -> str:
    """The mean of a number over rows of one layer each, its lowest and its highest value."""
    known = [row[name] for row in rows if row[name] is not None]
    if not known:
        return "-"
    return f"{fmean(known):.2f} ({min(known):.2f} to {max(known):.2f})"


def format_weighted_mean(rows: Sequence[Row], name: str, weight: str) -> str:
    """The mean of a number over rows of one layer each, weighted by another number of theirs."""
    known = [row for row in rows if row[name] is not None]
    total = sum(row[weight] for row in known)
    return f"{sum(row[name] * row[weight] for row in known) / total:.2f}" if total else "-"
