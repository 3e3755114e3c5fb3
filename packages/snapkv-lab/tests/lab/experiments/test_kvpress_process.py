"""What is said where the process beside us fails; its part is played by a script."""

import sys
from pathlib import Path

import pytest
import torch

from snapkv import SnapKV
from snapkv.errors import InvalidArgumentError, OutOfMemoryError
from snapkv_lab.experiments import kvpress
from tests.families import random_ids, tiny_model

SCRIPT = """
import json, os, signal, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    tokens = len(asked.get("ids", [[]])[0])
    if tokens == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if tokens == 3:
        print("Traceback", "ValueError: three", sep=chr(10), file=sys.stderr)
        sys.exit(7)
    if tokens == 5:
        time.sleep(600)
    answers = {1: {"out_of_memory": "no room"}, 4: {"ms": 2.5, "kept_tokens": 3}}
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


def test_it_goes_on_where_something_did_not_fit(theirs):
    with pytest.raises(OutOfMemoryError, match="kvpress: no room"):
        read(theirs, 1)
    assert read(theirs, 4) == 2.5
    assert theirs.last["kept_tokens"] == 3


def test_a_killed_process_was_out_of_memory_and_another_takes_its_place(theirs):
    with pytest.raises(OutOfMemoryError, match="status -9"):
        read(theirs, 2)
    assert read(theirs, 4) == 2.5


def test_one_that_does_not_start_says_so_every_time(theirs, monkeypatch):
    monkeypatch.setattr(kvpress, "_settings", lambda *arguments: {"ids": [[0]]})
    for _ in range(2):
        with pytest.raises(OutOfMemoryError, match="kvpress: no room"):
            read(theirs, 4)
        assert theirs.versions == {}


def test_its_last_words_are_the_reason(theirs):
    for _ in range(2):  # the second is another process
        with pytest.raises(InvalidArgumentError, match=r"got status 7 .* said ValueError: three"):
            read(theirs, 3)


def test_nobody_waits_for_an_answer_that_is_not_wanted_any_more(theirs, monkeypatch):
    process = theirs._started()

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(process.stdout, "readline", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        theirs.read(torch.zeros(1, 5, dtype=torch.int64))
    theirs.__exit__()
    assert process.returncode == -15


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("", "with kvpress, got ''; make one"),
        (Path("nowhere"), "with kvpress, got 'nowhere'; make one"),
    ],
    ids=["none", "no interpreter"],
)
def test_an_interpreter_is_needed(python, said):
    with pytest.raises(InvalidArgumentError, match=said):
        read(kvpress.Kvpress(python, tiny_model("llama")), 4)


def test_an_environment_without_kvpress_is_named():
    made = kvpress.Kvpress(Path(sys.executable), tiny_model("llama"))
    with made, pytest.raises(InvalidArgumentError, match="said ModuleNotFoundError: No module"):
        read(made, 4)
