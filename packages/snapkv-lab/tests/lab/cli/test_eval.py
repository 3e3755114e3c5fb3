"""`snapkv eval` on a tiny model: one command, many methods, a table, figures and a page."""

import json
import re
import sys

import pytest

from snapkv import AutoBudget, SnapKV
from snapkv.cli.amounts import token_budgets
from snapkv.cli.fields import documented_arguments, integers
from snapkv.cli.specs import specs
from snapkv.errors import InvalidArgumentError
from snapkv_lab.cli.methods import methods
from snapkv_lab.evaluate.tasks import TASKS, Needle

NEEDLE = ("eval", "needle", "--lengths", "300,360", "--depths", 2, "--digits", 1, "--cloze")


def test_a_table_is_on_standard_output_and_the_answers_are_where_it_says(
    snapkv, tiny_only, here, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "120")
    done = snapkv(*NEEDLE, "--budget", "64,40")
    assert done.status == 0
    assert "needle: accuracy by length" in done.out
    labels = re.findall(r"│ (full|default@\d+) +│ +visible │", done.out)
    assert labels == ["full", "default@64", "default@40"]
    folder = re.search(r"answers: (snapkv-results/needle-tiny-[0-9a-f]{8})\n", done.err)
    assert folder
    assert len((here / folder[1] / "samples.jsonl").read_text().splitlines()) == 2 * 2 * 3


def test_a_budget_above_the_prompt_says_that_nothing_was_dropped(snapkv, tiny_only, here):
    given = (*NEEDLE, "--budget", "64,1k", "--limit", 1, "--results", "o")
    shown = " ".join(snapkv(*given).out.split())
    assert "default@1024: nothing was dropped of 4 of 4 prompts" in shown
    assert shown.count("nothing was dropped") == 1
    rows = json.loads(snapkv(*given, "--json").out)["rows"]
    found = {row["method"]: (row["samples"], row["compressed"]) for row in rows}
    assert found == {"full": (1, 0), "default@64": (1, 1), "default@1024": (1, 0)}
    whole = {row["method"] for row in rows if row["kept_tokens"] == row["prompt_tokens"]}
    assert whole == {"full", "default@1024"}


def test_many_columns_become_rows(snapkv, tiny_only, here):
    lengths = ",".join(map(str, range(300, 390, 10)))
    done = snapkv(*NEEDLE[:2], "--lengths", lengths, "--depths", 1, "--budget", 64)
    assert re.findall(r"│ (\d+) +│ +[\d.]+ │ +[\d.]+ │", done.out) == lengths.split(",")
    assert re.search(r"┃ method +┃ +full ┃ +default@64 ┃", done.out)


def test_the_same_command_again_answers_nothing_twice(snapkv, tiny_only, here, monkeypatch):
    first = snapkv(*NEEDLE, "--budget", 64, "--json")

    def fail(*_):
        raise AssertionError("answered again")

    monkeypatch.setattr("snapkv.app.prompt_reader.answer", fail)
    again = snapkv(*NEEDLE, "--budget", 64, "--json")
    assert (again.status, again.out) == (0, first.out)


def test_json_is_one_object_and_nothing_else(snapkv, tiny_only, here):
    done = snapkv(
        *NEEDLE, "--budget", 64, "--setting", "both", "--results", "results", "--limit", 1,
        "--json",
    )  # fmt: skip
    assert (done.status, done.err) == (0, "")
    found = json.loads(done.out)
    assert found["folder"] == "results"
    assert found["run"]["task"]["lengths"] == [300, 360]
    assert found["run"]["limit"] == 1
    rows = [(row["method"], row["question"]) for row in found["rows"][:4]]
    assert rows == [
        ("full", "visible"), ("default@64", "visible"),
        ("full", "hidden"), ("default@64", "hidden"),
    ]  # fmt: skip
    assert (here / "results" / "run.json").exists()


def test_another_run_in_the_output_folder_is_refused_with_what_differs(snapkv, tiny_only, here):
    assert snapkv(*NEEDLE, "--results", "o", "--budget", 64, "--limit", 1).status == 0
    done = snapkv(*NEEDLE, "--results", "o", "--budget", 64, "--limit", 1, "--seed", 7)
    assert done.status == 2
    assert "another task.seed: 42 there, 7 here" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf", "PNG"])
