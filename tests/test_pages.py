"""What the repository's pages say is run, and is true."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def blocks(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


PRINTED = {"README.md 1": ("2.0", "tokens seen")}
"""What a block prints, where it prints."""


@pytest.mark.parametrize(
    ("name", "code"),
    [
        pytest.param(f"{page.name} {number}", block, id=f"{page.name} {number}")
        for page in PAGES
        for number, block in enumerate(blocks(page), 1)
    ],
)
def test_python_blocks_run(name, code, tmp_path):
    shutil.copy(ROOT / "LICENSE", tmp_path)  # what the first block reads
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(text in done.stdout for text in PRINTED.get(name, ()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


def test_commands_of_the_readme_exist():
    """Options that the README shows are options the command line has."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in re.findall(r"snapkv (ask|generate|policies|eval needle)([^\n|]*)", text):
        shown = set(re.findall(r"--[a-z-]+", command[1]))
        help_text = subprocess.run(
            [sys.executable, "-m", "snapkv", *command[0].split(), "--help"],
            capture_output=True,
            text=True,
            check=True,
            env={"COLUMNS": "200", "PATH": "", "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        ).stdout
        assert all(option in help_text for option in shown), command
