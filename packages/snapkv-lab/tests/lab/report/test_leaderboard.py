"""The page of a leaderboard says what its rows say, worked by hand."""

import json

import pytest

from snapkv_lab.evaluate.leaderboard import board_row
from snapkv_lab.report.leaderboard import (
    FILES,
    as_markdown,
    as_page,
    board_lines,
    board_table,
    draw,
    draw_times,
    seen_table,
    write_board,
)
from tests.lab.report.runs import RUN, row
from tests.lab.report.test_page import NASTY, Page

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

GOOD, HALF, BAD = (1.0,) * 8, (1.0, 0.0) * 4, (0.0,) * 8


def answered(method, task, scores, *, question="visible", held=0.25):
    named = {f"{task}/{number}": score for number, score in enumerate(scores)}
    mean = sum(scores) / len(scores) if scores else None
    made = row(method, {"length": 512}, mean, question=question, status="too long")
    made |= {"task": task, "scores": named, "status": "ok" if scores else "too long"}
    if scores and method != "full":
        made["held_bytes"] = held * made["full_bytes"]
    return board_row(made)


def board(*rows, left_out=None):
    """With everything that `board` gives, for these rows."""
    model = RUN["model"] | {"dtype": "float32", "attn_implementation": "sdpa", "device": "cpu"}
    places = dict.fromkeys(f"{row['task']}/{row['question']}" for row in rows)
    return {
        "leaderboard": {"snapkv": "1.0", "torch": "2.0", "transformers": "5.0"},
        "model": model,
        "runs": dict.fromkeys(places, RUN),
        "left_out": left_out or {},
        "rows": list(rows),
    }


@pytest.fixture
def found():
    return board(
        answered("h2o@0.125", "needle", BAD, held=0.125),
        answered("h2o@0.5", "needle", BAD, held=0.5),
        answered("snapkv@0.5", "needle", HALF, held=0.5),
        answered("snapkv@0.125", "needle", HALF, held=0.15),
        answered("tova@0.5", "needle", GOOD, held=0.5),
        answered("full", "needle", HALF),
        answered("full", "lines", HALF),
        answered("h2o@0.125", "lines", BAD, held=0.125),
        answered("h2o@0.5", "lines", HALF, held=0.6),
        answered("snapkv@0.5", "lines", HALF, held=0.6),
        answered("snapkv@0.125", "lines", (), held=0.15),
        answered("tova@0.5", "lines", GOOD, held=0.5),
        answered("full", "needle", HALF, question="hidden"),
        answered("h2o@0.125", "needle", BAD, question="hidden"),
        left_out={"lines/visible": ["kvzip: it reads twice"]},
    )


def test_the_full_cache_comes_first_then_share_by_share_the_best(found):
    lines = board_lines(found)
    assert [(line.scores.question, line.name, line.kept) for line in lines] == [
        ("visible", "full", "all"),
        ("visible", "tova", "50 %"),
        ("visible", "snapkv", "50 %"),
        ("visible", "h2o", "50 %"),
        ("visible", "h2o", "12.5 %"),
        ("visible", "snapkv", "12.5 %"),  # a better mean, of fewer tasks
        ("hidden", "full", "all"),
        ("hidden", "h2o", "12.5 %"),
    ]
    assert [line.held for line in lines[:4]] == pytest.approx([1.0, 0.5, 0.55, 0.55])


def visible(found):
    return [line for line in board_lines(found) if line.scores.question == "visible"]


def test_tables_of_scores_differences_and_who_is_like_the_full_cache(found):
    table = board_table(found, visible(found))
    assert table.headings[:5] == ("method", "budget", "held", "needle", "lines")
    assert table.headings[5:] == ("mean", "95 %", "difference", "ms per token")
    full, tova, snapkv, *_, part = table.rows
    assert full[:3] == ("full", "all", "100.0 %")
    assert full[3].startswith("50.0 (")
    assert full[-2:] == ("-", "12.5")
    assert tova[3:7] == ("100.0 (no spread)", "100.0 (no spread)", "100.0", "no spread")
    assert tova[-2].startswith("+50.0 (")
    assert snapkv[-2] == "+0.0 (no spread), no difference seen"
    assert part[4] == "too long"
    brief = board_table(found, board_lines(found), by_task=False)
    assert brief.rows[1] == ("visible", *tova[:3], *tova[5:])
    seen = seen_table(visible(found))
    assert seen.headings == ("budget", "no difference seen", "worse", "better", "one sample")
    assert seen.rows == [("50 %", "snapkv", "h2o", "tova", "-"), ("12.5 %", "-", "h2o", "-", "-")]


