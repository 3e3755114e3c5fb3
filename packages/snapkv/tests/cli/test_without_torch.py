"""What needs no model is said, or refused, before torch is loaded, which takes seconds."""

import json
import re
import subprocess
import sys

import pytest
import torch

from snapkv import Library
from snapkv.validation import DEVICES

RUN = """
import json, sys, time
from snapkv.cli.app import run
for command in json.loads(sys.argv[1]):
    start = time.process_time()
    status = run(command)
    assert time.process_time() - start < 1
    heavy = [name for name in ("torch", "transformers") if name in sys.modules]
    print(json.dumps([command, status, heavy]), file=sys.stderr)
"""
ASK = ("ask", "{folder}/a.txt", "-q", "Who?")
SAID = [
    *(("--help",), ("--version",), ("policies", "--help"), ("demo", "--help")),
    ("policies",),
    ("policies", "--json"),
    ("library", "list", "{folder}/library"),
    ("library", "list", "{folder}/library", "--json"),
    ("library", "check", "{folder}/library"),
    ("library", "limit", "{folder}/library", "1GiB"),
    ("library", "remove", "{folder}/library", "b"),
    *((*words, "--help") for words in (("plan",), ("ask",), ("chat",), ("library", "add"))),
]
FAILED = ("library", "add", "{folder}/none.txt", "--to", "{folder}/library")
REFUSED = [
    *(("ask", "{folder}/none.txt", "-q", "Who?"), ("ask", "{folder}/a.txt"), (*ASK, "--no")),
    ("ask", "--library", "{folder}/none", "-q", "Who?"),
    *(("chat", "{folder}/none.txt"), ("inspect", "{folder}/none.txt", "-q", "Who?")),
    ("generate", "{folder}/none.txt"),
    *(("plan",), ("plan", "--context", "many")),
    ("library", "list", "{folder}/none"),
    ("library", "check", "{folder}/none"),
    ("library", "remove", "{folder}/none", "a"),
    ("library", "limit", "{folder}/none", "1GiB"),
    (*ASK, "-q", "Why?"),
    (*ASK, "--model", "demo", "--model", "demo"),
    (*ASK, "--policy", "snapvk"),
    (*ASK, "--dtype", "int8"),
    (*ASK, "--device", "gpu"),
    (*ASK, "--device", "cuda:x"),
    (*ASK, "--budget", "auto:lost_vote=2"),
    (*ASK, "--budget", "auto:least=64,most=64"),
    ("plan", "--context", "4k", "--dtype", "int8"),
    ("inspect", "{folder}/a.txt", "-q", "Who?", "--beside", "snapvk@64"),
    ("inspect", "{folder}/a.txt", "-q", "Who?", "--beside", "h2o@many"),
    ("chat", "--policy", "nothing"),
]


def test_no_command_that_needs_no_model_loads_torch(tmp_path, tiny):
    (tmp_path / "a.txt").write_text("The gate opens at nine.")
    texts = [("a", "One."), ("b", "Two.")]
    Library(tmp_path / "library").add(tiny.model, tiny.tokenizer, texts)
    typed = [*SAID, FAILED, *REFUSED]
    commands = [[word.format(folder=tmp_path) for word in words] for words in typed]
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(commands)],
        capture_output=True,
        text=True,
        check=True,
    )
    found = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("[[")]
    statuses = [0] * len(SAID) + [1] + [2] * len(REFUSED)
    assert found == [[each, status, []] for each, status in zip(commands, statuses, strict=True)]


def test_the_devices_that_may_be_named_are_those_of_torch():
    with pytest.raises(RuntimeError) as refused:
        torch.device("nothing")
    (named,) = re.findall(r"Expected one of (.*) device type", str(refused.value))
    assert set(named.split(", ")) <= set(DEVICES)


def test_what_is_given_twice_is_refused_by_its_name(refused, document):
    said = refused("ask", document, "-q", "Who?", "--question", "Why?")
    assert said.startswith("snapkv: error: question: expected it once, got --question 2 times")


def test_an_assistant_that_is_none_names_itself(snapkv, tiny, document, monkeypatch):
    from snapkv.app.models import load

    monkeypatch.setattr(
        "snapkv.cli.loading.load", lambda **given: load(**given) if "name" in given else tiny
    )
    done = snapkv("ask", document, "-q", "Who?", "--assistant", "./nowhere")
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("snapkv: error: assistant: expected an existing file or folder")
