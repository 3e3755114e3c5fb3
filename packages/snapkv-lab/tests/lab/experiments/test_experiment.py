"""The one way to run an experiment: what is measured, stored and drawn for which command line."""

import pytest

from snapkv_lab.experiments import experiment
from snapkv_lab.experiments.experiment import Experiment, pivot, table
from snapkv_lab.experiments.records import read_rows

ABOUT = {
    "model": {"name": "m", "dtype": "float32", "attn_implementation": "sdpa", "device": "cpu"},
    "environment": {
        "processor": "p", "threads": 1, "torch": "t", "transformers": "v", "commit": "c",
    },
}  # fmt: skip


@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "RESULTS", tmp_path)
    monkeypatch.setattr(experiment, "TABLES", tmp_path / "tables")
    asked = []

    def measure(given):
        asked.append((list(given.parts), given.small, dict(given.options)))
        for part in given.parts:
            yield {"part": part, "value": len(asked), **ABOUT}

    return asked, Experiment(
        name="toy",
        title="A toy",
        measure=measure,
        parts=("one", "two"),
        small=True,
        options={"tokens": 5, "budgets": (1, 2)},
        tables=lambda rows: [table(rows, {"part": "{part}", "value": "{value:.1f}"})],
    )


def test_all_parts_are_measured_stored_and_drawn(toy):
    asked, own = toy
    own.main([])
    assert asked == [(["one", "two"], False, {"tokens": 5, "budgets": (1, 2)})]
    assert [row["part"] for row in read_rows(own.rows)] == ["one", "two"]
    page = own.page.read_text("utf-8")
    assert page.startswith("# A toy\n\nMade by `python -m snapkv_lab.experiments.toy`. Measured on")
    assert page.endswith("| part | value |\n| --- | ---: |\n| one | 1.0 |\n| two | 1.0 |\n")


@pytest.mark.parametrize("arguments", [["one"], ["--only", "one"], ["--part", "one"]])
def test_rows_of_one_part_take_the_place_of_its_old_ones(toy, arguments):
    asked, own = toy
    own.main([])
    own.main([*arguments, "--tokens", "7", "--budgets", "3", "4"])
    assert asked[1] == (["one"], False, {"tokens": 7, "budgets": [3, 4]})
    assert [(row["part"], row["value"]) for row in read_rows(own.rows)] == [("one", 2), ("two", 1)]


def test_nothing_is_stored_of_a_small_form_and_nothing_measured_to_render(toy, capsys):
    asked, own = toy
    own.main(["--small", "two"])
    assert '"part": "two"' in capsys.readouterr().out
    assert not own.rows.exists()
    own.main([])
    own.page.unlink()
    own.main(["--render"])
    assert (len(asked), own.page.exists()) == (2, True)


def test_a_part_that_is_not_there_is_refused(toy, capsys):
    with pytest.raises(SystemExit):
        toy[1].main(["three"])
    assert "expected parts of one, two, got three" in capsys.readouterr().err


def test_cells_are_patterns_or_functions_of_a_row():
    spread = {"p20": 1.0, "p50": 2.0, "p80": 3.5}
    rows = [{"ms": spread, "held": 2**20, "none": None}]
    columns = {
        "s": "{ms[p50]:seconds|.3f}", "spread": "{ms:spread|.1f}", "held": "{held:bytes}",
        "none": "{none:.2f}", "own": lambda row: str(len(row)),
    }  # fmt: skip
    assert table(rows, columns).splitlines()[-1] == (
        "| 0.002 | 2.0 (1.0 to 3.5) | 1.0 MiB |  | 3 |"
    )


def test_a_place_without_a_row_is_a_dash():
    rows = [{"a": 1, "b": 2, "c": 3}, {"a": 2, "b": 4, "c": 5}]
    lines = pivot(rows, "a", "{a}", "b {b}", "{c}").splitlines()
    assert lines == ["| a | b 2 | b 4 |", "| --- | ---: | ---: |", "| 1 | 3 | - |", "| 2 | - | 5 |"]
