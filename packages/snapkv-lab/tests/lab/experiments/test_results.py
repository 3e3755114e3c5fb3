"""Every number in tables, and in the words around them, comes from a committed row."""

import re

import pytest

from snapkv_lab.experiments import evaluations
from snapkv_lab.experiments.experiment import load_experiments
from snapkv_lab.experiments.pages import PAGES, refresh_tables
from snapkv_lab.experiments.records import RESULTS
from snapkv_lab.rows import read_rows

EXPERIMENTS = {  # but for those that were never run
    name: own for name, own in load_experiments().items() if own.tables and own.results()
}
TABLES = RESULTS / "tables"
TEXTS = [page.read_text("utf-8") for page in PAGES if page.parent.name == "docs"]
SECTIONS = [
    section for text in TEXTS for section in re.split(r"^(?=##+ )", text, flags=re.MULTILINE)[1:]
]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_page_of_tables_equals_the_one_rendered_from_its_rows(name):
    experiment = EXPERIMENTS[name]
    assert experiment.page.read_text("utf-8") == experiment.render(experiment.results())


def test_every_page_of_tables_has_an_experiment():
    assert {*TABLES.glob("*")} == {each.page for each in EXPERIMENTS.values()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_small_table_is_copied_from_a_page_of_tables(page):
    text = page.read_text("utf-8")
    assert "<!-- shown: " in text
    assert refresh_tables(text, TABLES) == text


def test_every_page_of_tables_is_linked():
    linked = {*re.findall(r"\(results/tables/(\w+)\.md\)", "".join(TEXTS))}
    assert linked == EXPERIMENTS.keys()


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.partition("\n")[0])
def test_each_number_in_a_sections_words_is_in_a_linked_table(section):
    tables = "".join(
        (TABLES / f"{name}.md").read_text("utf-8")
        for name in re.findall(r"\(results/tables/(\w+)\.md\)", section)
    )
    there = {number.replace(",", "") for number in re.findall(NUMBER, tables)}
    others = r"<!-- shown.*?<!-- end -->|`[^`]*`|\(\S*\)|(?:Fig\.|Table) \d+(?:, \d+)*"
    words = re.sub(others, "", section, flags=re.DOTALL)
    assert {number.replace(",", "") for number in re.findall(NUMBER, words)} <= there


NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)*"

_LONG = """# A
## B

| name | one | two |
| --- | ---: | ---: |
| a | 1 | 2 |
| b | 3 | 4 |
| b | 5 | 6 |
"""


def test_shown_table_copies_the_cells_of_the_named_lines(tmp_path):
    (tmp_path / "long.md").write_text(_LONG, "utf-8")
    table = "| name | two |\n| --- | --- |\n| {} | ? |"
    text = "x\n<!-- shown: long | B{} -->\n\n" + table + "\n\n<!-- end -->\ny"
    assert "\n| a | 2 |\n\n<!-- end -->\ny" in refresh_tables(text.format(" | 1", "a"), tmp_path)
    assert "| a | 2 |\n| b | 4 |\n| b | 6 |" in refresh_tables(text.format("", "a"), tmp_path)
    for name in ("b", "c"):
        with pytest.raises(ValueError, match=f"expected one line {name}"):
            refresh_tables(text.format(" | 1", name), tmp_path)
    with pytest.raises(ValueError, match="expected columns"):
        refresh_tables(text.format(" | 1", "a").replace("two", "three"), tmp_path)


@pytest.mark.parametrize("name", evaluations.COMPARISONS)
def test_evaluation_experiment_has_every_answer_with_its_tasks_score(name):
    found = evaluations.load_comparisons()[name]
    answers = read_rows(found.folder / "samples.jsonl")
    methods = evaluations.COMPARISONS[name].methods
    assert len(answers) == found.run["samples"] * len(methods)
    assert {row["status"] for row in answers} == {"ok"}
    for method in {row["method"] for row in found.rows}:
        rows = [row for row in found.rows if row["method"] == method]
        scores = [row["score"] for row in answers if row["method"] == method]
        total = sum(row["score"] * row["samples"] for row in rows)
        assert total == pytest.approx(sum(scores))
