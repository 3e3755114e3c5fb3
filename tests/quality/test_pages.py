"""Every number of a results page comes from a committed row."""

import pytest
from benchmarks import quality, readme, speed
from benchmarks.records import read_rows


@pytest.mark.parametrize("benchmark", [quality, speed], ids=["quality", "speed"])
def test_the_page_is_what_its_rows_render_to(benchmark):
    assert benchmark.PAGE.read_text("utf-8") == benchmark.render(read_rows(benchmark.ROWS))


@pytest.mark.parametrize("benchmark", [quality, speed], ids=["quality", "speed"])
def test_every_row_says_where_it_was_measured(benchmark):
    for row in read_rows(benchmark.ROWS):
        assert row["model"]["name"]
        assert {"commit", "torch", "transformers", "threads"} <= row["environment"].keys()


def test_the_readmes_table_is_what_the_rows_render_to():
    page = readme.README.read_text("utf-8")
    assert page == readme.rendered(page)
    assert "| full cache |" in page
