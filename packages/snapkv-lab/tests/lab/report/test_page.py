"""The page is one file that shows the rows and is readable for everybody, with tables beside it."""

import csv
import html
import io
import re

import pytest
from markdown_it import MarkdownIt

from snapkv_lab.report.page import (
    cell_table,
    method_table,
    render_csv,
    render_markdown,
    render_page,
)
from snapkv_lab.report.tables import IN_PERCENT, escape_markdown
from tests.lab.report.runs import grid, results, row, sets

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")


def tables(page):
    """Return the texts of the cells of every table, line by line."""
    return [
        [
            [html.unescape(text) for text in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", line, re.S)]
            for line in re.findall(r"<tr>(.*?)</tr>", table, re.S)
        ]
        for table in re.findall(r"<table.*?</table>", page, re.S)
    ]


def test_method_table_marks_the_best_score_of_every_column():
    table = method_table(sets())
    costs = ("cache", "ms/token")
    assert table.headings[:5] == ("method", "question", "qa", "code", "news")
    assert table.headings[5:] == ("mean", "95 %", "vs full", "difference", *costs)
    assert table.rows == [
        (
            *("full", "visible", "50.0", "75.0", "out of memory", "62.5", "one sample"),
            *("-", "-", "1.0 MiB", "12"),
        ),
        (
            *("snapkv@512", "visible", "50.0", "25.0", "12.5", "29.2", "one sample"),
            *("-40.0 %", "-25.0 (one sample)", "1.0 MiB", "12"),
        ),
        ("paper: full", "visible", "50.0", "25.0", "", "37.5", "-", "-", "-", "-", "-"),
    ]
    # Alike is best twice; a mean over fewer columns is not compared; the paper's are not measured.
    assert table.bold == {(0, 2), (1, 2), (0, 3), (1, 4), (1, 5)}


def test_page_fetches_no_other_file():
    page = render_page(grid())
    assert not re.search(r"<(script|link|iframe|a|object|form)\b|<[^>]* on\w+=|url\(|@import", page)
    sources = re.findall(r'\bsrc="(.*?)"', page)
    assert sources
    assert all(each.startswith("data:image/svg+xml;base64,") for each in sources)
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert f'http-equiv="Content-Security-Policy" content="{policy}"' in page


NASTY = '<script>alert("x")</script>&amp;|*b*\n{{ 7 * 7 }}'


def test_markdown_shows_a_text_with_its_marks_literally():
    text = "niah_single_1 *a* `b` __c__ ~d~ [e](f) | \\ <g>"
    shown = MarkdownIt().enable("strikethrough").renderInline(escape_markdown(text))
    assert html.unescape(shown) == text
    assert "niah_single_1" in escape_markdown(text)


def test_method_names_are_escaped_on_the_page():
    run = results(
        sets().task,
        [row(NASTY, {"set": NASTY}, None, status=NASTY), row("full", {"set": NASTY}, 1.0)],
        model={"name": NASTY, "max_tokens": None},
        haystack={NASTY: NASTY},
    )
    page = render_page(run)
    assert not re.search(r"<script|<b>", page)
    methods, failures, _, facts = tables(page)
    assert methods[0][2] == NASTY
    assert methods[1][0] == NASTY
    assert failures[1][2] == NASTY
    assert dict(facts[1:])[f"haystack: {NASTY}"] == NASTY
    assert dict(facts[1:])["model: name"] == NASTY
    markdown = render_markdown(run)
    assert "<script>" not in markdown
    assert all(line.count(" | ") == 6 for line in markdown.splitlines() if line.startswith("|"))
    assert '<td class="best">' in page
    (first, _) = csv.DictReader(io.StringIO(render_csv(run)))
    assert (first["method"], first["set"], first["model"]) == (NASTY, NASTY, NASTY)


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (None, "one sample"),
        ((0.5, 0.5), "no spread"),
        ((-0.125, 0.5), "-12.5 to 50.0"),
        ((-1e-9, 0.25), "0.0 to 25.0"),
    ],
)
def test_intervals_are_written_as_text(interval, text):
    assert IN_PERCENT.interval(interval) == text


def test_csv_has_unrounded_numbers():
    run = grid()
    rows = list(csv.DictReader(io.StringIO(render_csv(run))))
    assert len(rows) == len(run.rows) == len(cell_table(run))
    assert rows[1] == {
        "task": "keys", "metric": "accuracy", "model": "demo", "method": "snapkv@512",
        "question": "visible", "length": "1024", "depth": "0", "status": "ok", "failed": "0",
        "samples": "1", "score": "0.25", "prompt_tokens": "1024.0", "kept_tokens": "1024.0",
        "held_bytes": "1048576.0", "token_ms": "12.5", "first_token_ms": "12.5",
        "score_low": "", "score_high": "", "difference": "", "difference_low": "",
        "difference_high": "",
    }  # fmt: skip
    assert (rows[9]["status"], rows[9]["failed"], rows[9]["score"]) == ("out of memory", "1", "")


def test_intervals_and_differences_are_on_the_page_and_in_the_csv():
    run = results(sets().task, [row("full", {"set": "qa"}, 0.5), row("h2o", {"set": "qa"}, 0.25)])
    run.rows[0] |= {"interval": [0.25, 0.75]}
    run.rows[1] |= {
        "interval": [0.25, 0.25],
        "difference": {"score": -0.25, "interval": [-0.5, 0.0], "samples": 4},
    }
    cells = tables(render_page(run))[1]
    assert [line[4:6] for line in cells[1:]] == [["25.0 to 75.0", "-"], [
        "no spread", "-25.0 (-50.0 to 0.0), no difference seen",
    ]]  # fmt: skip
    full, h2o = csv.DictReader(io.StringIO(render_csv(run)))
    names = ("score_low", "score_high", "difference", "difference_low", "difference_high")
    assert [full[name] for name in names] == ["0.25", "0.75", "", "", ""]
    assert [h2o[name] for name in names] == ["0.25", "0.25", "-0.25", "-0.5", "0.0"]
