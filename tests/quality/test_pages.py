"""Every number of a results page comes from a committed row."""

import pytest
from benchmarks import (
    appending,
    bits,
    chunked,
    evaluation,
    first_day,
    flat,
    leaderboard,
    medusa,
    methods,
    pooling,
    quality,
    ragged,
    readme,
    selective,
    serving,
    sharing,
    speed,
    studies,
    workers,
)
from benchmarks.records import read_rows

PAGES = {
    "appending": appending,
    "bits": bits,
    "quality": quality,
    "speed": speed,
    "methods": methods,
    "pooling": pooling,
    "ragged": ragged,
    "studies": studies,
    "chunked": chunked,
    "first_day": first_day,
    "flat": flat,
    "medusa": medusa,
    "selective": selective,
    "serving": serving,
    "sharing": sharing,
    "workers": workers,
}


@pytest.mark.parametrize("benchmark", PAGES.values(), ids=PAGES)
def test_the_page_is_what_its_rows_render_to(benchmark):
    assert benchmark.PAGE.read_text("utf-8") == benchmark.render(read_rows(benchmark.ROWS))


@pytest.mark.parametrize("benchmark", PAGES.values(), ids=PAGES)
def test_every_row_says_where_it_was_measured(benchmark):
    rows = read_rows(benchmark.ROWS)
    if benchmark is studies:  # a line per study says how it was run
        rows = [row for row in rows if "run" in row]
        assert [row["study"] for row in rows] == list(studies.STUDIES)
    if benchmark is pooling:  # a line per run
        rows = [row for row in rows if "run" in row]
        assert {row["run"] for row in rows} == pooling.PARTS.keys()
    for row in rows:
        assert row["model"]["name"]
        assert {"commit", "torch", "transformers", "threads"} <= row["environment"].keys()


def test_the_page_of_the_experiments_is_what_their_answers_make():
    measured = evaluation.measured()
    assert measured.keys() == evaluation.EXPERIMENTS.keys()
    assert evaluation.PAGE.read_text("utf-8") == evaluation.render(measured)


@pytest.mark.parametrize("name", evaluation.EXPERIMENTS)
def test_every_answer_of_an_experiment_is_there_and_scored_as_the_task_scores_it(name):
    results = evaluation.measured()[name]
    answers = read_rows(results.folder / "samples.jsonl")
    turns = len({row["cell"].get("turn") for row in answers})
    methods = evaluation.EXPERIMENTS[name].methods
    assert len(answers) == results.run["samples"] * turns * len(methods)
    assert {row["status"] for row in answers} == {"ok"}
    means = {row["method"]: [] for row in results.rows}
    for row in answers:
        means[row["method"]].append(row["score"])
    for method, scores in means.items():
        rows = [row for row in results.rows if row["method"] == method]
        total = sum(row["score"] * row["samples"] for row in rows)
        assert total == pytest.approx(sum(scores))


def test_the_leaderboards_page_is_what_its_rows_make():
    assert leaderboard.PAGE.read_text("utf-8") == leaderboard.render(leaderboard.measured())


def test_wide_pooling_finds_the_needle_wherever_the_readme_says_it_does():
    rows = evaluation.measured()["needle"].rows
    wide = [row for row in rows if row["method"] == "SnapKV, kernel 13"]
    assert len(wide) == 20
    assert all(row["score"] == 1 and row["policy"]["budget"] == 256 for row in wide)


def test_the_readmes_table_is_what_the_rows_render_to():
    page = readme.README.read_text("utf-8")
    assert page == readme.rendered(page)
    assert "| full cache |" in page


def test_heads_of_different_length_cost_at_most_half_as_much_again():
    """The whole demo model, and one layer of a large one, with storing the token and without.

    A layer of the demo model on its own is too small to say anything: calls into torch are most of
    its time, with uneven heads and without.
    """
    rows = [row for row in read_rows(ragged.ROWS) if "ratio" in row]
    held = [row for row in rows if row.get("shape") != "demo model"]
    assert {row["benchmark"] for row in held} == {"decode", "layer", "attention"}
    for row in held:
        assert row["ratio"]["p50"] <= 1.5, row
    for row in rows:
        assert row["held_bytes"] <= 1.02 * row["uniform_bytes"], row
