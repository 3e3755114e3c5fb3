"""The options of every command: help, examples, and refusals before torch is imported."""

import dis
import importlib
import inspect
import os
import re
import shlex
from collections import defaultdict
from functools import cached_property
from types import CodeType, FunctionType

import pytest
from typer.main import get_command
from typer.models import OptionInfo

from snapkv.errors import InvalidArgumentError
from snapkv_app.cli import app as app_module
from snapkv_app.cli.app import program
from snapkv_app.cli.options import RunOptions
from snapkv_app.cli.outputs import require_outputs
from snapkv_app.cli.policy import build_policy
from tests.app.test_text_files import write_pdf
from tests.cli.commands import commands, options_of
from tests.cli.conftest import run_python

COMMANDS = {str(command): command for command in commands()}
EXAMPLES = [(name, line) for name, command in COMMANDS.items() for line in command.examples]


def test_every_help_has_examples_of_its_command(snapkv):
    groups = dict.fromkeys(name.rpartition(" ")[0] for name in COMMANDS)
    for words in (*groups, *COMMANDS):
        shown = snapkv(*words.split(), "--help")
        assert (shown.status, shown.err) == (0, ""), words
        assert "<bool>" not in shown.out
        assert f" snapkv {words}".rstrip() in re.split("Examples?:", shown.out)[1], words
    for name, line in EXAMPLES:
        assert line.startswith(f"snapkv {name}")
        assert f" {line} " in snapkv(*name.split(), "-h").out  # on one line, to be copied


@pytest.mark.parametrize("line", [line for _, line in EXAMPLES])
def test_parser_accepts_every_example(snapkv, here, nothing_is_loaded, line):
    write_pdf(here / "contract.pdf", ["Either party may end it."])
    (here / "notes.txt").write_text("The gate opens at nine. " * 40)
    words = shlex.split(line)[1:]
    if "snapkv-library" in line or words[0] == "serve" or "lm-eval" in words:
        command = get_command(program())
        context = command.make_context("snapkv", list(words))
        while hasattr(command, "commands"):
            name, command, words = command.resolve_command(context, words)
            context = command.make_context(name, list(words), parent=context)
        return
    done = snapkv(*words)
    assert "the command has begun" in done.err or done.status == 0, done.err


def test_option_has_the_same_type_in_all_commands():
    kinds = defaultdict(set)
    for _, option in options_of(lambda option: isinstance(option.marks[0], OptionInfo)):
        kinds[option.flag.partition("/")[0]].add(option.shown_kind)
    assert [each for each in kinds.items() if len(each[1]) > 1] == []


def test_missing_argument_is_reported_with_an_example(refused):
    needy = [each for each in COMMANDS.values() if any(option.required for option in each.options)]
    for command in needy:
        assert refused(*command.words).endswith(f". For example, run {command.examples[0]}.\n")
    for words in (("ask", "-q", "Why?"), ("generate",)):
        assert f"For example, run {COMMANDS[words[0]].examples[0]}" in refused(*words)


def test_help_shows_the_default_budget(snapkv):
    for command, _ in options_of(lambda option: option.name == "budget"):
        shown = " ".join(snapkv(*command.words, "--help").out.replace("│", " ").split())
        text = shown[shown.index("--budget") :]
        assert re.match(r"--budget\b[^[]*\[default: \(?(auto|\d+)", text), (str(command), text[:99])


