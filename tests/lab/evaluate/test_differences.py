"""The relative difference to the full cache, by hand."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from snapkv.cli.tables import results_table
from snapkv.lab.evaluate.differences import relative_differences
from snapkv.lab.evaluate.runner import Results
from snapkv.lab.evaluate.tasks import RagCitation


def row(method, cell, score, *, question="visible", policy=None):
    policy = {"name": policy or ("full" if method == "full" else "snapkv")}
    return {
        "method": method,
        "question": question,
        "cell": {"documents": cell},
        "score": score,
        "policy": policy,
        "status": "ok",
        "held_bytes": 1024,
        "token_ms": 2.0,
    }


def printed(rows):
    console = Console(file=io.StringIO(), width=120)
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


def test_visible_and_hidden_are_compared_apart_and_by_the_policy_not_its_label():
    rows = [
        row("everything", 10, 0.8, policy="full"),
        row("everything", 10, 0.4, question="hidden", policy="full"),
        row("snapkv@64", 10, 0.4),
        row("snapkv@64", 10, 0.4, question="hidden"),
    ]
    assert relative_differences(rows) == {
        ("snapkv@64", "visible"): pytest.approx(-0.5),
        ("snapkv@64", "hidden"): pytest.approx(0.0),
    }


@pytest.mark.parametrize(
    "rows",
    [
        [row("snapkv@64", 10, 0.4)],
        [row("full", 10, 0.0), row("snapkv@64", 10, 0.4)],
        [row("full", 10, 0.5), row("snapkv@64", 20, 0.4)],
        [row("full", 10, 0.5)],
    ],
    ids=["no full cache", "it scores 0", "no cell in common", "nothing else"],
)
def test_without_something_to_compare_with_there_is_no_difference(rows):
    assert relative_differences(rows) == {}


def test_the_table_shows_the_difference_where_there_is_one():
    table = printed([row("full", 10, 0.8), row("snapkv@64", 10, 0.79), row("other", 20, 0.5)])
    cells = [[cell.strip() for cell in line.split("│")] for line in table.splitlines()]
    shown = {line[1]: line[6] for line in cells if len(line) > 6}
    assert "vs full" in table
    assert shown == {"full": "-", "snapkv@64": "-1.2 %", "other": "-"}
    assert "vs full" not in printed([row("snapkv@64", 10, 0.79)])
