"""Rows and tables, worked by hand."""

import pytest

from snapkv_lab.evaluate.summary import (
    IN_PERCENT,
    axis_values,
    score_lines,
    shown_interval,
    summarise,
)
from tests.lab.evaluate.tiny import Keys


def record(sample, method, score, *, status="ok", cell=None, question="visible", **numbers):
    made = {
        "sample": sample,
        "method": method,
        "question": question,
        "cell": cell or {"length": 1},
        "policy": {"name": method},
        "status": status,
    }
    known = {"prompt_tokens": 10, "kept_tokens": 5, "held_bytes": 100, "full_bytes": 400} | numbers
    timed = {"token_ms": 1.0, "first_token_ms": 9.0} | numbers
    return made | ({"score": score} | known | timed if status == "ok" else {})


def keys(records):
    return [(r["sample"], r["method"], r["question"]) for r in records]


def test_a_row_is_means_of_scores_and_medians_of_times():
    records = [
        record("a", "full", 1.0, token_ms=1.0, first_token_ms=10.0, held_bytes=100),
        record("b", "full", 0.0, token_ms=2.0, first_token_ms=20.0, held_bytes=200),
        record("c", "full", 0.5, token_ms=9.0, first_token_ms=90.0, held_bytes=600),
    ]
    (row,) = summarise(records, keys(records), Keys())
    assert row == {
        "task": "keys",
        "metric": "accuracy",
        "method": "full",
        "question": "visible",
        "cell": {"length": 1},
        "policy": {"name": "full"},
        "status": "ok",
        "samples": 3,
        "compressed": 3,
        "failed": {},
        "score": 0.5,
        "interval": [0.0, 1.0],
        "difference": None,
        "prompt_tokens": 10,
        "kept_tokens": 5,
        "held_bytes": 300,
        "full_bytes": 400,
        "token_ms": 2.0,
        "first_token_ms": 20.0,
        "scores": {"a": 1.0, "b": 0.0, "c": 0.5},
    }


def test_what_has_no_answer_is_counted_and_in_no_mean():
    records = [
        record("a", "full", None, status="out of memory"),
        record("b", "full", 0.4, token_ms=None),
        record("c", "full", None, status="too long"),
        record("d", "full", None, status="out of memory"),
    ]
    (row,) = summarise(records, keys(records), Keys())
    assert row["status"] == "ok"
    assert row["samples"] == 1
    assert row["failed"] == {"out of memory": 2, "too long": 1}
    assert row["score"] == 0.4
    assert row["token_ms"] is None
    assert row["scores"] == {"b": 0.4}
    assert (row["interval"], shown_interval(row["interval"])) == (None, "one sample")
    (row,) = summarise(records, keys(records[2:]), Keys())
    assert (row["status"], row["samples"], row["score"]) == ("too long", 0, None)


def test_rows_come_as_they_are_asked_for_and_only_those():
    records = [
        record("b", "snapkv", 0.0),
        record("a", "full", 1.0),
        record("a", "snapkv", 1.0),
        record("b", "full", 0.0),
        record("a", "h2o", 0.25),
    ]
    wanted = [(s, m, "visible") for s in "ab" for m in ("full", "snapkv")]
    rows = summarise(records, [*wanted, ("z", "full", "visible")], Keys())
    assert [(row["method"], row["score"]) for row in rows] == [("full", 0.5), ("snapkv", 0.5)]


def test_settings_and_cells_are_rows_of_their_own():
    records = [
        record("a", "full", 1.0, question=question, cell={"length": length})
        for length in (1, 2)
        for question in ("visible", "hidden")
    ]
    for number, one in enumerate(records):
        one["sample"] = str(number)
    rows = summarise(records, keys(records), Keys())
    assert [(r["question"], r["cell"]["length"]) for r in rows] == [
        ("visible", 1), ("hidden", 1), ("visible", 2), ("hidden", 2),
    ]  # fmt: skip


def test_a_line_is_the_mean_of_its_columns_means():
    cells = [
        ("full", 1, 0, 1.0), ("full", 1, 50, 0.5), ("full", 2, 0, 0.0),
        ("snapkv", 1, 0, 0.2), ("snapkv", 1, 50, None), ("snapkv", 2, 0, None),
    ]  # fmt: skip
    records = [
        record(
            f"{length}/{depth}",
            method,
            score,
            status="ok" if score is not None else "out of memory",
            cell={"length": length, "depth": depth},
        )
        for method, length, depth, score in cells
    ]
    rows = summarise(records, keys(records), Keys())
    full, snapkv = score_lines(rows, "length")
    assert axis_values(rows, "length") == [1, 2]
    assert full.scores == {1: 0.75, 2: 0.0}
    assert full.mean == pytest.approx(0.375)  # of the columns, not of the three cells
    assert [full.shown(1), full.shown(2), full.shown(3)] == ["75.0", "0.0", ""]
    assert snapkv.scores == {1: 0.2}
    assert snapkv.shown(2) == "out of memory"
    assert snapkv.mean == 0.2
    assert (snapkv.held_bytes, snapkv.token_ms) == (100, 1.0)