def test_the_figure_has_a_panel_per_method_with_means_bands_and_the_full_cache(found):
    panels = {panel.get_title(): panel for panel in draw(found).axes if panel.get_title()}
    assert list(panels) == ["tova", "snapkv", "h2o"]
    curve, *_ = panels["h2o"].lines
    assert list(curve.get_xdata()) == pytest.approx([12.5, 55])
    assert list(curve.get_ydata()) == [0, 25]
    dashed = [line for line in panels["h2o"].lines if line.get_linestyle() == "--"]
    assert [line.get_ydata()[0] for line in dashed] == [50, 50]
    band = panels["h2o"].collections[0].get_paths()[0].vertices[:, 1]
    shown = [line for line in board_lines(found) if line.name == "h2o" and line.share == 0.5]
    assert (band.min(), band.max()) == (0, pytest.approx(100 * shown[0].scores.interval[1]))


def test_the_page_holds_the_tables_and_the_figure(found):
    page = Page(as_page(found))
    own, alike, hidden, _, left_out, facts = page.tables
    table = board_table(found, visible(found))
    assert own == [list(table.headings), *map(list, table.rows)]
    assert alike[1] == ["50 %", "snapkv", "h2o", "tova", "-"]
    assert [line[0] for line in hidden[1:]] == ["full", "h2o"]
    assert left_out[1] == ["lines/visible", "kvzip: it reads twice"]
    assert dict(facts[1:])["runs: needle/visible: task: haystack"] == "essays"
    means, times = page.all("img")
    assert means["src"].startswith("data:image/svg+xml;base64,")
    assert "h2o at 12.5 % (hidden) 0.0" in means["alt"]
    assert "h2o at 12.5 % (hidden) 12.5 ms" in times["alt"]
    assert "percentile bootstrap over samples, 2,000 resamples" in "".join(page.texts)


def test_bits_are_a_curve_and_a_mark_of_their_own():
    coded = answered("snapkv int4@0.5", "needle", GOOD, held=0.5) | {"bits": "int4"}
    exact = answered("snapkv@0.5", "needle", HALF, held=0.5)
    slow = answered("h2o@0.5", "needle", HALF, held=0.5) | {"token_ms": 50.0}
    found = board(answered("full", "needle", GOOD), coded, exact, slow)
    (panel, _) = (panel for panel in draw(found).axes if panel.get_title())
    assert panel.get_title() == "snapkv"
    assert [list(line.get_ydata()) for line in panel.lines] == [[50], [100], [100, 100]]
    (panel,) = draw_times(found).axes
    marks = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in panel.lines}
    assert marks["question visible, int4"] == [(12.5, 100)]
    assert set(marks["question visible"]) == {(12.5, 50), (50, 50), (12.5, 100)}
    assert {text.get_text() for text in panel.texts} == {"full", "snapkv int4"}


def test_names_stay_text():
    made = board(answered("full", NASTY, HALF), answered(f"{NASTY}@0.5", NASTY, BAD))
    page = Page(as_page(made))
    assert page.all("script") == []
    assert page.tables[0][0][3] == NASTY
    assert "<script>" not in as_markdown(made)


def test_all_is_written_and_the_same_rows_give_the_same_files(found, tmp_path):
    page = write_board(found, tmp_path / "board")
    assert page == tmp_path / "board" / "leaderboard.html"
    first = {path.name: path.read_bytes() for path in page.parent.iterdir()}
    assert set(first) == set(FILES)
    again = json.loads(first["leaderboard.json"])
    write_board(again, page.parent)
    assert {path.name: path.read_bytes() for path in page.parent.iterdir()} == first
