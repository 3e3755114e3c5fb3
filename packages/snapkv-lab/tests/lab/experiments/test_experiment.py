"""The one way to run an experiment, and every experiment in its small form."""

from dataclasses import replace

import pytest

from snapkv_lab.experiments import experiment
from snapkv_lab.experiments.experiment import Experiment, Size, load_experiments
from snapkv_lab.experiments.pages import Listing
from snapkv_lab.report.tables import Pivot, render_rows
from snapkv_lab.rows import read_rows

EXPERIMENTS = load_experiments()
ABOUT = {
    "model": {"name": "m", "dtype": "float32", "attn_implementation": "sdpa", "device": "cpu"},
    "environment": {
        "processor": "p", "threads": 1, "torch": "t", "transformers": "v", "commit": "c",
    },
}  # fmt: skip


@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "RESULTS", tmp_path)
    asked = []

    def measured(name):
        def measure(context):
            asked.append((name, context.small, context.tokens, context.budgets))
            yield {"value": len(asked)}

        return measure

    return asked, Experiment(
        name="toy",
        title="A toy",
        measure={name: measured(name) for name in ("one", "two")},
        options={"tokens": Size(5, 3), "budgets": (1, 2)},
        fields={"seed": 1},
        describe=lambda context: ABOUT,
        tables=[Listing({"part": "{part}", "value": "{value:.1f}"})],
    )


def test_all_parts_are_measured_stored_and_drawn(toy):
    asked, own = toy
    own.main([])
    assert asked == [("one", False, 5, (1, 2)), ("two", False, 5, (1, 2))]
    assert [(row["part"], row["seed"]) for row in read_rows(own.rows)] == [("one", 1), ("two", 1)]
    page = own.page.read_text("utf-8")
    assert page.startswith("# A toy\n\nMade by `python -m snapkv_lab.experiments toy`. Measured on")
    assert page.endswith("| part | value |\n| --- | ---: |\n| one | 1.0 |\n| two | 2.0 |\n")


def test_new_rows_of_a_part_replace_its_old_rows(toy):
    asked, own = toy
    own.main([])
    own.main(["--part", "one", "--tokens", "7", "--budgets", "3", "4"])
    assert asked[2] == ("one", False, 7, [3, 4])
    assert [(row["part"], row["value"]) for row in read_rows(own.rows)] == [("one", 3), ("two", 2)]


def test_rows_loaded_from_other_files_are_not_stored_again(toy):
    """`evaluation` is such an experiment: its answers are in folders of their own."""
    asked, own = toy
    elsewhere = replace(own, load=lambda: {"a": "summary"}, tables=None)
    elsewhere.main([])
    assert len(asked) == 2
    assert not elsewhere.rows.exists()


def test_small_runs_store_nothing_and_rendering_measures_nothing(toy, capsys):
    asked, own = toy
    own.main(["--small", "--part", "two"])
    assert asked == [("two", True, 3, (1, 2))]
    own.main(["--model", "another"])
    assert '"part": "two"' in capsys.readouterr().out
    assert not own.rows.exists()
    own.main([])
    own.page.unlink()
    own.main(["--render"])
    assert (len(asked), own.page.exists()) == (5, True)


def test_cells_are_patterns_or_functions_of_a_row():
    spread = {"p20": 1.0, "p50": 2.0, "p80": 3.5}
    rows = [{"ms": spread, "held": 2**20, "none": None}]
    columns = {
        "s": "{ms[p50]:seconds|.3f}", "spread": "{ms:spread|.1f}", "held": "{held:bytes}",
        "none": "{none:.2f}", "own": lambda row: str(len(row)),
    }  # fmt: skip
    assert render_rows(rows, columns).splitlines()[-1] == (
        "| 0.002 | 2.0 (1.0 to 3.5) | 1.0 MiB |  | 3 |"
    )


def test_pivot_cell_without_a_row_shows_a_dash():
    rows = [{"a": 1, "b": 2, "c": 3}, {"a": 2, "b": 4, "c": 5}]
    lines = render_rows(rows, Pivot("a", "{a}", "b {b}", "{c}")).splitlines()
    assert lines == ["| a | b 2 | b 4 |", "| --- | ---: | ---: |", "| 1 | 3 | - |", "| 2 | - | 5 |"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_help_of_every_experiment_has_its_title(name, capsys):
    with pytest.raises(SystemExit) as ended:
        EXPERIMENTS[name].main(["--help"])
    assert ended.value.code == 0
    assert EXPERIMENTS[name].title in " ".join(capsys.readouterr().out.split())


CHEAP = ["by_default", "recall", "speed"]
SLOW = ["library", "long_answers", "methods"]


@pytest.mark.parametrize(
    "name",
    [
        *CHEAP,
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
        pytest.param("kvpress", marks=pytest.mark.kvpress),
    ],
)
def test_rows_of_a_small_form_have_the_columns_of_the_stored_ones(name, saved):
    own = EXPERIMENTS[name]
    rows = list(own.measure_rows(own.context(small=True, model=saved)))
    there = {frozenset(row) for row in own.results()}
    assert rows
    assert {frozenset(row) for row in rows} <= there
    if name != "methods":
        assert own.render(rows).count("\n| ") > 2
