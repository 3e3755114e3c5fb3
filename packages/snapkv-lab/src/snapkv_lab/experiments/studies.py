"""The paper's observations, on the demo model.

    python -m snapkv_lab.experiments studies  measure, write the rows, render page and figures
    python -m snapkv_lab.experiments studies overlap  measure this one, keep the rows of the others
    python -m snapkv_lab.experiments studies --render
        render page and figures from the rows that are there

Rows: `docs/results/studies.jsonl`, for each study one line that says how it was run and one per
row. Page and figures: `docs/results/tables/studies.md`, `docs/results/studies/*.svg`. What was
measured is also in `snapkv-results/studies`, where a run that was stopped goes on.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from snapkv.app.models import LoadedModel, load
from snapkv_lab.experiments.environment import describe_environment
from snapkv_lab.experiments.records import (
    RESULTS,
    TABLES,
    Row,
    environment_line,
    markdown_table,
    read_rows,
    tables_page,
    write_rows,
)
from snapkv_lab.study import HitRate, Induction, Instructions, Overlap, Position, Sensitivity, Study
from snapkv_lab.study.figures import save

ROWS = RESULTS / "studies.jsonl"
PAGE = TABLES / "studies.md"
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


def measure(names: Sequence[str]) -> Iterator[Row]:
    """Studies, one after the other."""
    environment, loaded = describe_environment(), load("demo")
    for name in names:
        yield from _measured(STUDIES[name], loaded, environment)


def _measured(study: Study, loaded: LoadedModel, environment: Row) -> Iterator[Row]:
    def show(what: str, done: int, total: int) -> None:
        print(f"{study.name}: {what} ({done} of {total})", file=sys.stderr)

    findings = study.into(loaded, FOLDER / study.name, show)
    model = loaded.description()
    yield {"study": study.name, "run": findings.run, "model": model, "environment": environment}
    for row in findings.rows:
        yield {"study": study.name, **{name: _short(value) for name, value in row.items()}}


def _short(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value


def render(rows: list[Row]) -> str:
    """The figures and tables of these rows."""
    measured = dict.fromkeys(environment_line([row]) for row in rows if "run" in row)
    return tables_page(
        "studies",
        "The paper's observations",
        "; ".join(measured),
        *(part for name in STUDIES for part in _section(name, findings_of(rows, name))),
    )


def findings_of(rows: list[Row], name: str) -> list[Row]:
    """The rows of one study, without the line that says how it was run."""
    return [row for row in rows if row["study"] == name and "run" not in row]


def _section(name: str, rows: list[Row]) -> list[str]:
    table = STUDIES[name].table(rows)
    return [
        f"## {name}",
        f"![{name}](../studies/{name}.svg)",
        f"{table.title[0].upper()}{table.title[1:]}.",
        markdown_table(table.header, table.lines),
    ]


def main() -> None:
    """Measure unless told only to render."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--render", action="store_true", help="only render from the rows")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(STUDIES)}; all by default")
    given = parser.parse_args()
    if unknown := set(given.names) - set(STUDIES):
        parser.error(f"expected names of {', '.join(STUDIES)}, got {', '.join(unknown)}")
    if not given.render:
        names = given.names or list(STUDIES)
        others = [row for row in read_rows(ROWS) if row["study"] not in names]
        write_rows(ROWS, [*others, *measure(names)])
    rows = read_rows(ROWS)
    PAGE.write_text(render(rows), encoding="utf-8")
    FIGURES.mkdir(exist_ok=True)
    for name, study in STUDIES.items():
        save(study.figure(findings_of(rows, name)), str(FIGURES / f"{name}.svg"))
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
