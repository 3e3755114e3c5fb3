"""Errors of the process with kvpress, whose part a script plays."""

import sys
from pathlib import Path

import pytest

from snapkv import SnapKV
from snapkv.errors import InvalidArgumentError
from snapkv_lab.experiments import kvpress
from tests.families import random_ids, tiny_model

SCRIPT = """
import json, sys
for line in sys.stdin:
    tokens = len(json.loads(line).get("ids", [[]])[0])
    if tokens == 3:
        print("Traceback", "ValueError: three", sep=chr(10), file=sys.stderr)
        sys.exit(7)
    answers = {1: {"error": "no such press"}, 4: {"ms": 2.5, "kept_tokens": 3}}
    print(json.dumps(answers.get(tokens, {})), flush=True)
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(kvpress, "_WORKER", script)
    with kvpress.Kvpress(Path(sys.executable), tiny_model("llama"), SnapKV(48)) as made:
        yield made


def read(theirs, tokens):
    return theirs.read(random_ids(1, tokens))


def test_kvpress_process_continues_after_an_error_and_reports_its_last_output(theirs):
    with pytest.raises(InvalidArgumentError, match=r"it failed: no such press\. Leave it out"):
        read(theirs, 1)
    assert read(theirs, 4) == 2.5
    assert theirs.last["kept_tokens"] == 3
    with pytest.raises(InvalidArgumentError, match=r"failed: status 7 .* was ValueError: three"):
        read(theirs, 3)


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("nowhere", r"with kvpress, got 'nowhere'\. Make one"),
        (sys.executable, "was ModuleNotFoundError: No module"),
    ],
    ids=["no interpreter", "one without kvpress"],
)
def test_an_environment_with_kvpress_is_needed(python, said):
    with (
        pytest.raises(InvalidArgumentError, match=said),
        kvpress.Kvpress(python, tiny_model("llama")) as theirs,
    ):
        read(theirs, 4)
