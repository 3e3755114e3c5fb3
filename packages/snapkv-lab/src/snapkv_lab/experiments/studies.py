"""The paper's observations, on the demo model.

for each study one line that says how it was run and one per
row. Page and figures: `docs/results/tables/studies.md`, `docs/results/studies/*.svg`. What was
measured is also in `snapkv-results/studies`, where a run that was stopped goes on.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from snapkv_lab.experiments.experiment import Experiment, Given, Shown, of
from snapkv_lab.experiments.records import RESULTS, Row, environment_line, markdown_table
from snapkv_lab.study import HitRate, Induction, Instructions, Overlap, Position, Sensitivity, Study
from snapkv_lab.study.figures import save

FIGURES = RESULTS / "studies"

FOLDER = Path("snapkv-results") / "studies"

SENSITIVITY = Sensitivity(kernels=(1, 5, 7, 13), length=2048, digits=5, depths=5, template="none")

INDUCTION = Induction(samples=2)

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        HitRate(samples=2),
        Overlap(samples=2),
        Instructions(samples=2),
        Position(samples=2),
        SENSITIVITY,
        INDUCTION,
    )
}


def measure(given: Given) -> Iterator[Row]:
    """Studies, one after the other: a line that says how it was run, then its rows."""
    for name in given.parts:

        def show(what: str, done: int, total: int, name: str = name) -> None:
            print(f"{name}: {what} ({done} of {total})", file=sys.stderr)

        findings = STUDIES[name].into(given.loaded, FOLDER / name, show)
        yield {"study": name, "run": findings.run}
        for row in findings.rows:
            yield {"study": name, **{key: _short(value) for key, value in row.items()}}


def _short(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value


def _line(rows: list[Row]) -> str:
    return "; ".join(dict.fromkeys(environment_line([row]) for row in rows if "run" in row))


def findings_of(rows: list[Row], name: str) -> list[Row]:
    """The rows of one study, without the line that says how it was run."""
    return [row for row in of(rows, study=name) if "run" not in row]


def _tables(rows: list[Row]) -> Iterator[str]:
    for name, study in STUDIES.items():
        found = study.table(findings_of(rows, name))
        yield f"## {name}"
        yield f"![{name}](../studies/{name}.svg)"
        yield f"{found.title[0].upper()}{found.title[1:]}."
        yield markdown_table(found.headings, found.rows)


def _drawn(rows: list[Row]) -> None:
    FIGURES.mkdir(exist_ok=True)
    for name, study in STUDIES.items():
        save(study.figure(findings_of(rows, name)), str(FIGURES / f"{name}.svg"))


EXPERIMENT = Experiment(
    name="studies",
    title="The paper's observations",
    measure=measure,
    parts=tuple(STUDIES),
    part_key="study",
    measured=_line,
    tables=_tables,
    drawn=_drawn,
    shown={
        "hit-rate": Shown(
            "hit-rate",
            ("kept", "window", "weighted", "beyond the first 4"),
            ("vote | 4", "sinks and recent | 4"),
        )
    },
)


if __name__ == "__main__":
    EXPERIMENT.main()
