"""Every method on the demo model, as `snapkv leaderboard` compares them.

    python -m snapkv_lab.experiments leaderboard            run it, or go on where it stopped
    python -m snapkv_lab.experiments leaderboard --render
        draw the figure and the page from its rows

Answers and rows: `docs/results/leaderboard/`. Page: `docs/results/tables/leaderboard.md`.
"""

import argparse
import json

from snapkv.cli.app import run
from snapkv_lab.evaluate.store import Record
from snapkv_lab.experiments.records import (
    RESULTS,
    TABLES,
)
from snapkv_lab.report.leaderboard import FILES, as_markdown, write_board

FOLDER = RESULTS / "leaderboard"
PAGE = TABLES / "leaderboard.md"
COMMAND = ("leaderboard", "--results", str(FOLDER))


def measured() -> Record:
    """What the command has found."""
    found: Record = json.loads((FOLDER / FILES[0]).read_text("utf-8"))
    return found


def render(found: Record) -> str:
    """The page, with the command that makes it again."""
    page = as_markdown(found, f"../{FOLDER.name}/{FILES[1]}")
    return f"{page}\nMade by `python -m snapkv_lab.experiments leaderboard`.\n"


def main() -> int:
    """Run it unless told only to render; the command's exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--render", action="store_true", help="only render the page from the rows")
    if not parser.parse_args().render and (status := run(list(COMMAND))):
        return status
    write_board(measured(), FOLDER)
    (FOLDER / "leaderboard.md").unlink()  # that is the page of tables
    PAGE.write_text(render(measured()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
