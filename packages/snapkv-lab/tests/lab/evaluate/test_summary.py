"""Rows, lines and their intervals, compared with results by hand and by plain loops."""

from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapkv_lab.evaluate.intervals import (
    cell_differences,
    excludes_zero,
    line_differences,
    mean_interval,
    relative_differences,
)
from snapkv_lab.evaluate.summary import axis_values, score_lines, summarise
from tests.lab.evaluate.tiny import Keys
from tests.lab.report.runs import answered


def record(sample, method, score, *, status="ok", cell=None, **numbers):
    made = {
        "sample": sample,
        "method": method,
        "question": "visible",
        "cell": cell or {"length": 1},
        "policy": {"name": method},
        "status": status,
    }
    known = {"prompt_tokens": 10, "kept_tokens": 5, "held_bytes": 100, "full_bytes": 400}
    timed = {"token_ms": 1.0, "first_token_ms": 9.0} | numbers
    return made | ({"score": score} | known | timed if status == "ok" else {})


def rows_of(records):
    keys = [(r["sample"], r["method"], r["question"]) for r in records]
    return summarise(records, keys, Keys())


def test_row_has_means_of_scores_and_medians_of_times():
    (row,) = rows_of(
        [
            record("a", "full", 1.0, token_ms=1.0, first_token_ms=10.0, held_bytes=100),
            record("b", "full", 0.0, token_ms=2.0, first_token_ms=20.0, held_bytes=200)
            | {"kept_tokens": 10},
            record("c", "full", 0.5, token_ms=9.0, first_token_ms=90.0, held_bytes=600)
            | {"kept_tokens": 0},
        ]
    )
    assert row == {
        "task": "keys",
        "metric": "accuracy",
        "method": "full",
        "question": "visible",
        "cell": {"length": 1},
        "policy": {"name": "full"},
        "status": "ok",
        "samples": 3,
        "compressed": 2,
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


def test_missing_answers_are_counted_and_are_in_no_mean():
    records = [
        record("a", "full", None, status="out of memory"),
        record("b", "full", 0.4, token_ms=None),
        record("c", "full", None, status="too long"),
        record("d", "full", None, status="out of memory"),
    ]
    (row,) = rows_of(records)
    assert (row["status"], row["samples"], row["score"]) == ("ok", 1, 0.4)
    assert row["failed"] == {"out of memory": 2, "too long": 1}
    assert (row["token_ms"], row["scores"], row["interval"]) == (None, {"b": 0.4}, None)
    (row,) = rows_of(records[2:])
    assert (row["status"], row["samples"], row["score"]) == ("too long", 0, None)


def test_score_of_a_line_is_the_mean_of_its_column_means():
    cells = [
        ("full", 1, 0, 1.0), ("full", 1, 50, 0.5), ("full", 2, 0, 0.0),
        ("snapkv", 1, 0, 0.2), ("snapkv", 1, 50, None), ("snapkv", 2, 0, None),
    ]  # fmt: skip
    rows = rows_of(
        [
            record(
                f"{length}/{depth}",
                method,
                score,
                status="ok" if score is not None else "out of memory",
                cell={"length": length, "depth": depth},
            )
            for method, length, depth, score in cells
        ]
    )
    full, snapkv = score_lines(rows, "length")
    assert axis_values(rows, "length") == [1, 2]
    assert full.scores == {1: 0.75, 2: 0.0}
    assert full.mean == pytest.approx(0.375)  # of the columns, not of the three cells
    assert (snapkv.scores, snapkv.mean, snapkv.reasons) == ({1: 0.2}, 0.2, {2: "out of memory"})
    assert (snapkv.held_bytes, snapkv.token_ms) == (100, 1.0)


def test_losses_have_their_own_fields_in_rows_and_lines():
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
    rows = rows_of(records)
    found = {(row["method"], row["cell"]["length"]): row for row in rows}
    assert [found[place]["loss"] for place in found] == [1.75, 2.5, 2.5, 3.5]
    assert found["full", 1]["loss_interval"] == [1.5, 2.0]
    assert (found["h2o", 2]["losses"], found["h2o", 2]["loss_interval"]) == ({"d": 3.5}, None)
    assert found["full", 1]["loss_difference"] is None
    worse = {"loss": 0.75, "interval": [0.5, 1.0], "samples": 2}
    assert found["h2o", 1]["loss_difference"] == worse
    one = {"loss": -0.5, "interval": None, "samples": 1}
    assert found["h2o", 2]["loss_difference"] == one
    assert found["h2o", 1]["difference"]["score"] == 0  # scores are compared by themselves
    full, h2o = score_lines(rows, "length")
    assert (full.loss, h2o.loss) == (pytest.approx(2.125), 3.0)  # of the columns
    assert (full.loss_interval, h2o.loss_interval) == ((1.25, 3.0), None)


# Differences from the full cache.


def row(method, documents, scores):
    return answered(method, {"documents": documents}, scores)


def difference(mean, interval, samples):
    return {"score": mean, "interval": interval, "samples": samples}


def test_relative_differences_compare_means_over_the_same_cells():
    full = [row("full", 10, [0.8]), row("full", 20, [0.4]), row("full", 30, [])]
    small = [row("a", 10, [0.5]), row("a", 20, [0.4]), row("a", 30, [1.0])]
    large = [row("b", 10, []), row("b", 20, [0.5])]
    assert relative_differences([*full, *small, *large]) == {
        ("a", "visible"): pytest.approx(0.45 / 0.6 - 1),
        ("b", "visible"): pytest.approx(0.5 / 0.4 - 1),
    }
    for rows in (small, [row("full", 10, [0.0]), small[0]], [full[0], small[1]]):
        assert relative_differences(rows) == {}, "no full cache, it scores 0, no cell in common"


def test_a_difference_is_paired_sample_by_sample():
    """Both methods score one half, on different samples or on the same ones."""
    full = row("full", 10, (1.0, 0.0, 1.0, 0.0))
    same, other = row("h2o", 10, (1.0, 0.0, 1.0, 0.0)), row("tova", 10, (0.0, 1.0) * 2)
    found = line_differences([full, same, other], "documents")
    assert found == {
        ("h2o", "visible"): difference(0.0, [0.0, 0.0], 4),
        ("tova", "visible"): difference(0.0, [-1.0, 1.0], 4),
    }
    assert not any(map(excludes_zero, found.values()))
    *_, last = full["scores"]
    full["scores"] = {last: full["scores"][last]}
    found = line_differences([full, other], "documents")
    assert found == {("tova", "visible"): difference(1.0, None, 1)}


def test_quantized_full_cache_is_compared_with_the_full_cache():
    full, quantized = row("full", 10, (1.0, 1.0)), row("full int8", 10, (1.0, 0.0))
    quantized["policy"] = {"name": "full", "bits": {"keys": 8, "values": 8}}
    for rows in ([full, quantized], [quantized, full]):
        found = line_differences(rows, "documents")
        assert list(found) == [("full int8", "visible")]
        assert found["full int8", "visible"]["score"] == -0.5


def test_a_lines_difference_is_the_mean_of_its_columns():
    rows = [
        row("full", 10, (1.0,) * 4), row("full", 20, (1.0,) * 2), row("full", 30, ()),
        row("h2o", 10, (0.0,) * 4), row("h2o", 20, (0.5,) * 2), row("h2o", 30, (1.0,)),
    ]  # fmt: skip
    (found,) = line_differences(rows, "documents").values()
    assert found == difference(-0.75, [-0.75, -0.75], 6)
    assert excludes_zero(found)
    assert not excludes_zero(difference(1.0, None, 1))


def test_the_difference_of_turns_is_drawn_by_conversations():
    """Of two conversations with four turns, one is wrong in all turns and the other in none."""
    rows = [
        (own := row(method, turn, scores))
        | {"conversations": dict(zip(own["scores"], "ab", strict=True))}
        for method, scores in (("full", (1.0, 1.0)), ("snapkv@64", (0.0, 1.0)))
        for turn in range(1, 5)
    ]
    (found,) = line_differences(rows, "documents").values()
    assert found == difference(-0.5, [-1.0, 0.0], 8)
    assert score_lines(rows, "documents")[1].interval == (0.0, 1.0)


def test_full_cache_with_another_prefill_is_compared_like_any_method():
    in_pieces = {"name": "full", "prefill": {"name": "layer-by-layer"}}
    other = row("full in pieces", 10, (0.5, 0.5)) | {"policy": in_pieces}
    rows = [row("full", 10, (1.0, 1.0)), other]
    assert cell_differences(rows) == [None, difference(-0.5, [-0.5, -0.5], 2)]
    assert relative_differences(rows) == {("full in pieces", "visible"): -0.5}


# Intervals.


def interval(columns, conversations=None):
    of_cells = conversations or [[None] * len(cells) for cells in columns]
    return mean_interval(
        [list(zip(*column, strict=True)) for column in zip(columns, of_cells, strict=True)]
    )


def by_loops(columns):
    """Compute an interval with one draw after the other."""
    drawn = []
    for cells in columns:
        if any(len(cell) == 1 for cell in cells):
            cells = [[fmean(cell) for cell in cells]]
        drawn.append(cells)
    if not drawn or any(len(cell) < 2 for cells in drawn for cell in cells):
        return None
    draws = np.random.RandomState(0)
    indices = [[draws.randint(len(c), size=(2000, len(c))) for c in cells] for cells in drawn]
    means = sorted(
        fmean(
            fmean(
                fmean(cell[place] for place in places[number])
                for cell, places in zip(cells, of_cells, strict=True)
            )
            for cells, of_cells in zip(drawn, indices, strict=True)
        )
        for number in range(2000)
    )
    return means[50], means[-51]


scores = st.sampled_from((0.0, 0.2, 1 / 3, 0.5, 1.0))


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(st.lists(scores, min_size=1, max_size=4), min_size=1, max_size=3), max_size=3)
)
def test_interval_equals_the_one_from_plain_loops(columns):
    expected, found = by_loops(columns), interval(columns)
    assert found == (expected and pytest.approx(expected, abs=1e-9))


