"""`snapkv leaderboard` on a tiny model: one command, rows, a page, and again for nothing."""

import json
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest

from snapkv.app.prompt_reader import PromptReader
from snapkv.cli.amounts import shares
from snapkv.errors import InvalidArgumentError
from snapkv.policies import POLICIES, SnapKV
from snapkv_lab.cli.methods import contenders, contending
from snapkv_lab.evaluate.leaderboard import prompt_tokens, task_of_one_length
from snapkv_lab.evaluate.tasks import Instructions, Lines, Needle
from snapkv_lab.report.leaderboard import FILES, as_markdown, as_page
from tests.lab.evaluate.tiny import save_tiny, untimed

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

SMALL = ("leaderboard", "--length", 320, "--limit", 1)
METHODS = ("--methods", "snapkv:window_size=16,h2o")
RATIOS = ("--ratios", "0.5,4:1", "--hidden-ratios", "8:1")
PLACES = ["needle/visible", "needle/hidden", "instructions/visible", "instructions/hidden"]


@pytest.fixture
def again(monkeypatch):
    """From now on nothing is answered."""

    def fail(*_):
        raise AssertionError("answered again")

    return lambda: monkeypatch.setattr(PromptReader, "answer", fail)


def test_one_command_gives_rows_and_a_page(snapkv, tiny_only, here):
    done = snapkv(*SMALL, *METHODS, *RATIOS, "--results", "board")
    assert done.status == 0, done.err
    assert "leaderboard of tiny" in done.out
    assert "about 1 min or more: 64 answers to give\n" in done.err
    assert "page: board/leaderboard.html\n" in done.err
    assert {path.name for path in (here / "board").iterdir()} == {*FILES, "needle", "instructions"}
    for place in PLACES:
        answers = (here / "board" / place / "samples.jsonl").read_text().splitlines()
        samples, methods = (5 if "needle" in place else 3), (5 if "visible" in place else 3)
        assert len(answers) == samples * methods
    found = json.loads((here / "board" / "leaderboard.json").read_text())
    assert list(found["runs"]) == PLACES
    assert {(row["method"], row["share"], row["question"]) for row in found["rows"]} == {
        ("full", None, "visible"), ("full", None, "hidden"),
        ("snapkv:window_size=16@0.5", 0.5, "visible"), ("h2o@0.5", 0.5, "visible"),
        ("snapkv:window_size=16@0.25", 0.25, "visible"), ("h2o@0.25", 0.25, "visible"),
        ("snapkv:window_size=16@0.125", 0.125, "hidden"), ("h2o@0.125", 0.125, "hidden"),
    }  # fmt: skip
    assert (here / "board" / "leaderboard.md").read_text() == as_markdown(found)
    assert (here / "board" / "leaderboard.html").read_text() == as_page(found)


def test_a_share_is_that_of_the_prompts_tokens_and_what_is_held_is_measured(
    snapkv, tiny_only, tiny, here
):
    options = ("--tasks", "needle", "--setting", "visible", "--ratios", "0.25", "--json")
    done = snapkv(*SMALL, *options, "--methods", "h2o")
    found = json.loads(done.out)
    tokens = prompt_tokens(tiny, task_of_one_length("needle", 320, 1), "none")
    full = [row for row in found["rows"] if row["share"] is None]
    assert tokens == pytest.approx(sum(row["prompt_tokens"] for row in full) / len(full))
    for row in found["rows"]:
        if row["share"] == 0.25:
            assert row["policy"]["budget"] == round(tokens / 4)
            assert 0.2 < row["held_bytes"] / row["full_bytes"] < 0.35


def test_the_same_command_again_answers_nothing_twice(snapkv, tiny_only, here, again):
    options = (*SMALL, *RATIOS, "--tasks", "needle", "--results", "board")
    assert snapkv(*options, "--methods", "h2o").status == 0
    before = {name: (here / "board" / name).read_bytes() for name in FILES}
    again()
    done = snapkv(*options, "--methods", "h2o")
    assert done.status == 0, done.err
    assert "25 answers are there, none is to be given" in done.err
    assert {name: (here / "board" / name).read_bytes() for name in FILES} == before


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


