"""The pages of tables, and the small tables of docs/results.md and README.md that come from them.

A page of tables, `docs/results/tables/NAME.md`, is made of nothing but rows. The two other pages
are written by hand around tables between `<!-- shown: NAME -->` and `<!-- end -->`, whose cells are
copied from those pages. This makes every page of tables, and both pages, from the rows that are
there.
"""

import importlib
import re
from itertools import dropwhile, takewhile
from pathlib import Path

from snapkv_lab.experiments.experiment import Experiment, Shown
from snapkv_lab.experiments.records import RESULTS, TABLES, markdown_table

ROOT = RESULTS.parents[1]
PAGES = (ROOT / "docs/results.md", ROOT / "README.md")


def declared() -> dict[str, Experiment]:
    """Every experiment with a page, by its name."""
    files = sorted(Path(__file__).parent.glob("[a-z]*.py"))
    names = [path.stem for path in files if "\nEXPERIMENT = " in path.read_text("utf-8")]
    modules = {name: importlib.import_module(f"{__package__}.{name}") for name in names}
    return {name: module.EXPERIMENT for name, module in modules.items()}


def shown_table(page: str, shown: Shown) -> str:
    """A part of a table of a page of tables.

    Raises:
        ValueError: the page has no such row or column, or a row is not the only one of its name.
    """
    header, _, *lines = _table_under(page, shown.section)
    if missing := set(shown.columns) - set(header):
        raise ValueError(f"{page}: expected columns of {header}, got {sorted(missing)}")
    found = [_row(lines, name, page, shown) for name in shown.rows] or lines
    places = [header.index(column) for column in shown.columns]
    return markdown_table(shown.columns, [[line[place] for place in places] for line in found])


def _row(lines: list[list[str]], name: str, page: str, shown: Shown) -> list[str]:
    first = name.split(" | ")
    found = [line for line in lines if line[: len(first)] == first]
    if len(found) != 1:
        raise ValueError(f"{page}, {shown.section}: expected one row {name}, got {found}")
    return found[0]


def _table_under(page: str, section: str) -> list[list[str]]:
    """The cells of the first table below a heading, line by line."""
    lines = iter((TABLES / f"{page}.md").read_text(encoding="utf-8").splitlines())
    below = dropwhile(lambda line: line.lstrip("# ") != section, lines)
    table = takewhile(_is_table, dropwhile(lambda line: not _is_table(line), below))
    return [[each.strip() for each in line.strip("|").split("|")] for line in table]


def _is_table(line: str) -> bool:
    return line.startswith("|")


def filled(text: str, shown: dict[str, tuple[str, Shown]]) -> str:
    """The text of a page with its tables made anew.

    Args:
        text: with marks around its tables.
        shown: by the names of the marks, a page of tables and a part of a table there.
    """

    def table(mark: re.Match[str]) -> str:
        return f"<!-- shown: {mark[1]} -->\n\n{shown_table(*shown[mark[1]])}\n\n<!-- end -->"

    return re.sub(r"<!-- shown: (\S+) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


def shown_in(experiments: dict[str, Experiment]) -> dict[str, tuple[str, Shown]]:
    """What `filled` takes."""
    return {
        mark: (name, shown)
        for name, each in experiments.items()
        for mark, shown in each.shown.items()
    }


def main() -> None:
    """Render everything from the rows that are there."""
    experiments = declared()
    TABLES.mkdir(exist_ok=True)
    for each in experiments.values():
        each.page.write_text(each.render(each.known()), encoding="utf-8")
    for page in PAGES:
        text = filled(page.read_text(encoding="utf-8"), shown_in(experiments))
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
