"""The relative difference to the full cache, by hand."""

import io
import re
from pathlib import Path
from statistics import fmean

import pytest
from rich.console import Console

from snapkv_lab.cli.tables import results_table
from snapkv_lab.evaluate.intervals import (
    Difference,
    cell_differences,
    line_differences,
    relative_differences,
)
from snapkv_lab.evaluate.runner import Results
from snapkv_lab.evaluate.summary import score_lines
from snapkv_lab.evaluate.tasks import RagCitation


def row(method, cell, score, *, question="visible", policy=None):
    policy = {"name": policy or ("full" if method == "full" else "snapkv")}
    return {
        "method": method,
        "question": question,
        "cell": {"documents": cell},
        "score": score,
        "scores": {} if score is None else {f"{cell}/0": score},
        "policy": policy,
        "status": "ok",
        "held_bytes": 1024,
        "token_ms": 2.0,
    }


def printed(rows):
    console = Console(file=io.StringIO(), width=160)
    run = {"model": {"name": "demo"}}
    console.print(results_table(Results(folder=Path(), run=run, task=RagCitation(), rows=rows)))
    return console.file.getvalue()


def test_means_over_the_same_cells_are_compared():
    rows = [
        row("full", 10, 0.8),
        row("full", 20, 0.4),
        row("full", 30, None),
        row("snapkv@64", 10, 0.5),
        row("snapkv@64", 20, 0.4),
        row("snapkv@64", 30, 1.0),
        row("snapkv@128", 10, None),
        row("snapkv@128", 20, 0.5),
    ]
    assert relative_differences(rows) == {
        ("snapkv@64", "visible"): pytest.approx(0.45 / 0.6 - 1),
        ("snapkv@128", "visible"): pytest.approx(0.5 / 0.4 - 1),
    }


@pytest.mark.parametrize(
    "rows",
    [
        [row("snapkv@64", 10, 0.4)],
        [row("full", 10, 0.0), row("snapkv@64", 10, 0.4)],
        [row("full", 10, 0.5), row("snapkv@64", 20, 0.4)],
    ],
    ids=["no full cache", "it scores 0", "no cell in common"],
)
def test_without_something_to_compare_with_there_is_no_difference(rows):
    assert relative_differences(rows) == {}


def several(method, cell, scores, **given):
    named = {f"{cell}/{number}": score for number, score in enumerate(scores)}
    mean = sum(scores) / len(scores)
    return row(method, cell, mean, **given) | {"scores": named}


def test_a_difference_is_paired_sample_by_sample():
    """Both score one half, of other samples or of the same ones."""
    full = several("full", 10, (1.0, 0.0, 1.0, 0.0))
    same, other = several("h2o", 10, (1.0, 0.0, 1.0, 0.0)), several("tova", 10, (0.0, 1.0) * 2)
    found = line_differences([full, same, other], "documents")
    assert found["h2o", "visible"] == Difference(mean=0.0, interval=(0.0, 0.0), samples=4)
    assert found["tova", "visible"] == Difference(mean=0.0, interval=(-1.0, 1.0), samples=4)
    assert not any(difference.is_seen for difference in found.values())
    assert ("full", "visible") not in found


def test_a_lines_difference_is_the_mean_of_its_columns():
    rows = [
        several("full", 10, (1.0,) * 4), several("full", 20, (1.0,) * 2), row("full", 30, None),
        several("h2o", 10, (0.0,) * 4), several("h2o", 20, (0.5,) * 2), several("h2o", 30, (1.0,)),
    ]  # fmt: skip
    (found,) = line_differences(rows, "documents").values()
    assert found == Difference(mean=-0.75, interval=(-0.75, -0.75), samples=6)
    assert found.is_seen
    assert Difference.read(found.describe()) == found


def test_the_difference_of_turns_is_drawn_by_conversations():
    """Two conversations of four turns: one is lost in all of them, the other in none."""
    spoken = [{f"a/{turn}": "a", f"b/{turn}": "b"} for turn in range(1, 5)]
    rows = []
    for method, scores in (("full", (1.0, 1.0)), ("snapkv@64", (0.0, 1.0))):
        for turn, names in enumerate(spoken, 1):
            made = row(method, turn, fmean(scores)) | {"conversations": names}
            rows.append(made | {"scores": dict(zip(names, scores, strict=True))})
    (found,) = line_differences(rows, "documents").values()
    assert (found.mean, found.interval, found.samples) == (-0.5, (-1.0, 0.0), 8)
    assert score_lines(rows, "documents")[1].interval == (0.0, 1.0)


@pytest.mark.parametrize(
    ("interval", "is_seen"),
    [((-0.2, -0.1), True), (None, False), ((0.0, 0.1), False),],
)  # fmt: skip
def test_a_difference_is_seen_where_its_interval_leaves_out_zero(interval, is_seen):
    assert Difference(mean=0.0, interval=interval, samples=3).is_seen == is_seen


def test_a_full_cache_that_is_filled_otherwise_is_compared_like_any_method():
    full, selective = several("full", 10, (1.0, 1.0)), several("full selective", 10, (0.5, 0.5))
    selective["policy"] = {"name": "full", "prefill": {"name": "selective"}}
    assert cell_differences([full, selective]) == [
        None, Difference(mean=-0.5, interval=(-0.5, -0.5), samples=2),
    ]  # fmt: skip
    assert relative_differences([full, selective]) == {("full selective", "visible"): -0.5}


def test_the_table_says_where_no_difference_is_seen():
    table = printed(
        [several("full", 10, (1.0, 0.0) * 4), several("h2o", 10, (1.0,) * 8),
         several("tova", 10, (0.0, 1.0) * 4)],
    )  # fmt: skip
    (h2o,) = [line for line in table.splitlines() if "h2o" in line]
    (tova,) = [line for line in table.splitlines() if "tova" in line]
    assert "no difference seen" not in h2o
    assert re.search(r"\+50\.0 \(\d+\.\d to \d+\.\d\)", h2o)
    assert re.search(r"\+0\.0 \(-\d+\.\d to \d+\.\d\), no difference seen", tova)