def test_interval_equals_the_one_by_hand_and_cancelled_differences_are_zero():
    # Of 256 draws 81 have no right answer, which is more than 2.5 %. One has four right ones
    # (0.4 %) and 12 three (4.7 %): without the highest 2.5 % three of four are left.
    assert interval([[[0.0, 0.0, 0.0, 1.0]]]) == (0.0, 0.75)
    # Zero, and not what is left of 0.1 + 0.2 - 0.3.
    assert interval([[[0.1, 0.1]], [[0.2, 0.2]], [[-0.3, -0.3]]]) == (0.0, 0.0)


def test_turns_of_a_conversation_are_drawn_together():
    """One of two conversations is right in both turns, so a draw has it 0, 1 or 2 times.

    A draw with neither right turn has a chance of 1/4. If turns were drawn separately, it would be
    1/16.
    """
    turn, of_turn = [0.0, 1.0], ("a", "b")
    four = [[turn]] * 4
    assert interval([[turn]]) == interval(four, [[of_turn]] * 4) == (0.0, 1.0)
    low, high = interval(four)
    assert 0.0 < low < high < 1.0
    # What one turn wins the other loses: every draw has the same mean.
    assert interval([[turn], [[1.0, 0.0]]], [[of_turn]] * 2) == (0.5, 0.5)
    # Turns of other conversations are drawn apart, and so is a cell that lacks one of them.
    one, other = [0.0, 0.0, 1.0, 1.0], [1.0, 0.0, 1.0]
    names = ("a", "b", "c", "d")
    assert interval([[one], [other]], [[names], [names[:3]]]) == interval([[one], [other]])
    assert interval([[one], [one]], [[names], [("e", "f", "g", "h")]]) == interval([[one]] * 2)