@pytest.mark.parametrize(
    ("typed", "offered"), [("snapkv lib", "library"), ("snapkv ask --quest", "--question")]
)
def test_shell_completes_commands_and_options(typed, offered):
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    environment = {**os.environ, **asked, "_SNAPKV_COMPLETE": "complete_bash"}
    done = run_python("-m", "snapkv_app", env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [offered]


def test_list_of_commands_imports_no_command():
    code = """
import sys
from snapkv_app.cli.app import run
for words in (["--help"], ["--hepl"], ["aks"], ["-h"]):
    run(words)
listed = set(sys.modules)
for name in ("demo", "ask", "generate", "chat", "plan", "policies", "serve", "library"):
    run([name, "-h"])
assert run(["ask", "nope", "-q", "x"]) == 2
print("modules:", *listed, ";", *sys.modules)
"""
    done = run_python("-c", code, check=True)
    assert all(f" {name.partition(' ')[0]} " in done.stdout for name in COMMANDS)
    listed, called = done.stdout.rpartition("modules:")[2].split(";")
    listed, called = set(listed.split()), set(called.split())
    ours = {name for name in listed if name.startswith("snapkv")}
    assert ours == {
        *("snapkv", "snapkv.errors", "snapkv_app", "snapkv_app.cli"),
        *("snapkv_app.cli.app", "snapkv_app.cli.entry"),
        *("snapkv_app.cli.interrupts", "snapkv.validation"),
        *("snapkv_app.cli.standard_output", "snapkv_lab", "snapkv_lab.cli"),
    }
    assert not {"torch", "transformers", "numpy", "huggingface_hub"} & (listed | called)
    assert not [name for name in called - listed if name.startswith("snapkv_lab")]


def test_line_in_the_list_equals_first_line_of_the_help():
    shown = get_command(program()).commands
    assert len(shown) == len({*app_module._places()}) > 10
    for name, command in shown.items():
        assert app_module._summary(name) == command.help.partition("\n")[0], name
        home = importlib.import_module(app_module._place(name).partition(":")[0])
        assert name in importlib.import_module(home.__package__).SUMMARIES, name


BROUGHT = {
    "plain": ("import typer\napp = typer.Typer(name='plain', help='Brought.')\n", "Brought."),
    "told": ("raise AssertionError('imported to be listed')", "Told without it."),
    "broken": ("import a_package\n\nthat = is_gone", "ModuleNotFoundError: No module named"),
    "other": ("", "AttributeError: module"),
}


def test_broken_command_of_another_package_is_listed_and_reported(
    snapkv, refused, here, monkeypatch
):
    (here / "brought").mkdir()
    (here / "brought" / "__init__.py").write_text("SUMMARIES = {'told': 'Told without it.'}")
    for name, (source, _) in BROUGHT.items():
        (here / "brought" / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(here)
    places = app_module._places() | {name: f"brought.{name}:app" for name in BROUGHT}
    places |= {"gone": "no_such_package.cli:app"}
    monkeypatch.setattr(app_module, "_places", lambda: places)
    monkeypatch.setenv("COLUMNS", "200")
    done = snapkv("--help")
    assert (done.status, done.err) == (0, "")
    for name, (_, line) in (BROUGHT | {"gone": ("", "No module named")}).items():
        assert re.search(rf"│ {name} +.*{line}", done.out), done.out
    for name in ("broken", "other", "gone"):
        said = f"{name}: the command cannot be imported from {places[name]} ("
        assert said in refused(name, "--whatever")
    assert "No such option: --no" in refused("ask", "--no")


@pytest.mark.parametrize(
    "given",
    [
        {"window_size": 1500, "set_": ["budget=2048"]},
        {"budget": 16, "window_size": 8},
        {"budget": 20},
        {"budget": 17, "pooling": "max"},
        {"budget": 17, "kernel_size": "5"},
        {"budget": 17, "set_": ["sink_tokens=0"]},
        {"budget": 40, "policy": "prompt-then-decode", "set_": ["prompt.window_size=39"]},
        {"budget": 33, "policy": "snapkv"},
        {"window_size": 2000, "budget": "auto", "policy": "snapkv"},
        {"budget": {"auto": {"most": 100, "least": 1}}},
        {"decay": 0.5},
        {"budget": 16, "policy": "tova"},
        {"keep_ratio": 1.0, "window_size": 2000},
        {"kernel_size": "1", "budget": 10**15},
    ],
    ids=str,
)
def test_checks_before_torch_refuse_no_valid_parameter(given):
    build_policy(RunOptions(**given))


OURS = ("snapkv_app.cli.", "snapkv_lab.cli.")
CALLBACKS = {name: inspect.unwrap(command.callback) for name, command in COMMANDS.items()}


def words(said):
    """The names and texts in a function, or in a constant."""
    if isinstance(said, FunctionType | CodeType):
        for each in dis.get_instructions(said):
            yield from words(each.argval)
    elif isinstance(said, str):
        yield said
    elif isinstance(said, tuple | list | dict | frozenset):
        for each in said:
            yield from words(each)


def written(kind):
    """What a class has, but for what Python calls by itself: a check does not heed an option."""
    return {name: part for name, part in vars(kind).items() if not name.startswith("__")}


def parts(found):
    """What a name of the command line stands for: functions, those of a class, or a constant."""
    if isinstance(found, property | cached_property):
        found = found.fget if isinstance(found, property) else found.func
    found = inspect.unwrap(found) if inspect.isroutine(found) else found
    if inspect.isclass(found) and found.__module__.startswith(OURS):
        return [part for each in written(found).values() for part in parts(each)]
    is_ours = getattr(found, "__module__", "snapkv_app.cli.").startswith(OURS)
    return [found] if is_ours and found not in CALLBACKS.values() else []


def read_by(command, kind):
    """The words of a command that takes options of a kind, and of all that it calls."""
    own = {name: part for each in reversed(kind.__mro__) for name, part in written(each).items()}
    todo, seen, said = [command, require_outputs], [], set()
    while todo:
        part = todo.pop()
        if any(part is each for each in seen):
            continue
        seen.append(part)
        found = set(words(part))
        said |= found
        if isinstance(part, FunctionType):
            homes = [vars(importlib.import_module(word)) for word in found if word.startswith(OURS)]
            for home in (part.__globals__, own, *homes):
                todo += [each for name in found & home.keys() for each in parts(home[name])]
    return said


def test_no_command_ignores_one_of_its_options():
    for name, command in CALLBACKS.items():
        taken = inspect.get_annotations(command, eval_str=True)
        kind = taken.get("options", object)
        # The callback of `quiet` does all of it.
        names = {*taken, *getattr(kind, "__dataclass_fields__", {})} - {"return", "quiet"}
        assert names - read_by(command, kind) == set(), name


@pytest.mark.parametrize("budget", [-(10**18), 2])
@pytest.mark.parametrize(
    ("given", "least"),
    [
        ({}, 3),
        ({"pooling": "max"}, 3),
        ({"window_size": 64}, 68),
        ({"policy": "snapkv"}, 33),
        ({"policy": "snapkv", "pooling": "fading"}, 36),
        ({"policy": "adakv", "window_size": 8}, 9),
        ({"policy": "kvzip"}, 36),
        ({"policy": "r-kv"}, 9),
        ({"policy": "prompt-then-decode"}, 33),
    ],
    ids=str,
)
def test_too_small_budget_is_refused_with_the_smallest_one(given, least, budget):
    with pytest.raises(InvalidArgumentError) as error:
        RunOptions(**given, budget=budget)
    said = str(error.value)
    assert f"at least {least} " in said or f"above window_size={least - 1}," in said
    assert build_policy(RunOptions(**given, budget=least))
    with pytest.raises(InvalidArgumentError):
        RunOptions(**given, budget=least - 1)
