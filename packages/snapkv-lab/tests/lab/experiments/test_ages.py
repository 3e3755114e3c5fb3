"""Rows are as old as the oldest commit they name, counted in commits to the code they judge."""

import subprocess

import pytest

from snapkv_lab.experiments import records
from snapkv_lab.experiments.ages import JUDGED, ages


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "ROOT", tmp_path)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)

    def commit(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        records.git("add", ".")
        records.git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", name)
        return records.git("rev-parse", "--short=10", "HEAD")

    return tmp_path / "results", commit


def test_commits_to_the_judged_code_are_counted_and_no_others(checkout):
    results, commit = checkout
    first = commit(JUDGED[0] / "layer.py", "1")
    commit("results/speed.jsonl", f'{{"environment": {{"commit": "{first}"}}}}\n')
    commit("README.md", "words")
    assert [(each.name, each.commit, each.since) for each in ages(results)] == [("speed", first, 0)]
    second = commit(JUDGED[1] / "heads.py", "2")
    commit(JUDGED[0] / "layer.py", "3")
    commit("results/codes.jsonl", f'{{"commit": "{second}"}}\n{{"commit": "{first}"}}\n')
    found = {each.name: each.since for each in ages(results)}
    assert found == {"speed": 2, "codes": 2}, "the oldest row counts"


def test_rows_that_name_no_commit_are_as_old_as_their_file(checkout):
    results, commit = checkout
    stored = commit("results/eval/needle/samples.jsonl", "{}\n")
    commit(JUDGED[0] / "layer.py", "1")
    (found,) = ages(results)
    assert (found.name, found.commit, found.since) == ("eval/needle", stored, 1)


def test_a_commit_of_elsewhere_is_said(checkout):
    results, commit = checkout
    commit("results/speed.jsonl", '{"commit": "0123456789"}\n')
    (found,) = ages(results)
    assert not found.commit
    assert "does not have" in str(found)
