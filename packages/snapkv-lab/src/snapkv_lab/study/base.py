"""The base class of studies: settings in; rows, a table and a figure out."""

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
    """The result of a study.

    Attributes:
        warnings: the parts of the user's files that were not read.
        notices: the deviations from the settings.
        closing: what to do with the result.
    """

    warnings: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    closing: str = ""


@dataclass(frozen=True, kw_only=True)
class Study(ABC):
    """One of the paper's observations, as a frozen dataclass of its settings.

    The fields of a subclass are its options on the command line, with the texts under ``Args:`` of
    its docstring as their help.
    """

    name: ClassVar[str]

    @abstractmethod
    def measure(
        self, loaded: "LoadedModel", folder: Path, on_progress: Progress | None = None
    ) -> Findings:
        """Run the study and return the results.

        What the folder already holds is not measured again.

        Args:
            loaded: the model and its tokenizer.
            folder: where records are stored; a stopped run continues there.
            on_progress: receives the progress; None for no reports.

        Raises:
            InvalidArgumentError: the folder holds another run, or a document is too short.
            OutputError: a record cannot be written; the records before it are in the folder.
            PromptTooLongError: the model has too few positions.
        """

    @abstractmethod
    def table(self, rows: Sequence[Row]) -> Table:
        """Return a table that summarises the rows of the `Findings` of this study."""

    @abstractmethod
    def figure(self, rows: Sequence[Row]) -> Any:
        """Return a matplotlib figure of the rows of the `Findings` of this study.

        matplotlib must be installed, see `require_drawable`.
        """

    def settings(self, loaded: "LoadedModel") -> Row:
        """Return all settings that the rows depend on, except the text of the documents: a
        dictionary for JSON with "study", "model" and the versions of the software.
        """
        from snapkv_lab.measure.environment import software_versions

        study: Row = json.loads(json.dumps({"name": self.name, **asdict(self)}))
        return {"study": study, "model": loaded.description(), **software_versions()}

    def fingerprint(self, loaded: "LoadedModel") -> str:
        """Return a hash of the study's settings, the model and the versions of the software: 8
        hexadecimal digits, which are part of the name of the default folder.
        """
        return short_hash(self.settings(loaded))


def mean_rows(rows: Iterable[Row], by: Sequence[str], numbers: Sequence[str]) -> list[Row]:
    """Return the mean of each number over all rows with the same values in the given fields.

    A number that is None is left out of its mean. A mean without any number is None.

    Args:
        rows: the rows, which must have all of these fields.
        by: the names of the fields that distinguish the groups.
        numbers: the names of the numbers.

    Returns:
        One row for each group, in the order of first appearance, with only these fields.
    """
    return [
        dict(zip(by, values, strict=True)) | {name: mean_value(group, name) for name in numbers}
        for values, group in group_rows(rows, lambda row: tuple(row[name] for name in by)).items()
    ]


def group_by_label(rows: Iterable[Row], by: str, label: str = "{}") -> dict[str, list[Row]]:
    """Group the rows by the value of a field, and return the groups by label.

    A label is the text `label` with the value in place of ``{}``.
    """
    return {label.format(value): own for value, own in group_rows(rows, by).items()}


def format_range_over_layers(rows: Sequence[Row], name: str) -> str:
    """Return the mean, the lowest and the highest value of a number over all layers as text, such
    as "0.52 (0.31 to 0.70)".

    Args:
        rows: one row per layer. Rows in which the number is None are left out.
        name: the field of the number.

    Returns:
        The text, or "-" if no row has a number.
    """
    values = [row[name] for row in rows if row[name] is not None]
    if not values:
        return "-"
    return f"{fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def format_weighted_mean(rows: Sequence[Row], name: str, weight: str) -> str:
    """Return the weighted mean of a number over all layers as text with two digits after the point.

    Args:
        rows: one row per layer. Rows in which the number is None are left out.
        name: the field of the number.
        weight: the field of its weight.

    Returns:
        The text, or "-" if the weights are 0 or no row has a number.
    """
    known_rows = [row for row in rows if row[name] is not None]
    total = sum(row[weight] for row in known_rows)
    return f"{sum(row[name] * row[weight] for row in known_rows) / total:.2f}" if total else "-"
