"""The commands of the quickstart and the notebook print the shown output."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fresh_process import run_python

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```console\n\$ (.*?)\n(.*?)```", PAGE, re.S)


def as_pattern(expected):
    """Return a pattern in which dots match the rest of a line, or any lines if they stand alone."""
    lines = []
    for line in expected.rstrip("\n").split("\n"):
        if line == "...":
            lines.append(r"(?:.*\n)*?")
        else:
            lines.append(r".*?".join(map(re.escape, line.rstrip().split("..."))) + r"[ ]*\n")
    return re.compile("".join(lines))


def test_dots_of_the_expected_output_match_any_text():
    assert as_pattern("a ... c\n...\nd").fullmatch("a b c\nx\ny\nd\n")
    assert not as_pattern("a ... c\nd").fullmatch("a b c\nx\nd\n")
    assert not as_pattern("a.c").fullmatch("abc\n")


@pytest.mark.parametrize(
    ("command", "expected"),
    [pytest.param(*block, id=" ".join(block[0].split()[:2])) for block in BLOCKS],
)
def test_quickstart_command_prints_the_shown_output(command, expected, tmp_path):
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs/garden.pdf", tmp_path / "docs")
    program, *arguments = shlex.split(command)
    assert program == "snapkv"
    done = subprocess.run(
        [sys.executable, "-m", "snapkv_app", *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "80", "PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == 0, done.stdout
    assert as_pattern(expected).fullmatch(done.stdout), done.stdout


def test_quickstart_shows_ask_inspect_and_plan():
    assert [command.split()[1] for command, _ in BLOCKS] == ["ask", "inspect", "plan"]


@pytest.mark.docs
def test_notebook_runs_from_top_to_bottom(tmp_path):
    """Its cells run in one new process, as in a kernel, without a network."""
    cells = json.loads((ROOT / "docs/notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(sources) > 5
    assert not any(cell.get("outputs") for cell in cells)
    printed = run_python("-c", "\n\n".join(sources), folder=tmp_path)
    assert "blue stone" in printed
    assert (tmp_path / "report.html").stat().st_size > 10_000
