"""Tables on narrow screens: nothing is cut off, no heading is broken."""

import io
import sys

import pytest
from rich.console import Console

from snapkv_app.cli.grid import Grid, show
from snapkv_app.cli.plan import plan_table
from snapkv_app.cli.session import answers_table
from snapkv_app.plan import Request
from snapkv_app.plan import plan as make_plan
from snapkv_app.plan.shapes import SHAPES
from tests.cli.conftest import made_answer

URL = "https://example.org/" + "/".join(f"{n:x}" * 9 for n in range(900, 911)) + "?end"
HASH = "sha256:" + "".join(f"{n:02x}" for n in range(100, 164))
FILE = "/srv/" + "_".join(f"part{n}" for n in range(300, 318)) + "[final].jsonl"
LABEL = "snapkv:kernel_size=13,window_size=64,pooling=avg,group_reduce=sum@1024"


def answers():
    cache = {"seen_tokens": 4096, "kept_tokens": 256.5, "held_bytes": 10**7, "full_bytes": 10**9}
    texts = f"It is at {URL} (see [b]{HASH}[/b]).", f"Both: {HASH}\n\nand {FILE} 漢字" + "漢" * 50
    return [
        made_answer(
            text,
            cache,
            policy={"name": name},
            prompt_tokens=4096,
            kept_tokens=226.5,
            first_token_ms=123456.0,
            token_ms=88.0,
            drafts={"acceptance_length": 2.5, "passes": 1200, "method": "prompt lookup"},
        )
        for text, name in zip(texts, ("snapkv", "full"), strict=True)
    ]


def plan():
    request = Request(context_tokens=4000, memory_bytes=8 * 10**9, bandwidth_bytes=1e12)
    return make_plan(FILE, SHAPES["smollm2-135m"].footprint("float32"), request)


GRIDS = {
    "ask": answers_table(answers(), with_text=True),
    "plan": plan_table(plan()),
    "many columns": Grid(
        title=f"of {FILE}",
        headings=("kept", "question", "hit rate", "weighted", "beyond the first 4", LABEL),
        rows=(("sinks and recent", URL, "0.93 (0.10 to 1.00)", HASH, "-", "1,234,567.8"),),
    ),
}


def drawn(grid, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(grid)
    return console.file.getvalue()


def joined(page):
    """Everything on a page, without what folding puts in: as lines, and as columns of a table."""
    lines = page.splitlines()
    bordered = [line.replace("┃", "│").split("│") for line in lines if line[:1] in "│┃"]
    columns = [[line[i] for line in bordered if i < len(line)] for i in range(50)]
    return ["".join("".join(part).split()) for part in (lines, *columns)]


@pytest.mark.parametrize("width", [20, 40, 80])
@pytest.mark.parametrize("name", GRIDS)
def test_narrow_screen_loses_no_text_and_breaks_no_heading(name, width):
    grid = GRIDS[name]
    page = drawn(grid, width)
    assert "…" not in page
    assert all(len(line) <= width for line in page.splitlines())
    found = joined(page)
    cells = [str(cell) for row in grid.rows for cell in row if str(cell).strip()]
    for text in (*cells, *map(str, grid.headings), grid.title, grid.caption):
        assert any("".join(text.split()) in part for part in found), text
    shown = page.replace("│", " ").replace("┃", " ").replace(":", " ").split()
    for word in " ".join(map(str, grid.headings)).split():
        assert word in shown or word == LABEL, word


def test_short_numbers_are_not_wrapped_and_brackets_are_literal():
    page = drawn(Grid(headings=("a", "b", "c"), rows=(("1,234,567", URL, "0.1234567"),)), 60)
    assert "1,234,567" in page
    assert "0.1234567" in page
    grid = Grid(headings=("[i]a[/i]",), rows=(("[red]x[/red] [/b]",),), title="[t]", caption="[/c]")
    page = drawn(grid, 40)
    assert all(text in page for text in ("[i]a[/i]", "[red]x[/red] [/b]", "[t]", "[/c]"))


def test_width_of_0_columns_is_replaced_by_80(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "0")
    show(GRIDS["many columns"])
    assert "1,234,567.8" in capsys.readouterr().out


def test_terminal_without_unicode_shows_all_text(monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    show(Grid(headings=("a", "b"), rows=(("schön", "x"),)))
    assert "sch\\xf6n" in output.buffer.getvalue().decode()
