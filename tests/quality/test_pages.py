"""Every number of a results page comes from a committed row."""

import pytest
from benchmarks import chunked, quality, ragged, readme, speed, studies
from benchmarks.records import read_rows

PAGES = {
    "quality": quality,
    "speed": speed,
    "ragged": ragged,
    "studies": studies,
    "chunked": chunked,
}


@pytest.mark.parametrize("benchmark", PAGES.values(), ids=PAGES)
def test_the_page_is_what_its_rows_render_to(benchmark):
    assert benchmark.PAGE.read_text("utf-8") == benchmark.render(read_rows(benchmark.ROWS))


@pytest.mark.parametrize("benchmark", PAGES.values(), ids=PAGES)
def test_every_row_says_where_it_was_measured(benchmark):
    for row in read_rows(benchmark.ROWS):
        assert row["model"]["name"]
        assert {"commit", "torch", "transformers", "threads"} <= row["environment"].keys()


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
