"""Tables of the laboratory's commands on narrow screens, where no text is cut off."""

import io

import pytest
from rich.console import Console

from snapkv_lab.cli import tables
from snapkv_lab.report.page import method_table
from snapkv_lab.report.tables import Table
from tests.lab.report.runs import grid

LABEL = "snapkv:kernel_size=13,window_size=64,pooling=avg,group_reduce=sum@1024"


ROW = {
    **{"bench": "decode", "cache": LABEL, "length": 131072, "batch": 16, "status": "ok"},
    **{"ms_per_token": {"p50": 1234.5}, "held_bytes": 10**11, "of_ceiling": 0.931},
}
SCORE = {"task": "squad", "metric": "em", "filter": "none", "method": LABEL, "score": 0.25}
TABLES = {
    "eval": lambda: method_table(grid(("full", LABEL), [1024 * n for n in range(1, 9)])),
    "lm-eval": lambda: tables.metrics_table("lm-eval", [SCORE]),
    "bench": lambda: tables.bench_table([ROW]),
    "study": lambda: Table(title="of it", headings=("kept", "rate"), rows=[("sinks", "0.93")]),
}


@pytest.mark.parametrize(("name", "width"), [*((name, 20) for name in TABLES), ("eval", 80)])
def test_tables_lose_no_text_on_a_narrow_screen(name, width):
    grid = tables.to_grid(TABLES[name]())
    console = Console(file=io.StringIO(), width=width)
    console.print(grid)
    page = console.file.getvalue()
    assert "…" not in page
    shown = "".join(page.split()).replace("│", "").replace("┃", "")
    for text in [str(cell) for row in grid.rows for cell in row if name != "eval"]:
        assert "".join(text.split()) in shown, text
    assert all(len(line) <= width for line in page.splitlines())
