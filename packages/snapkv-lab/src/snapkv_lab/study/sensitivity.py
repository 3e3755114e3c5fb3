"""How window, kernel and pooling change the score of a task (Table 2, Sec. 5.4)."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from snapkv.validation import require_at_least
from snapkv_app.cli.amounts import EXACT, one_storage
from snapkv_lab.drawing import draw_cells
from snapkv_lab.evaluate.sample import Template
from snapkv_lab.evaluate.store import Progress
from snapkv_lab.evaluate.tasks import Needle
from snapkv_lab.report.tables import Table
from snapkv_lab.rows import Row, group_rows
from snapkv_lab.study.base import Findings, Study

if TYPE_CHECKING:
    from snapkv_app.models import LoadedModel
    from snapkv_lab.evaluate.asking import Executor, Method


@dataclass(frozen=True, kw_only=True)
class Sensitivity(Study):
    """How window, kernel and pooling change the score of a task.

    The needle test in one setting, answered by SnapKV with every window, kernel and pooling, and
    from the full cache. A kernel of 1 means no pooling.

    Args:
        windows: sizes of the observation window.
        kernels: widths of the pooling, odd.
        poolings: max, avg, or both with a comma.
        budget: tokens kept per head and layer, window included, or bytes of the cache.
        bits: how keys and values are stored: exact (unquantized), int8, int4 or k8v4.
        length: tokens of the prompt.
        depths: places of the needle.
        permutations: runs of every depth, each with the documents in another order.
        digits: digits of the hidden number.
        cloze: give the model the start of the answer, which small models need.
        haystack: folder of text files; without one, essays or Python's documentation.
        seed: random seed of needles and orders.
        template: tokenizer for the model's chat template, if any; none for plain text.
    """

    name: ClassVar[str] = "sensitivity"

    windows: tuple[int, ...] = (16, 32, 64)
    kernels: tuple[int, ...] = (1, 5, 7, 9)
    poolings: tuple[str, ...] = ("max", "avg")
    budget: int | str = 128
    bits: str = EXACT
    length: int = 1024
    depths: int = 5
    permutations: int = 1
    digits: int = 7
    cloze: bool = True
    haystack: str | None = None
    seed: int = 42
    template: Template = "tokenizer"

    def __post_init__(self) -> None:
        """Check that there are windows, kernels and poolings, and that SnapKV accepts them.

        Raises:
            InvalidArgumentError: one of the lists is empty, or a policy refuses a setting.
            InvalidTypeError: a setting of a policy has the wrong type.
        """
        for name in ("windows", "kernels", "poolings"):
            require_at_least(name, len(getattr(self, name)), 1)
        self._methods()

    def measure(
        self,
        loaded: "LoadedModel",
        folder: Path,
        on_progress: Progress | None = None,
        executor: "Executor | None" = None,
    ) -> Findings:
        """Run the task with all settings and return the results.

        Args:
            loaded: the model and its tokenizer.
            folder: where answers are stored; a stopped run continues there.
            on_progress: receives the progress; None for no reports.
            executor: answers the questions; None for this process.

        Returns:
            The results, one row per method, first that of the full cache.

        Raises:
            InvalidArgumentError: the folder holds another run, or a setting of the task is out of
                range.
            DocumentError: the haystack is missing or holds no text.
            OutputError: an answer cannot be written; the answers before it are in the folder.
        """
        from snapkv_lab.evaluate.runner import Run

        task = Needle(
            lengths=(self.length,),
            depths=self.depths,
            permutations=self.permutations,
            digits=self.digits,
            cloze=self.cloze,
            haystack=self.haystack,
            seed=self.seed,
        )
        run = Run(loaded=loaded, task=task, methods=self._methods(), template=self.template)
        results = run.evaluate(folder, on_progress, executor)
        return Findings(
            folder=folder,
            run=results.run,
            rows=[_combine_cells(own) for own in group_rows(results.rows, "method").values()],
            warnings=results.task.warnings,
            unwritten=results.unwritten,
        )

    def _methods(self) -> list["Method"]:
        """Return the full cache and then SnapKV with every combination of the settings.

        A kernel of 1 is listed for the first kind of pooling only.

        Raises:
            InvalidArgumentError: a setting is out of range.
        """
        from snapkv import FullCache, KVCodes, SnapKV
        from snapkv_lab.evaluate.asking import Method

        word = one_storage(self.bits)
        codes = None if word is None else KVCodes.of(word)  # type: ignore[arg-type] # any word
        methods = [Method(label="full cache", policy=FullCache())]
        for window, kernel in itertools.product(self.windows, self.kernels):
            for pooling in self.poolings[:1] if kernel == 1 else self.poolings:
                kind = "no pooling" if kernel == 1 else f"{pooling} {kernel}"
                settings: Row = {"kernel_size": kernel, "pooling": pooling}
                policy = SnapKV(self.budget, window_size=window, **settings)
                method = Method(label=f"window {window}, {kind}", policy=policy)
                methods.append(method.stored_in(codes))
        return methods

    def table(self, rows: Sequence[Row]) -> Table:
        full, settings = rows[0], self._by_pooling(rows)
        keys = ("window_size", "pooling", "kernel_size")
        scores = {tuple(row[key] for key in keys): _format_score(row) for row in settings}
        windows, kernels = (sorted({row[key] for row in settings}) for key in keys[::2])
        headings = ("window", "pooling", *(f"kernel {kernel}" for kernel in kernels))
        return Table(
            title=f"accuracy of {full['samples']} samples at a budget of {self.budget} of "
            f"{self.length} tokens; the full cache: {_format_score(full)}",
            headings=headings,
            rows=[
                (
                    str(place[0]),
                    place[1],
                    *(scores.get((*place, kernel), "-") for kernel in kernels),
                )
                for place in itertools.product(windows, self.poolings)
            ],
            left=len(headings),
        )

    def figure(self, rows: Sequence[Row]) -> Any:
        keys = {"x": "kernel_size", "y": "window_size", "panel": "pooling", "value": "score"}
        return draw_cells(f"Accuracy, budget {self.budget}", self._by_pooling(rows), **keys)

    def _by_pooling(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of SnapKV by kind of pooling, without the first row (the full cache).

        Rows without pooling are repeated for each kind.
        """
        return [
            row | {"pooling": pooling}
            for pooling in self.poolings
            for row in rows[1:]
            if row["pooling"] in ("none", pooling)
        ]


def _combine_cells(cells: Sequence[Row]) -> Row:
    """Return one row with the settings of a method and its mean score over all samples of its
    cells.

    Args:
        cells: the rows of one method, as `summarise` makes them, at least one.

    Returns:
        A row with "method", "window_size", "kernel_size", "pooling", "score" (from 0 to 1; None if
        no sample was answered) and "samples". Settings that the method does not have are None.
    """
    policy, samples = cells[0]["policy"], sum(cell["samples"] for cell in cells)
    right = sum(cell["score"] * cell["samples"] for cell in cells if cell["samples"])
    return {
        "method": cells[0]["method"],
        "window_size": policy.get("window_size"),
        "kernel_size": policy.get("kernel_size"),
        "pooling": "none" if policy.get("kernel_size") == 1 else policy.get("pooling"),
        "score": right / samples if samples else None,
        "samples": samples,
    }


def _format_score(row: Row) -> str:
    return "-" if row["score"] is None else f"{row['score']:.2f}"
