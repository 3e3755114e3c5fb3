"""`snapkv leaderboard` on a tiny model: one command, rows, a page, and again for nothing."""

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest

from snapkv import ByteBudget, KVCodes
from snapkv.policies import POLICIES, SnapKV
from snapkv_lab.cli.methods import contenders, contending
from snapkv_lab.report.leaderboard import FILES, as_markdown, as_page

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

SMALL = ("leaderboard", "--length", 320, "--limit", 1)
METHODS = ("--methods", "snapkv:window_size=16,h2o,kvzip:window_size=8")
RATIOS = ("--ratios", "0.5,4:1", "--hidden-ratios", "8:1")
PLACES = ["needle/visible", "needle/hidden", "instructions/visible", "instructions/hidden"]


def test_one_command_gives_rows_and_a_page(snapkv, tiny_only, here):
    done = snapkv(*SMALL, *METHODS, *RATIOS, "--results", "board")
    assert done.status == 0, done.err
    assert "leaderboard of tiny" in done.out
    assert "about 1 min or more: 72 answers to give\n" in done.err
    assert "page: board/leaderboard.html\n" in done.err
    assert {path.name for path in (here / "board").iterdir()} == {*FILES, "needle", "instructions"}
    for place in PLACES:
        answers = (here / "board" / place / "samples.jsonl").read_text().splitlines()
        samples, methods = (5 if "needle" in place else 3), (5 if "visible" in place else 4)
        assert len(answers) == samples * methods
    found = json.loads((here / "board" / "leaderboard.json").read_text())
    assert list(found["runs"]) == PLACES
    assert {(row["method"], row["share"], row["question"]) for row in found["rows"]} == {
        ("full", None, "visible"), ("full", None, "hidden"),
        ("snapkv:window_size=16@0.5", 0.5, "visible"), ("h2o@0.5", 0.5, "visible"),
        ("snapkv:window_size=16@0.25", 0.25, "visible"), ("h2o@0.25", 0.25, "visible"),
        ("snapkv:window_size=16@0.125", 0.125, "hidden"), ("h2o@0.125", 0.125, "hidden"),
        ("kvzip:window_size=8@0.125", 0.125, "hidden"),
    }  # fmt: skip
    left_out = "needle/visible leaves out kvzip:window_size=8: it chooses before"
    assert f"notice: {left_out}" in done.err
    assert "| needle/visible | kvzip:window_size=8: it chooses before" in as_markdown(found)
    assert (here / "board" / "leaderboard.md").read_text() == as_markdown(found)
    assert (here / "board" / "leaderboard.html").read_text() == as_page(found)


def test_a_stopped_run_goes_on_and_other_methods_may_be_added(snapkv, tiny_only, here):
    options = (*SMALL, "--tasks", "needle", "--setting", "visible", "--ratios", "0.5")
    whole = snapkv(*options, "--methods", "h2o,tova", "--results", "whole", "--json")
    assert snapkv(*options, "--methods", "h2o", "--results", "board").status == 0
    path = here / "board" / "needle" / "visible" / "samples.jsonl"
    path.write_bytes(path.read_bytes()[:-100])  # killed while it wrote; no page was made
    for name in FILES:
        (here / "board" / name).unlink()
    done = snapkv(*options, "--methods", "h2o,tova", "--results", "board", "--json")
    assert "6 answers to give, 9 are there" in done.err
    timed = ("token_ms", "first_token_ms")
    rows, expected = (
        [{k: v for k, v in row.items() if k not in timed} for row in json.loads(out)["rows"]]
        for out in (done.out, whole.out)
    )
    assert rows == expected


def test_without_names_every_method_that_has_a_budget_takes_part_also_a_new_one(monkeypatch):
    @dataclass(frozen=True)
    class New(SnapKV):
        name: ClassVar[str] = "new"

    monkeypatch.setitem(POLICIES, "new", New)
    found = contending([])
    assert found[0] == "default"
    assert set(POLICIES) - set(found) == {
        *("full", "fastgen", "prompt-then-decode", "duo-attention")
    }
    assert "new" in found


def test_contenders_get_the_budgets_of_their_shares(tiny):
    bits = None, KVCodes(8, 4)
    found = contenders(tiny, ["tova", "snapkv", "adakv"], (0.5, 1 / 16), 400.4, "hidden", bits)
    assert {m.label: (m.policy.describe().get("budget"), m.bits) for m in found.methods} == {
        "full": (None, None),
        "tova@0.5": (200, None),  # evicts while generating, so it gets tokens
        "tova@0.0625": (25, None),
        "snapkv@0.5": ({"bytes": {"share": 0.5, "bytes": None}}, None),
        "snapkv K8V4@0.5": ({"bytes": {"share": 0.5, "bytes": None}}, KVCodes(8, 4)),
        "adakv@0.5": (None, None),
        "adakv K8V4@0.5": (None, KVCodes(8, 4)),
    }
    assert found.methods[-1].policy.policy.budget == ByteBudget(share=0.5)
    assert [line.partition(":")[0] for line in found.left_out] == [
        "tova K8V4",
        *(f"{name}@0.0625" for name in ("snapkv", "snapkv K8V4", "adakv", "adakv K8V4")),
    ]


def test_what_is_held_says_the_bits_of_every_method(snapkv, tiny_only, here):
    options = (*SMALL, "--tasks", "needle", "--setting", "visible", "--ratios", "0.6")
    done = snapkv(*options, "--methods", "snapkv:window_size=8", "--bits", "exact,int8", "--json",
                  "--results", "board")  # fmt: skip
    rows = json.loads(done.out)["rows"]
    exact, coded = (
        [row for row in rows if row["share"] and row["bits"] == bits] for bits in (None, "int8")
    )
    for one, other in zip(exact, coded, strict=True):
        assert other["kept_tokens"] > 1.3 * one["kept_tokens"]
        assert other["held_bytes"] <= one["held_bytes"]
    assert "snapkv:window_size=8 int8" in (here / "board" / "leaderboard.md").read_text()
