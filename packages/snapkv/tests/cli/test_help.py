"""The help of every command: examples that work, no types of flags, one meaning for every name."""

import functools
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict

import pytest
from typer.main import get_command
from typer.models import OptionInfo

from snapkv.cli.app import program
from snapkv.cli.examples import EXAMPLES
from snapkv.errors import ModelNotFoundError
from tests.app.test_text_files import write_pdf
from tests.cli.commands import commands, options_of

COMMANDS = [str(command) for command in commands()]
EVERY = ["", *dict.fromkeys(name.rpartition(" ")[0] for name in COMMANDS if " " in name), *COMMANDS]
LINES = [(words, line) for words, lines in EXAMPLES.items() for line in lines]

SAME = {
    "batch": "together",
    "baseline": "beside",
    "budget": "[Tt]okens (that are )?kept",
    "chunk_tokens": "^Tokens of a chunk",
    "cloze": "begin ",
    "data": "file|folder",
    "depths": "places",
    "digits": "of the .*number",
    "document_tokens": "^length that ((documents|texts) are|every fourth text is) cut to",
    "documents": "^[Hh]ow many",
    "generation_windows": "(parts|windows) of the answer",
    "group_reduce": "heads that share keys",
    "items": "^how many",
    "json": "^Print one JSON object",
    "keep_ratio": "kept|keep",
    "kernel_size": "[Ww]idth of the pooling",
    "kinds": "which|what",
    "length": "^[Tt]okens of (a|the) prompt",
    "lengths": "[Tt]okens",
    "limit": "^Samples of every",
    "max_new_tokens": "^[Ww]here an answer is cut off",
    "model": "^Hub id, folder",
    "output": "^(File|The page)",
    "permutations": "^runs of every",
    "policy": "^Method",
    "prefill": "^How (the prompt is|prompts are) read",
    "protect_first": "^First tokens of (the|every) prompt that stay",
    "question": "^What to (answer|ask)",
    "results": "^Folder of",
    "samples": "documents|texts|prompts",
    "samples_each": "samples|lists|texts|questions",
    "seed": "^[Oo]f ",
    "set": "arameter of the method",
    "tasks": "[Tt]asks|which of",
    "temperature": "0 takes the likeliest token",
    "template": "tokenizer",
    "threshold": "^attention",
    "to": "^Folder of the",
    "trust_remote_code": "^Run code",
    "verbose": "^Show what transformers",
    "window_size": "[Tt]okens .*(vote|kept)",
}
"""What the helps of an option have in common that several commands explain in their own words."""


@functools.cache
def meanings():
    """Of every option, what each command says of it: (command, type, help)."""
    said = defaultdict(list)
    for command, option in options_of(lambda option: isinstance(option.marks[0], OptionInfo)):
        info, flag = option.marks[0], option.flag.partition("/")[0]
        name = flag.removeprefix("--").replace("-", "_")
        said[name].append((str(command), option.shown_kind, info.help))
    return said


@pytest.mark.parametrize("words", EVERY, ids=lambda words: words or "snapkv")
def test_every_help_has_examples_of_that_command_and_is_the_same_in_short(snapkv, words):
    shown = snapkv(*words.split(), "--help")
    assert (shown.status, shown.err) == (0, "")
    assert snapkv(*words.split(), "-h") == shown
    assert 1 <= len(EXAMPLES[words]) <= 2
    for line in EXAMPLES[words]:
        assert f" {line} " in shown.out  # on one line, to be copied
        assert line.startswith(f"snapkv {words}".strip())
    assert "<bool>" not in shown.out


def test_examples_are_of_commands_only():
    assert sorted(EXAMPLES) == sorted(EVERY)


def test_the_parser_takes_every_example():
    for words, line in LINES:
        command, typed = get_command(program()), shlex.split(line)[1:]
        context = command.make_context("snapkv", list(typed))
        while hasattr(command, "commands"):
            name, command, typed = command.resolve_command(context, typed)
            context = command.make_context(name, list(typed), parent=context)
        assert context.command_path.startswith(f"snapkv {words}".strip())


LIBRARIES = ("library list", "library check", "library remove")
NEEDS_MORE = {*LIBRARIES, "serve", "eval lm-eval"}
"""Commands that need what is not there: a library, vLLM, lm-eval."""


@pytest.fixture
def begun(here, monkeypatch):
    """A folder with the files of the examples; commands end where a model would be loaded."""

    def load(**_):
        raise ModelNotFoundError("the command has begun")

    monkeypatch.setattr("snapkv.cli.loading.load", load)
    write_pdf(here / "contract.pdf", ["Either party may end it."])
    (here / "notes.txt").write_text("The gate opens at nine. " * 40)


@pytest.mark.parametrize(
    "line",
    [
        line
        for words, line in LINES
        if words not in NEEDS_MORE and "--library" not in line and " library list" not in line
    ],
)
def test_every_example_begins(snapkv, begun, line):
    done = snapkv(*shlex.split(line)[1:])
    assert "the command has begun" in done.err or done.status == 0, done.err


def test_an_option_has_one_type_and_one_meaning_in_all_commands():
    for name, said in meanings().items():
        assert len({kind for _, kind, _ in said}) == 1, said
        if len({text for _, _, text in said}) > 1:
            assert name in SAME, "say what these have in common, or choose another name"
            for command, _, text in said:
                assert re.search(SAME[name], text), (command, text)


def test_what_is_said_to_be_the_same_is_said_in_several_ways():
    several = {name for name, said in meanings().items() if len({text for *_, text in said}) > 1}
    assert set(SAME) == several


@pytest.mark.parametrize(
    "command",
    [each for each in commands() if any(option.required for option in each.options)],
    ids=str,
)
def test_what_is_missing_is_shown_by_an_example(snapkv, command):
    done = snapkv(*command.words)
    assert done.status == 2
    assert f"; write for instance {EXAMPLES[str(command)][0]}\n" in done.err
    assert done.err.count("\n") == 1


def test_without_documents_or_a_prompt_an_example_is_shown_and_nothing_is_waited_for(snapkv):
    for words in (("ask", "-q", "Why?"), ("generate",)):
        done = snapkv(*words)
        assert done.status == 2
        assert f"for instance {EXAMPLES[words[0]][0]}" in done.err


@pytest.mark.parametrize(
    ("typed", "offered"), [("snapkv lib", "library"), ("snapkv ask --quest", "--question")]
)
def test_a_shell_completes_commands_and_options(typed, offered):
    words = typed.split()
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "snapkv"],
        env={**os.environ, **asked, "_SNAPKV_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [offered]


def test_the_budget_says_what_it_is_where_none_is_given(snapkv):
    for command, _ in options_of(lambda option: option.name == "budget"):
        shown = " ".join(snapkv(*command.words, "--help").out.replace("│", " ").split())
        text = shown[shown.index("--budget") :]
        assert re.match(r"--budget\b[^[]*\[default: \(?(auto|\d+)", text), (
            str(command),
            text[:200],
        )


@pytest.mark.parametrize("name", ["demo", "ask", "generate", "chat", "plan", "policies", "serve"])
def test_a_command_comes_without_the_laboratory(name):
    code = (
        f"import sys; from snapkv.cli.app import run; run([{name!r}, '-h']); "
        "print([each for each in sys.modules if each.startswith(('snapkv_lab', 'torch'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
