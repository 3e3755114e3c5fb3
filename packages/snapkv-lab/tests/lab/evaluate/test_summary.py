"""Rows and tables, worked by hand."""

import pytest

from snapkv_lab.evaluate.summary import axis_values, score_lines, shown_interval, summarise
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
