"""Every method on the demo model, as `snapkv leaderboard` compares them.

Answers and rows: `docs/results/leaderboard/`.
"""

import json
from dataclasses import dataclass

from snapkv.cli.app import run
from snapkv_lab.evaluate.store import Record
from snapkv_lab.experiments.experiment import Experiment, Given, Shown
from snapkv_lab.experiments.records import RESULTS, Row
from snapkv_lab.report.leaderboard import FILES, as_markdown, write_board

FOLDER = RESULTS / "leaderboard"


def _measure(given: Given) -> list[Row]:
    if status := run(["leaderboard", "--results", str(FOLDER)]):
        raise SystemExit(status)
    return []


def _read() -> Record:
    """What the command has found."""
    found: Record = json.loads((FOLDER / FILES[0]).read_text("utf-8"))
    return found


@dataclass(frozen=True, kw_only=True)
class _Leaderboard(Experiment):
    """The command's own page and figure."""

    def render(self, rows: Record) -> str:
        """The page, with the command that makes it again."""
        page = as_markdown(rows, f"../{FOLDER.name}/{FILES[1]}")
        return f"{page}\nMade by `python -m snapkv_lab.experiments leaderboard`.\n"


def _drawn(found: Record) -> None:
    write_board(found, FOLDER)
    (FOLDER / "leaderboard.md").unlink()  # that is the page of tables


EXPERIMENT = _Leaderboard(
    name="leaderboard",
    title="Every method on the demo model",
    takes="hours",
    measure=_measure,
    resumes=True,
    read=_read,
    drawn=_drawn,
    tables=lambda found: (),
    shown={"leaderboard": Shown("Beside the full cache", ("kept", "no difference seen", "worse"))},
)


if __name__ == "__main__":
    EXPERIMENT.main()
