"""What becomes of a bench when the process beside it fails; its part is played by a script."""

import sys
from pathlib import Path

import pytest
import torch

from snapkv import SnapKV
from snapkv.errors import InvalidArgumentError, OutOfMemoryError
from snapkv_lab.experiments import kvpress
from snapkv_lab.measure.contenders import full
from snapkv_lab.measure.decode import DecodeBench, ThroughputBench
from snapkv_lab.measure.prefill import PrefillBench
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
    answers = {1: {"out_of_memory": "no room"}, 4: {"ms": 2.5, "held_bytes": 8}}
    answers |= {"fill": {"held_bytes": 16}, "decode": {"ms": 3.0, "held_bytes": 24, "tokens": []}}
    if asked.get("do") in answers:
        tokens = asked["do"]
    print(asked.get("do"), file=sys.stderr, flush=True)
    print(json.dumps(answers.get(tokens, {})), flush=True)
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(kvpress, "_WORKER", script)
    with kvpress.Kvpress("theirs", Path(sys.executable), tiny_model("llama"), SnapKV(48)) as made:
        yield made


def read(theirs, tokens):
    return theirs.read(random_ids(1, tokens))


def test_it_goes_on_where_something_did_not_fit(theirs):
    with pytest.raises(OutOfMemoryError, match="kvpress: no room"):
        read(theirs, 1)
    assert read(theirs, 4) == 2.5
    assert theirs.last["held_bytes"] == 8


def test_a_killed_process_was_out_of_memory_and_another_takes_its_place(theirs):
    with pytest.raises(OutOfMemoryError, match="status -9"):
        read(theirs, 2)
    theirs.forget()
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
    process = theirs._started().process

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
        read(kvpress.Kvpress("theirs", python, tiny_model("llama"), SnapKV(48)), 4)


def test_an_environment_without_kvpress_is_named():
    made = kvpress.Kvpress("theirs", Path(sys.executable), tiny_model("llama"), SnapKV(48))
    with made, pytest.raises(InvalidArgumentError, match="said ModuleNotFoundError: No module"):
        read(made, 4)


def test_benches_ask_it_like_any_other_cache_and_it_holds_nothing_afterwards(theirs):
    compared = {
        "model": tiny_model("llama"),
        "contenders": [full("transformers"), theirs],
        "lengths": [4],
        "rounds": 2,
    }
    rows = [
        *PrefillBench(**compared).times(),
        *PrefillBench(**compared).peaks(),
        *DecodeBench(**compared, tokens=2).rows(),
        *ThroughputBench(**compared, memory_bytes=10**9, tokens=2, most_requests=2).rows(),
    ]
    asked = done_by(theirs)
    assert asked[-1] == "forget"
    assert "read" not in asked[asked.index("fill") :]
    own = [row for row in rows if row["cache"] == "theirs"]
    assert [row["bench"] for row in own] == ["prefill", "memory", "decode", "throughput"]
    assert own[0]["ms"]["p50"] == 2.5
    assert [row["held_bytes"] for row in own[1:]] == [8, 24, 24]


def done_by(theirs):
    theirs._said.seek(0)
    return theirs._said.read().split()