def test_a_figure_of_every_kind(snapkv, tiny_only, here, suffix):
    done = snapkv(*NEEDLE, "--budget", "64,40", "--plot", f"n.{suffix}")
    assert done.status == 0
    begin = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix.lower()]
    for name in (f"n.{suffix}", f"n-budgets.{suffix}"):
        assert (here / name).read_bytes().startswith(begin)
        assert f"figure: {name}\n" in done.err


def test_a_page_and_its_tables(snapkv, tiny_only, here):
    done = snapkv(*NEEDLE, "--budget", 64, "--report", "out/page")
    assert done.status == 0
    assert "page: out/page/index.html\n" in done.err
    assert {path.name for path in (here / "out" / "page").iterdir()} == {
        "index.html", "results.csv", "results.md",
    }  # fmt: skip


def test_the_loss_of_the_references_stands_in_every_output(snapkv, tiny_only, here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    given = (*NEEDLE, "--budget", "64,40", "--results", "o", "--reference-loss")
    done = snapkv(*given, "--plot", "n.svg", "--report", "page")
    assert done.status == 0
    assert "difference" in done.out
    for heading in ("loss", "loss 95 %", "loss difference"):
        assert re.search(rf"┃ +{heading} +┃", done.out)
    assert "lower is better" in done.out
    lines = (here / "o" / "samples.jsonl").read_text().splitlines()
    assert all(json.loads(line)["loss"] > 0 for line in lines)
    assert "figure: n-loss.svg\n" in done.err
    assert (here / "n-loss.svg").read_bytes().startswith(b"<?xml")
    heading, *rows = (here / "page" / "results.csv").read_text().splitlines()
    places = [heading.split(",").index(name) for name in ("loss", "loss_low", "loss_high")]
    first = [float(rows[0].split(",")[place] or "nan") for place in places]
    found = json.loads(snapkv(*given, "--json").out)
    assert first[0] == pytest.approx(found["rows"][0]["loss"])
    assert "loss difference" in (here / "page" / "results.md").read_text()
    assert "loss difference" in (here / "page" / "index.html").read_text()
    done = snapkv(*given[:-1])
    assert done.status == 2
    assert "another reference_loss: true there, null here" in done.err


def test_without_the_option_nothing_says_loss(snapkv, tiny_only, here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    done = snapkv(*NEEDLE, "--budget", 64, "--results", "o", "--plot", "n.svg", "--report", "page")
    assert done.status == 0
    texts = [path.read_text() for path in here.rglob("*.*") if path.suffix != ".svg"]
    assert len(texts) == 6
    assert not any("loss" in text for text in (done.out, *texts))
    assert not (here / "n-loss.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--plot", "figure.gif"), "plot: expected a file name that ends in .png, .svg, .pdf"),
        (("--plot", "figure"), "plot: expected a file name that ends in"),
        (("--plot", "no/figure.png"), "plot: expected a file in an existing folder"),
        (("--report", "file"), "report: expected a folder that can be written, got 'file'"),
        (("--report", "file/page"), "report: expected a folder that can be written, got 'file'"),
        (("--lengths", "many"), "lengths: expected items of type int"),
        (("--lengths", "4kk"), "got '4kk'"),
        (("--lengths", "100"), "lengths: expected at least 300, got 100"),
        (("--lengths", ","), "lengths: expected at least 300, got 0"),
        (("--depths", "0"), "depths: expected at least 1"),
        (("--depths", "many"), "--depths"),
        (("--variant", "fork"), "--variant"),
        (("--haystack", "no/such"), "no/such"),
        (
            ("--budget", "many"),
            "such as 4096, 4k or 1.5k, got 'many'; write for instance --budget 4k or --budget auto",
        ),
        (("--budget", ""), "budget: expected numbers of tokens with commas"),
        (("--budget", "16"), "expected more than window_size=16"),
        (("--policy", "snapvk"), "did you mean snapkv?"),
        (("--policy", "snapkv:kernel_size"), "policy: expected NAME or NAME:PARAMETER=VALUE"),
        (("--policy", "snapkv:colour=red"), "colour: expected a parameter of snapkv"),
        (("--policy", "snapkv:kernel_size=4"), "expected an odd number"),
        (("--baseline", "fulll"), "did you mean full?"),
        (("--setting", "loud"), "--setting"),
        (("--template", "mine"), "--template"),
        (("--limit", "some"), "--limit"),
        (("--nothing", "1"), "No such option"),
        (("--model", "dmo"), "did you mean demo?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_before_anything_is_loaded(snapkv, here, arguments, message):
    (here / "file").touch()
    done = snapkv("eval", "needle", *arguments)
    assert done.status == 2
    assert message in done.err
    assert done.err.startswith("snapkv: error: ")
    assert done.err.count("\n") == 1
    assert done.out == ""
    assert [path.name for path in here.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--limit", "0"), "limit: expected at least 1"),
        (("--budget", "64,64"), "policy: expected every method once"),
        (("--policy", "none", "--baseline", "none"), "policy: expected at least one method"),
        (("--lengths", "300,300"), "samples: expected every sample once"),
        (("--results", "file"), "results: expected a folder that can be written, got 'file'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_only_the_run_can_know_is_one_line_too(snapkv, tiny_only, here, arguments, message):
    (here / "file").touch()
    done = snapkv(*NEEDLE, "--budget", 64, *arguments)
    assert done.status == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert [path.name for path in here.iterdir()] == ["file"]


def test_every_way_of_later_questions_is_a_method_and_the_full_cache_comes_once(
    snapkv, tiny_only, here
):
    turns = ("eval", "turns", "--lengths", 200, "--questions", 2, "--samples-each", 1, "--cloze")
    ways = ("--turns", "append,compress", "--turns", "recall,recall-pages:2")
    done = snapkv(*turns, *ways, "--budget", 64, "--json")
    assert done.status == 0, done.err
    rows = [(row["method"], row["cell"]["turn"]) for row in json.loads(done.out)["rows"]]
    later = ("", " compress", " recall", " recall-pages:2")
    methods = ("full", *(f"default@64{way}" for way in later))
    assert sorted(rows) == sorted((method, turn) for method in methods for turn in (1, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("needle", "--turns", "recall"), "turns: expected it with a task of several questions"),
        (("turns", "--turns", "forget"), "turns: expected one of append, compress, recall"),
        (("turns", "--turns", "recall,recall"), "turns: expected some of append"),
        (("turns", "--turns", "recall-pages"), "recall-pages: expected a whole number"),
        (("turns", "--turns", "recall-pages:0"), "pages: expected at least 1, got 0"),
        (("turns", "--policy", "h2o", "--turns", "recall-pages:8"), "evicts after every token"),
        (
            ("turns", "--turns", ","),
            "turns: expected some of append, compress, recall, recall-",
        ),
        (("turns", "--policy", "h2o", "--turns", "recall"), "evicts after every token"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_ways_of_later_questions_that_cannot_be_are_one_line(
    snapkv, tiny_only, here, arguments, message
):
    done = snapkv("eval", *arguments, "--lengths", 300, "--budget", 64)
    assert done.status == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert list(here.iterdir()) == []


def test_an_unknown_task_is_one_line(snapkv):
    done = snapkv("eval", "noodle")
    assert (done.status, done.out) == (2, "")
    assert "noodle" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("package", "option"),
    [("matplotlib", ("--plot", "n.png")), ("matplotlib", ("--report", "r")),
     ("jinja2", ("--report", "r"))],
)  # fmt: skip
def test_a_missing_package_is_named_before_the_run_starts(
    snapkv, here, monkeypatch, package, option
):
    monkeypatch.setitem(sys.modules, package, None)
    done = snapkv(*NEEDLE, *option)
    assert done.status == 2
    assert f"the package {package}, which is not installed; run pip install" in done.err
    assert done.err.count("\n") == 1
    assert list(here.iterdir()) == []


def test_a_run_without_figures_needs_no_package_for_them(snapkv, tiny_only, here, monkeypatch):
    for package in ("matplotlib", "jinja2"):
        monkeypatch.setitem(sys.modules, package, None)
    assert snapkv(*NEEDLE, "--budget", 64, "--limit", 1).status == 0


def labels(**given):
    made = methods(given.get("baselines", []), given.get("policies", []), given.get("budgets", []))
    return [method.label for method in made]


def test_baselines_come_first_then_every_policy_at_every_budget():
    found = methods(["full"], ["snapkv,h2o", "snapkv:kernel_size=13,pooling=avg"], [512, 1024])
    assert [method.label for method in found] == [
        "full",
        "snapkv@512", "snapkv@1024",
        "h2o@512", "h2o@1024",
        "snapkv:kernel_size=13,pooling=avg@512", "snapkv:kernel_size=13,pooling=avg@1024",
    ]  # fmt: skip
    assert [method.policy.budget for method in found[1:]] == [512, 1024] * 3
    assert found[-1].policy.describe()["pooling"] == "avg"


def test_who_names_no_method_is_given_the_default_at_every_budget():
    budgets = token_budgets("128, auto, auto:lost_vote=0.01,most=4k")
    found = methods([], ["default,default:kernel_size=5,window_size=8"], budgets)
    assert [method.label for method in found] == [
        "default@128", "default@auto", "default@auto:lost_vote=0.01,most=4096",
        "default:kernel_size=5,window_size=8@128", "default:kernel_size=5,window_size=8@auto",
        "default:kernel_size=5,window_size=8@auto:lost_vote=0.01,most=4096",
    ]  # fmt: skip
    assert found[0].policy == SnapKV(128, window_size=16, pooling="fading")
    assert found[1].policy == SnapKV("auto", window_size=16, pooling="fading")
    assert found[-1].policy == SnapKV(
        AutoBudget(lost_vote=0.01, most=4096), window_size=8, kernel_size=5
    )
    (one,) = methods([], ["default:budget=auto:most=64"], [128])
    assert (one.label, one.policy.budget) == ("default:budget=auto:most=64", AutoBudget(most=64))


def test_a_budget_that_the_votes_choose_is_evaluated(snapkv, tiny_only, here):
    budgets = "auto:lost_vote=0.01,least=8,64"
    done = snapkv(*NEEDLE, "--budget", budgets, "--baseline", "none", "--limit", 1, "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert {row["method"] for row in found["rows"]} == {
        "default@auto:lost_vote=0.01,least=8", "default@64",
    }  # fmt: skip


def test_a_method_with_a_budget_of_its_own_comes_once():
    assert labels(policies=["full", "snapkv:budget=99"], budgets=[512, 1024]) == [
        "full", "snapkv:budget=99",
    ]  # fmt: skip
    (one,) = methods([], ["snapkv:keep_ratio=0.25"], [512, 1024])
    assert one.policy.describe()["keep_ratio"] == 0.25
    assert one.policy.describe()["budget"] is None


def test_baselines_have_their_own_budgets():
    (one,) = methods(["streaming-llm:budget=256"], [], [512])
    assert (one.label, one.policy.budget) == ("streaming-llm:budget=256", 256)


def test_specs_are_parted_at_commas_that_no_parameter_follows():
    assert specs(["snapkv:a=1,b=2,h2o", "full , none", ""]) == ["snapkv:a=1,b=2", "h2o", "full"]


def test_numbers_may_be_written_in_thousands():
    assert integers("budget", "512, 1k,2K,1m") == (512, 1024, 2048, 1024**2)
    assert integers("budget", "1.5k,0.5m") == (1536, 512 * 1024)
    with pytest.raises(
        InvalidArgumentError, match=r"got '1\.3k'; write for instance --budget 1331"
    ):
        integers("budget", "1.3k")


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_every_setting_of_a_task_is_an_option_with_a_help_text(snapkv, monkeypatch, task):
    monkeypatch.setenv("COLUMNS", "200")
    done = snapkv("eval", task.name, "--help")
    assert done.status == 0
    for name, text in documented_arguments(task).items():
        assert f"--{name.replace('_', '-')}" in done.out
        assert text[:40] in done.out


def test_help_texts_are_those_of_the_docstring():
    assert documented_arguments(Needle)["permutations"] == (
        "runs of every length and depth, each with the documents in another order"
    )