def test_other_methods_in_the_folder_are_not_taken_for_those_that_are_asked(
    snapkv, tiny_only, here
):
    options = (*SMALL, "--tasks", "needle", "--setting", "visible", "--ratios", "0.5")
    assert snapkv(*options, "--methods", "h2o", "--results", "board").status == 0
    done = snapkv(*options, "--methods", "tova", "--results", "board")
    assert "5 answers to give, 5 are there\n" in done.err


def test_a_summary_that_cannot_be_written_is_said_behind_the_page(snapkv, tiny_only, here):
    (here / "board" / "needle" / "visible" / "summary.jsonl").mkdir(parents=True)
    options = (*SMALL, "--tasks", "needle", "--setting", "visible", "--ratios", "0.5")
    done = snapkv(*options, "--methods", "h2o", "--results", "board")
    assert done.status == 1
    assert "leaderboard of tiny" in done.out
    assert "page: board/leaderboard.html\n" in done.err
    assert "summary.jsonl" in done.err


def test_two_workers_give_the_board_of_one_process(snapkv, tiny, tmp_path, demo, here):
    model = save_tiny(tmp_path / "model", demo.tokenizer)
    options = (*SMALL, "--methods", "h2o", "--ratios", "0.5", "--hidden-ratios", "0.5", "--json")
    options = (*options, "--model", model, "--results")
    two = snapkv(*options, "two", "--devices", "cpu,cpu")
    assert two.status == 0, two.err
    assert "\n32 answers to give\n" in f"\n{two.err}"  # no time: this process would not answer
    alone = snapkv(*options, "alone", "--device", "cpu")
    found = [json.loads(done.out) for done in (alone, two)]
    assert found[0]["runs"] == found[1]["runs"]
    assert untimed(found[0]["rows"]) == untimed(found[1]["rows"])
    again = snapkv(*options, "two", "--device", "cpu")
    assert "32 answers are there, none is to be given" in again.err
    assert json.loads(again.out) == found[1]


def test_another_run_in_the_folder_and_somebodys_files_are_refused(snapkv, tiny_only, here):
    options = (*SMALL, "--tasks", "needle", "--setting", "visible", "--methods", "h2o")
    assert snapkv(*options, "--results", "board").status == 0
    done = snapkv(*options, "--results", "board", "--limit", 2)
    assert (done.status, done.err.count("\n")) == (2, 1 + 1)  # what is to be done, and why not
    assert "another task.permutations: 1 there, 2 here" in done.err
    (here / "mine").mkdir()
    (here / "mine" / "leaderboard.md").write_text("mine")
    done = snapkv(*options, "--results", "mine")
    assert done.status == 2
    assert "results: expected a new name" in done.err
    assert (here / "mine" / "leaderboard.md").read_text() == "mine"


