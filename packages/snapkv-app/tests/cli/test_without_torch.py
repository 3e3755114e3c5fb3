"""Commands and errors that need no model do not wait for the import of torch."""

import json
import re

import pytest
import torch

from snapkv.validation import AUTO, DEVICES
from snapkv_app import Library
from snapkv_app.library.folder import Folder
from snapkv_app.library.records import Text
from tests.cli.commands import options_of
from tests.cli.conftest import run_python

RUN = """
import contextlib, io, json, sys, time
from snapkv_app.cli.app import run
for command in json.load(sys.stdin):
    start, said = time.process_time(), io.StringIO()
    with contextlib.redirect_stderr(said):
        status = run(command)
    assert time.process_time() - start < 1
    heavy = [name for name in ("torch", "transformers") if name in sys.modules]
    print(json.dumps([command, status, heavy, said.getvalue()]), file=sys.stderr)
"""
PLAN = ("plan", "--context", "120k", "--model")
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
    *(("plan", "--shapes"), ("plan", "--context", "4k", "--model", "demo", "--json")),
    (*PLAN, "llama-3.1-8b", "--gpu-memory", "80GB", "--batch", "8"),
    (*PLAN, "{folder}/model", "--budget", "12%", "--bits", "k8v4", "--gpu-memory", "RTX 4090"),
    *((*words, "--help") for words in (("plan",), ("ask",), ("chat",), ("library", "add"))),
]
FAILED = ("library", "add", "{folder}/none.txt", "--to", "{folder}/library")
REFUSED = [
    *(("ask", "{folder}/none.txt", "-q", "Who?"), ("ask", "{folder}/a.txt"), (*ASK, "--no")),
    ("ask", "--library", "{folder}/none", "-q", "Who?"),
    *(("chat", "{folder}/none.txt"), ("inspect", "{folder}/none.txt", "-q", "Who?")),
    ("generate", "{folder}/none.txt"),
    *(("plan",), ("plan", "--context", "many"), (*PLAN, "qwen3-9b"), (*PLAN, "{folder}/none")),
    *((*PLAN, "nobody/nothing"), (*PLAN, "./none.gguf"), (*PLAN, "{folder}/a.txt")),
    *((*PLAN, "demo", "--gpu-memory", given) for given in ("A100", "H200-80GB", "H1000", "80")),
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
    ("plan", "--context", "4k", "--dtype", "int8"),
    ("inspect", "{folder}/a.txt", "-q", "Who?", "--beside", "snapvk@64"),
    ("inspect", "{folder}/a.txt", "-q", "Who?", "--beside", "h2o@many"),
    ("chat", "--policy", "nothing"),
    *((*ASK, "--set", text) for text in ("foo", "foo=1", "=1", "budget.foo=1")),
    (*ASK, "--policy", "adakv", "--set", "windw_size=8"),
    (*ASK, "--policy", "full", "--budget", "64"),
    (*ASK, "--policy", "h2o", "--pooling", "fading"),
    *((*ASK, "--model", name) for name in ("./none", "a/b/c", "{folder}", "{folder}/a.txt", " ")),
    (*ASK, "--assistant", "./none"),
    ("chat", "--model", "none.gguf"),
    ("generate", "-p", "x", "--model", "~/no-such-folder"),
    ("demo", "--model", "./none"),
    ("demo", "--budget", "2"),
    ("inspect", "{folder}/a.txt", "-q", "Who?", "--model", "./none"),
    ("library", "add", "{folder}/a.txt", "--to", "{folder}/locked"),
    ("library", "add", "{folder}/a.txt", "--to", "{folder}/new", "--model", "./none"),
    ("ask", "--library", "{folder}/library", "-q", "Zebra?"),
    ("ask", "--library", "{folder}/library", "-q", "One?", "--model", "./none"),
    ("ask", "--library", "{folder}/changed", "-q", "gate?"),
    ("serve", "demo"),
]
BAD_METHODS = (
    "--budget 2",
    "--window-size 2000 --policy snapkv",
    "--budget auto:lost_vote=2",
    "--decay 0.9 --kernel-size 7",
    "--budget 64 --keep-ratio 0.5",
    "--kernel-size 4",
    "--pooling median",
    "--temperature -1",
    "--policy r-kv --budget 8",
    "--policy snapkv --set pooling=median",
    "--policy streaming-llm --set positions=none",
    "--policy prompt-then-decode --set prompt=snapvk",
    "--policy adakv --budget 64 --set budget=128",
)
NO_NUMBER = (
    "expected a whole number such as 4096, 4k or 1.5k, but got 'many'",
    f"a share such as 12%, a size such as 64MiB, or {AUTO}, but got 'many'",
)


@pytest.fixture
def libraries(tmp_path, tiny):
    """One that can be asked, one with a changed file, and one that another process changes."""
    (tmp_path / "a.txt").write_text("The gate opens at nine.")
    tiny.model.save_pretrained(tmp_path / "model")
    texts = [("a", "One."), ("b", "Two.")]
    Library(tmp_path / "library").add(tiny.model, tiny.tokenizer, texts)
    read = Text(name="a.txt", text="The gate opens at ten.", source=str(tmp_path / "a.txt"))
    Library(tmp_path / "changed").add(tiny.model, tiny.tokenizer, [read])
    with Folder(tmp_path / "locked").changing():
        yield


@pytest.mark.usefixtures("libraries")
def test_commands_without_a_model_do_not_import_torch(tmp_path):
    """Refused commands do not import torch either, for any integer of any command."""
    typed = [*SAID, FAILED, *REFUSED, *((*ASK, *given.split()) for given in BAD_METHODS)]
    commands = [[word.format(folder=tmp_path) for word in words] for words in typed]
    commands += [
        command.call(option.flag, number, document=tmp_path / "a.txt")
        for command, option in options_of(lambda option: option.kind is int)
        for number in ("-1", "9" * 30, "many")
    ]
    assert len(commands) > len(typed) + 150
    done = run_python("-c", RUN, input=json.dumps(commands), check=True)
    found = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("[[")]
    statuses = ([0] * len(SAID) + [1] + [2] * len(commands))[: len(commands)]
    expected = [[each, status, []] for each, status in zip(commands, statuses, strict=True)]
    assert [each[:3] for each in found] == expected
    for command, status, _, said in found:
        if status == 2:
            assert said.startswith("snapkv: error: "), command
            assert said.count("\n") == 1, command
            assert command[-1] != "many" or any(line in said for line in NO_NUMBER), said


def test_known_devices_equal_those_of_torch():
    with pytest.raises(RuntimeError) as refused:
        torch.device("nothing")
    (named,) = re.findall(r"Expected one of (.*) device type", str(refused.value))
    assert set(named.split(", ")) <= set(DEVICES)


def test_repeated_option_is_refused_by_name(refused, document):
    said = refused("ask", document, "-q", "Who?", "--question", "Why?")
    assert said.startswith("snapkv: error: question: the option --question is used 2 times")


def test_missing_assistant_is_reported_as_assistant(snapkv, tiny, document, monkeypatch):
    from snapkv_app.models import load

    monkeypatch.setattr(
        "snapkv_app.cli.loading.load", lambda **given: load(**given) if "name" in given else tiny
    )
    done = snapkv("ask", document, "-q", "Who?", "--assistant", "./nowhere")
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("snapkv: error: assistant: expected an existing file or folder")
