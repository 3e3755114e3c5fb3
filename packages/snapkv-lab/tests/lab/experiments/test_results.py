"""Every number of the results comes from a committed row: the tables, and the words around them."""

import re
from dataclasses import replace

import pytest

from snapkv_lab.experiments import evaluation, results
from snapkv_lab.experiments.records import TABLES, read_rows

EXPERIMENTS = results.declared()
SHOWN = results.shown_in(EXPERIMENTS)
PAGE, README = results.PAGES
SECTIONS = re.split(r"^(?=##+ )", PAGE.read_text("utf-8"), flags=re.MULTILINE)[1:]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_page_of_tables_is_what_its_rows_make(name):
    experiment = EXPERIMENTS[name]
    assert experiment.name == name
    assert experiment.page.read_text("utf-8") == experiment.render(experiment.known())


def test_no_page_of_tables_is_left_over():
    assert {*TABLES.glob("*")} == {each.page for each in EXPERIMENTS.values()}


@pytest.mark.parametrize("page", results.PAGES, ids=lambda page: page.stem)
def test_a_small_table_is_copied_from_a_page_of_tables(page):
    text = page.read_text("utf-8")
    assert "<!-- shown: " in text
    assert results.filled(text, SHOWN) == text


def test_every_small_table_and_every_page_of_tables_is_shown():
    text = "".join(page.read_text("utf-8") for page in results.PAGES)
    assert {*re.findall(r"<!-- shown: (\S+) -->", text)} == SHOWN.keys()
    linked = {*re.findall(r"\(results/tables/(\w+)\.md\)", PAGE.read_text("utf-8"))}
    assert linked == EXPERIMENTS.keys()


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.partition("\n")[0])
def test_a_number_in_the_words_of_a_section_stands_in_the_tables_that_it_links_to(section):
    tables = "".join(
        (TABLES / f"{name}.md").read_text("utf-8")
        for name in re.findall(r"\(results/tables/(\w+)\.md\)", section)
    )
    there = {number.replace(",", "") for number in re.findall(NUMBER, tables)}
    words = re.sub(r"<!-- shown.*?<!-- end -->|`[^`]*`|\(\S*\)", "", section, flags=re.DOTALL)
    assert {number.replace(",", "") for number in re.findall(NUMBER, words)} <= there


NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)*"


def test_a_row_or_column_that_is_not_there_is_refused():
    page, shown = SHOWN["kernels"]
    with pytest.raises(ValueError, match="expected one row SnapKV"):
        results.shown_table(page, replace(shown, rows=("SnapKV",)))
    with pytest.raises(ValueError, match="expected columns"):
        results.shown_table(page, replace(shown, columns=("budget 1",)))


@pytest.mark.parametrize("name", evaluation.EXPERIMENTS)
def test_every_answer_of_an_experiment_is_there_and_scored_as_the_task_scores_it(name):
    found = evaluation.measured()[name]
    answers = read_rows(found.folder / "samples.jsonl")
    turns = len({row["cell"].get("turn") for row in answers})
    methods = evaluation.EXPERIMENTS[name].methods
    assert len(answers) == found.run["samples"] * turns * len(methods)
    assert {row["status"] for row in answers} == {"ok"}
    means = {row["method"]: [] for row in found.rows}
    for row in answers:
        means[row["method"]].append(row["score"])
    for method, scores in means.items():
        rows = [row for row in found.rows if row["method"] == method]
        total = sum(row["score"] * row["samples"] for row in rows)
        assert total == pytest.approx(sum(scores))
