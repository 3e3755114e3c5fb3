"""`snapkv eval` on a tiny model: one command, many methods, a table, figures and a page."""

import json
import re

import pytest

from snapkv_app.cli.fields import documented_arguments
from snapkv_lab.evaluate.tasks import TASKS

NEEDLE = ("eval", "needle", "--lengths", "300,360", "--depths", 2, "--digits", 1, "--cloze")


def test_eval_prints_a_table_and_names_its_folder(snapkv, tiny_only, here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    done = snapkv(*NEEDLE, "--budget", "64,40")
    assert done.status == 0
    assert "needle: accuracy by length" in done.out
    labels = re.findall(r"│ (full|default@\d+) +│ visible +│", done.out)
    assert labels == ["full", "default@64", "default@40"]
    folder = re.search(r"answers: (snapkv-results/needle-tiny-[0-9a-f]{8})\n", done.err)
    assert folder
    assert len((here / folder[1] / "samples.jsonl").read_text().splitlines()) == 2 * 2 * 3


def test_fewer_bits_hold_more_tokens_and_too_few_bytes_are_reported(snapkv, tiny_only, here):
    done = snapkv(
        *("eval", "needle", "--lengths", 360, "--depths", 1, "--digits", 1, "--cloze"),
        *("--budget", "40%,1KiB", "--bits", "exact,k8v4", "--results", "o", "--json"),
    )
    found = {row["method"]: row for row in json.loads(done.out)["rows"]}
    assert list(found) == ["full"] + [
        f"default@{budget}{bits}" for budget in ("40%", "1KiB") for bits in ("", " K8V4")
    ]
    exact, coded = found["default@40%"], found["default@40% K8V4"]
    assert coded["policy"]["bits"]["keys"] == 8
    assert coded["kept_tokens"] > 1.2 * exact["kept_tokens"]
    assert coded["held_bytes"] <= exact["held_bytes"] < 0.5 * exact["full_bytes"]
    too_small = {found[f"default@1KiB{bits}"]["status"] for bits in ("", " K8V4")}
    assert too_small == {"budget too small"}


def test_json_output_is_exactly_one_object(snapkv, tiny_only, here):
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


def test_reference_loss_is_in_every_output(snapkv, tiny_only, here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    given = (*NEEDLE, "--budget", "64,40", "--results", "o", "--reference-loss")
    done = snapkv(*given, "--plot", "n.svg", "--report", "page")
    assert done.status == 0
    assert "page: page/index.html\n" in done.err
    for name in ("n.svg", "n-budgets.svg"):
        assert (here / name).read_bytes().startswith(b"<?xml")
        assert f"figure: {name}\n" in done.err
    assert "difference" in done.out
    for heading in ("loss", "loss 95 %", "loss difference"):
        assert re.search(rf"┃ +{heading} +┃", done.out)
    assert "lower is better" in done.out
    lines = (here / "o" / "samples.jsonl").read_text().splitlines()
    assert all(json.loads(line)["loss"] > 0 for line in lines)
    assert "figure: n-loss.svg\n" in done.err
    assert (here / "n-loss.svg").read_bytes().startswith(b"<?xml")
    shown = " ".join(done.out.split())
    assert "nothing was dropped" not in shown
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
    done = snapkv(*NEEDLE, "--budget", "1k", "--limit", 1, "--results", "p")
    assert "default@1024: nothing was dropped of 4 of 4 prompts" in " ".join(done.out.split())


def test_each_way_to_handle_later_questions_is_a_method(snapkv, tiny_only, here):
    turns = ("eval", "turns", "--lengths", 200, "--questions", 2, "--samples-each", 1, "--cloze")
    ways = ("--turns", "append,compress", "--turns", "recall")
    done = snapkv(*turns, *ways, "--budget", 64, "--json")
    assert done.status == 0, done.err
    rows = [(row["method"], row["cell"]["turn"]) for row in json.loads(done.out)["rows"]]
    later = ("", " compress", " recall")
    methods = ("full", *(f"default@64{way}" for way in later))
    assert sorted(rows) == sorted((method, turn) for method in methods for turn in (1, 2))


def test_every_setting_of_a_task_is_an_option_with_a_help_text(snapkv, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for task in TASKS.values():
        done = snapkv("eval", task.name, "--help")
        assert done.status == 0
        for name, text in documented_arguments(task).items():
            assert f"--{name.replace('_', '-')}" in done.out
            assert text[:40] in done.out