def test_what_cannot_take_part_is_said_and_on_the_page(snapkv, tiny_only, here):
    done = snapkv(
        *SMALL, "--tasks", "needle", "--methods", "kvzip:window_size=8,snapkv,h2o",
        "--ratios", "0.5", "--hidden-ratios", "2:1,32:1", "--results", "board",
    )  # fmt: skip
    assert done.status == 0, done.err
    assert "notice: needle/visible leaves out kvzip:window_size=8: it chooses before" in done.err
    assert "notice: needle/hidden leaves out snapkv@0.03125: budget: expected more" in done.err
    page = (here / "board" / "leaderboard.md").read_text()
    assert "| needle/hidden | snapkv@0.03125: budget: expected more than window_size=32" in page
    (kvzip,) = [line for line in page.splitlines() if line.startswith("| kvzip:window_size=8 | 50")]
    assert "one sample" not in kvzip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tasks", "noodle"), "tasks: expected tasks whose length is set, of needle, lines"),
        (("--tasks", "needel"), "did you mean needle?"),
        (("--tasks", ""), "tasks: expected tasks whose length is set"),
        (("--tasks", "longbench"), "tasks: expected tasks whose length is set"),
        (("--methods", "snapvk"), "did you mean snapkv?"),
        (("--methods", "full"), "methods: expected methods whose budget the shares can set"),
        (("--methods", "fastgen"), "methods: expected methods whose budget the shares can set"),
        (("--methods", "snapkv:budget=64"), "methods: expected methods whose budget the shares"),
        (("--methods", "snapkv:kernel_size=4"), "expected an odd number"),
        (("--methods", "h2o,h2o"), "methods: expected every method once"),
        (("--ratios", "2"), "ratios: expected a fraction between 0 and 1 that is kept"),
        (("--ratios", "1"), "ratios: expected a fraction between 0 and 1"),
        (("--ratios", "0"), "ratios: expected a fraction between 0 and 1"),
        (("--ratios", "1:8"), "ratios: expected a fraction between 0 and 1"),
        (("--ratios", "0:1"), "ratios: expected a fraction between 0 and 1"),
        (("--ratios", "half"), "ratios: expected a fraction between 0 and 1"),
        (("--ratios", "0.5,2:1"), "ratios: expected shares of the cache with commas between them"),
        (("--hidden-ratios", ""), "hidden_ratios: expected shares of the cache"),
        (("--length", "100"), "lengths: expected at least 300, got 100"),
        (("--limit", "0"), "limit: expected at least 1"),
        (("--setting", "loud"), "--setting"),
        (("--template", "mine"), "--template"),
        (("--results", "file"), "results: expected a folder that can be written"),
        (("--model", "dmo"), "did you mean demo?"),
        (("--device", "cpu", "--devices", "cpu"), "expected one of device, devices and ray, got"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_before_anything_is_loaded(snapkv, here, arguments, message):
    (here / "file").touch()
    done = snapkv("leaderboard", *arguments)
    assert (done.status, done.out) == (2, "")
    assert message in done.err
    assert done.err.startswith("snapkv: error: ")
    assert done.err.count("\n") == 1
    assert [path.name for path in here.iterdir()] == ["file"]


def test_shares_that_nobody_can_keep_to_are_refused(snapkv, tiny_only, here):
    done = snapkv(*SMALL, "--methods", "snapkv", "--ratios", "32:1", "--setting", "visible")
    assert done.status == 2
    assert "methods: expected one that can keep to a share where the question is vis" in done.err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_package_is_named_before_the_run_starts(snapkv, here, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    done = snapkv("leaderboard")
    assert done.status == 2
    assert f"the package {package}, which is not installed" in done.err


def test_without_names_every_method_that_has_a_budget_takes_part_also_a_new_one(monkeypatch):
    @dataclass(frozen=True)
    class New(SnapKV):
        name: ClassVar[str] = "new"

    monkeypatch.setitem(POLICIES, "new", New)
    found = contending([])
    assert found[0] == "default"
    assert set(POLICIES) - set(found) == {
        *("full", "fastgen", "prompt-then-decode", "duo-attention"),
    }
    assert "new" in found


def test_contenders_get_the_budgets_of_their_shares(tiny):
    found = contenders(tiny, ["tova", "snapkv", "adakv"], (0.5, 1 / 16), 400.4, "hidden")
    budgets = {m.label: m.policy.describe().get("budget") for m in found.methods}
    assert budgets == {"full": None, "tova@0.5": 200, "tova@0.0625": 25, "snapkv@0.5": 200,
                       "adakv@0.5": None}  # fmt: skip
    assert found.methods[-1].policy.policy.budget == 200
    assert [line.partition(":")[0] for line in found.left_out] == ["snapkv@0.0625", "adakv@0.0625"]


def test_tasks_have_one_length_so_many_samples_and_begun_answers():
    assert task_of_one_length("needle", 700, 3) == Needle(
        lengths=(700,), permutations=3, cloze=True
    )
    assert task_of_one_length("instructions", 700, 3) == Instructions(
        lengths=(700,), samples_each=3, cloze=True
    )
    assert task_of_one_length("lines", 700, 3) == Lines(lengths=(700,), samples_each=3, cloze=True)


def test_shares_are_fractions_or_how_many_times_smaller_the_cache_gets():
    assert shares("ratios", "0.5, .25,8:1,1.5:1") == (0.5, 0.25, 0.125, 1 / 1.5)
    with pytest.raises(InvalidArgumentError, match="each once"):
        shares("ratios", "0.125,8:1")