def test_a_method_without_any_score_has_no_mean():
    records = [record("a", "full", None, status="too long")]
    (line,) = score_lines(summarise(records, keys(records), Keys()), "length")
    assert (line.mean, line.held_bytes, line.token_ms) == (None, None, None)
    assert (IN_PERCENT.text(line.mean), line.shown_interval) == ("-", "-")


def test_a_row_is_compared_with_the_full_caches_sample_by_sample():
    records = [record(name, "full", score) for name, score in zip("abc", (1, 1, 0), strict=True)]
    records += [record("a", "h2o", 0.0), record("b", "h2o", 1.0), record("d", "h2o", 1.0)]
    full, h2o = summarise(records, keys(records), Keys())
    assert full["difference"] is None
    assert h2o["difference"] == {"score": -0.5, "interval": [-1.0, 0.0], "samples": 2}


def test_losses_are_rows_and_lines_of_their_own():
    """a and b are compared; c has no loss, and z no answer. By hand: 3 - 2 and 2 - 1.5."""
    losses = {
        "full": {("a", 1): 2.0, ("b", 1): 1.5, ("c", 2): 1.0, ("d", 2): 4.0},
        "h2o": {("a", 1): 3.0, ("b", 1): 2.0, ("c", 2): None, ("d", 2): 3.5},
    }
    records = [
        record(name, method, 0.0, cell={"length": length}) | {"loss": loss}
        for method, of_method in losses.items()
        for (name, length), loss in of_method.items()
    ]
    records.append(record("z", "h2o", None, status="out of memory", cell={"length": 1}))
    rows = summarise(records, keys(records), Keys())
    found = {(row["method"], row["cell"]["length"]): row for row in rows}
    assert [found[place]["loss"] for place in found] == [1.75, 2.5, 2.5, 3.5]
    assert found["full", 1]["loss_interval"] == [1.5, 2.0]
    assert found["h2o", 2]["losses"] == {"d": 3.5}
    assert found["h2o", 2]["loss_interval"] is None
    assert found["full", 1]["loss_difference"] is None
    worse = {"loss": 0.75, "interval": [0.5, 1.0], "samples": 2}
    assert found["h2o", 1]["loss_difference"] == worse
    one = {"loss": -0.5, "interval": None, "samples": 1}
    assert found["h2o", 2]["loss_difference"] == one
    assert found["h2o", 1]["difference"]["score"] == 0  # scores are compared by themselves
    full, h2o = score_lines(rows, "length")
    assert (full.loss, h2o.loss) == (pytest.approx(2.125), 3.0)  # of the columns
    assert full.loss_interval == (1.25, 3.0)
    assert h2o.loss_interval is None


def test_where_no_loss_was_taken_nothing_is_said_of_it():
    records = [record("a", "full", 1.0), record("a", "h2o", 0.0)]
    rows = summarise(records, keys(records), Keys())
    assert not any("loss" in name for row in rows for name in row)
    assert {line.loss for line in score_lines(rows, "length")} == {None}


def test_a_line_has_the_interval_of_its_mean_and_of_every_column():
    scores = {("a", 1): 0.0, ("b", 1): 1.0, ("a", 2): 1.0, ("b", 2): 1.0}
    records = [
        record(f"{name}{length}", "full", score, cell={"length": length})
        for (name, length), score in scores.items()
    ]
    (line,) = score_lines(summarise(records, keys(records), Keys()), "length")
    assert line.intervals == {1: (0.0, 1.0), 2: (1.0, 1.0)}
    assert (line.interval, line.shown_interval) == ((0.5, 1.0), "50.0 to 100.0")
    (line,) = score_lines(summarise(records, keys(records[:3]), Keys()), "length")
    assert line.intervals == {1: (0.0, 1.0), 2: None}
    assert (line.interval, line.shown_interval) == (None, "one sample")


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (None, "one sample"),
        ((0.5, 0.5), "no spread"),
        ((-0.125, 0.5), "-12.5 to 50.0"),
        ((-1e-9, 0.25), "0.0 to 25.0"),
    ],
)
def test_an_interval_as_text(interval, text):
    assert shown_interval(interval) == text
