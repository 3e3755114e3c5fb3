"""What stands beside the policy on the inspector's page, and along its curve."""

import json
import re

import pytest

ASK = ("-q", "Where is the key?", "--max-new-tokens", 2, "--checks", 0)


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text("utf-8"), re.S)[1])


@pytest.fixture
def inspected(snapkv, tmp_path, document):
    def call(*options):
        page = tmp_path / "page.html"
        done = snapkv("inspect", document, *ASK, "-o", page, *options)
        assert done.status == 0, done.err
        return data_of(page)

    return call


def test_methods_and_budgets_beside_it(inspected, tiny_only):
    data = inspected(
        *("--policy", "adakv", "--budget", 64, "--beside", "@48,streaming-llm@40"),
        *("--beside", "h2o", "--beside", "snapkv:window_size=16@56"),
    )
    shown = {method["label"]: method["policy"] for method in data["methods"]}
    assert list(shown) == [
        *("adakv", "adakv@48", "streaming-llm@40", "h2o@64", "snapkv:window_size=16@56"),
    ]
    assert shown["adakv"]["policy"]["budget"] == 64
    assert shown["adakv@48"] == shown["adakv"] | {
        "policy": shown["adakv"]["policy"] | {"budget": 48}
    }
    assert shown["streaming-llm@40"]["budget"] == 40
    assert shown["snapkv:window_size=16@56"]["budget"] == 56
    assert data["curve"] == []
    assert "budgets" not in data["request"] or data["request"]["budgets"] is None


def test_beside_a_budget_that_the_votes_choose_another_method_has_the_usual_one(
    inspected, tiny_only
):
    data = inspected("--beside", "streaming-llm")
    assert [method["label"] for method in data["methods"]] == ["default", "streaming-llm@1024"]


def test_budgets_come_once_and_in_their_order(inspected, tiny_only):
    data = inspected("--budget", 64, "--budgets", "96,0.046875k,48")
    assert [point["budget"] for point in data["curve"]] == [48, 96]
    assert all(0 < point["likelihood"] <= 1 for point in data["curve"])
    held = [point["held_bytes"] for point in data["curve"]]
    assert held == sorted(set(held))
    assert data["request"]["budgets"] == [48, 96]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--budgets", "many"), "budgets: expected items of type int with commas between them"),
        (("--budgets", ","), "budgets: expected whole numbers with commas between them, got ','"),
        (("--budgets", ",".join(map(str, range(64, 77)))), "budgets: expected at most 12, since"),
        (("--budgets", "8"), "budget: expected"),
        (("--policy", "fastgen", "--budgets", "64"), "budget: expected a parameter of fastgen"),
        (("--beside", "@many"), "budget: expected a whole number such as 4096"),
        (("--beside", "@8"), "budget: expected"),
        (("--beside", "full@64"), "beside: expected a budget for a method that takes one"),
        (("--beside", "snapkv:budget=64@128"), "beside: expected a budget for a method that"),
        (("--set", "budget=100", "--budgets", "64"), "set: expected none of a budget beside"),
        (("--set", "budget=100", "--beside", "@64"), "set: expected none of a budget beside"),
        (("--beside", "nothing@64"), "policy: expected one of"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_is_refused_before_a_model_is_read(
    snapkv, document, monkeypatch, tmp_path, options, message
):
    def load(**_):
        raise AssertionError("a model was read")

    monkeypatch.setattr("snapkv.cli.loading.load", load)
    done = snapkv("inspect", document, *ASK, "-o", tmp_path / "page.html", *options)
    assert done.status == 2
    assert message in done.err
    assert done.err.count("\n") == 1
