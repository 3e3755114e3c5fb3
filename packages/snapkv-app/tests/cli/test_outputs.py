"""No command overwrites foreign files, and none overwrites its input even with `--force`."""

import os
from pathlib import Path

import pytest

from snapkv_app.cli.interrupts import continues
from snapkv_app.cli.outputs import Output, RowsFile, RunFolder
from tests.cli.commands import commands, options_of
from tests.cli.conftest import run_python

TEXTS = """
model revision device dtype attn_implementation shape assistant files document data
include_path haystack policy decode_policy baseline beside budget pooling group_reduce
window_reduce set_
kernel_size protect kinds question questions prompt answer_start tasks lengths batch datasets
context gpu_memory reserve bandwidth documents positions windows kernels poolings budgets corpora
variants depths keep_ratios corpus methods kernel_sizes ratios hidden_ratios places sources names
bits library size prefill layers turns answer_tokens package ray recall session_bytes
"""
NO_OUTPUT = set(TEXTS.split())
"""Options with a text that name nothing to write, or a folder for files without names."""

MARKED = options_of(lambda option: option.mark(Output))
WRITTEN = [pair for pair in MARKED if type(pair[1].mark(Output)) is Output]
ADDED_TO = [pair for pair in MARKED if pair[1].mark(Output).is_added_to]
FOREIGN = b"somebody's work\n"


def named(pairs):
    return {"argvalues": pairs, "ids": [f"{command} {each.flag}" for command, each in pairs]}


pytestmark = pytest.mark.usefixtures("nothing_is_loaded")


def target_of(option, folder):
    """What to give the option, and the files that it would write."""
    given = folder / "out" if option.mark(Output).files else folder / "out.svg"
    return given, option.mark(Output).targets(given)


def test_every_option_that_names_an_output_is_checked():
    texts = {
        f"{command} {each.name}"
        for command, each in options_of(lambda option: option.kind is str)
        if each.name not in NO_OUTPUT and not each.mark(Output)
    }
    assert not texts, "say in NO_OUTPUT that they write nothing, or mark what they write"
    assert {each.name for _, each in MARKED} == {"output", "plot", "report", "results", "to"}


@pytest.mark.parametrize(("command", "option"), **named(MARKED))
def test_existing_file_is_refused_and_unchanged(refused, document, tmp_path, command, option):
    given, files = target_of(option, tmp_path)
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(FOREIGN)
        said = refused(*command.call(option.flag, given, document=document))
        assert f"{option.name}: the file {str(file)!r} already exists" in said
        assert ("--force" in said) == (not option.mark(Output).is_added_to)
        assert file.read_bytes() == FOREIGN
        file.unlink()


def test_nul_byte_is_refused_in_one_line(refused, document):
    texts = options_of(lambda option: option.kind is str)
    for command, option in texts[::9]:
        said = refused(*command.call(option.flag, "a\0b", document=document))
        assert "arguments: an argument cannot contain a NUL byte" in said, option.name


@pytest.mark.parametrize(("command", "option"), **named(WRITTEN))
def test_command_begins_with_force_or_a_new_name(snapkv, document, tmp_path, command, option):
    given, files = target_of(option, tmp_path)
    call = command.call(option.flag, given, document=document)
    assert "the command has begun" in snapkv(*call).err
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(FOREIGN)
    assert "the command has begun" in snapkv(*call, "--force").err


@pytest.mark.parametrize("link", ["itself", "symbolic", "hard", "in a folder", "relative"])
def test_input_file_is_never_overwritten(refused, document, here, link):
    file, read = here / "page.html", here / "read.gguf"
    read.write_bytes(FOREIGN)
    if link == "symbolic":
        file.symlink_to(read)
    elif link == "hard":
        os.link(read, file)
    else:
        read.rename(file)
        read = {"in a folder": here, "relative": Path("page.html")}.get(link, file)
    given = "page.html" if link == "itself" else file
    call = ("inspect", document, "-q", "Why?", "-o", given, "--model", read, "--force")
    assert "is also one of the input files" in refused(*call)
    assert file.read_bytes() == FOREIGN


@pytest.mark.parametrize(("command", "option"), **named(ADDED_TO))
def test_continued_output_is_accepted(snapkv, document, tmp_path, command, option):
    given, _ = target_of(option, tmp_path)
    match option.mark(Output):
        case RunFolder(files=(record, *_), key=key):
            given.mkdir()
            (given / record).write_text(f'{{"{key}": 1}}')
        case RowsFile(key=key):
            given.write_text(f'{{"{key}": "decode"}}\n')
    done = snapkv(*command.call(option.flag, given, document=document))
    assert "the command has begun" in done.err


@pytest.mark.parametrize(
    ("command", "option"),
    **named([pair for pair in ADDED_TO if type(pair[1].mark(Output)) is RunFolder]),
)
def test_folder_with_foreign_files_is_refused_for_a_run(
    snapkv, document, tmp_path, command, option
):
    given, _ = target_of(option, tmp_path)
    given.mkdir()
    left = given / f".{option.mark(Output).files[0]}.{'a' * 32}.partial"
    left.touch()  # by a run that was killed, which is gone on with
    call = command.call(option.flag, given, document=document)
    assert "the command has begun" in snapkv(*call).err
    (given / "notes.txt").write_bytes(FOREIGN)
    done = snapkv(*call)
    assert done.status == 2
    assert "expected a new or empty folder, or the folder of the same run" in done.err
    assert ", which contains 'notes.txt'. Choose a different folder" in done.err
    assert sorted(given.iterdir()) == [left, given / "notes.txt"]


def test_file_on_standard_input_is_never_overwritten(tmp_path, document):
    with document.open("rb") as stdin:
        call = ("inspect", "-", "-q", "Why?", "-o", str(document), "--force")
        done = run_python("-m", "snapkv_app", *call, stdin=stdin)
    assert done.returncode == 2
    assert "is also one of the input files" in done.stderr


def test_interrupted_command_says_that_it_can_continue():
    continued = {command.words for command, option in ADDED_TO if option.mark(RunFolder)}
    continued.add(("library", "add"))  # whose documents are there one by one
    assert continued == {each.words for each in commands() if continues(each.words)}
