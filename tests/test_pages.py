"""The code, commands, links, figures and tables on the repository's pages are right."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from snapkv.kvpress_names import instead_of
from snapkv_app.cli.app import program, run
from snapkv_lab import drawing
from snapkv_lab.experiments import documentation, picture
from snapkv_lab.experiments.speed import SPEED

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def blocks(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


PRINTED = re.search(r"It prints:\n\n```\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)[
    1
]
"""What the README says that its first block prints."""


@pytest.mark.parametrize(
    ("name", "code"),
    [
        pytest.param(
            f"{page.name} {number}",
            block,
            id=f"{page.name} {number}",
            marks=() if page.name == "README.md" else pytest.mark.docs,  # `make docs` runs them
        )
        for page in PAGES
        for number, block in enumerate(blocks(page), 1)
    ],
)
def test_python_blocks_of_pages_run(name, code, tmp_path):
    shutil.copy(ROOT / "LICENSE", tmp_path)  # which some blocks read
    # The inputs of a document name the cache as all supported releases of transformers do, and the
    # newest one warns.
    strict = ("-W", "error::FutureWarning") if name == "README.md 1" else ()
    warnings = ("-W", "error::DeprecationWarning", *strict)
    done = subprocess.run(
        [sys.executable, *warnings, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert name != "README.md 1" or done.stdout == PRINTED


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_have_a_target(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


def shown_commands():
    """Yield the name of the page and every `snapkv` command in its blocks."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        fences = re.findall(r"^```([^\n]*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
        for block in (block for kind, block in fences if kind in ("", "console")):
            for line in re.findall(r"(?:^|[|$] )snapkv ([^\n|]*)", block, flags=re.MULTILINE):
                yield page.name, line


def test_shown_commands_and_options_exist():
    root = typer.main.get_command(program())
    seen = 0
    for page, line in shown_commands():
        command = root
        for word in line.split():
            if word not in getattr(command, "commands", {}):
                break
            command = command.commands[word]
        known = {name for option in command.params for name in option.opts}
        shown = set(re.findall(r"(?<!\S)(--[a-z-]+|-[a-z])\b", re.sub(r'"[^"]*"', "", line)))
        assert command is not root or "TASK" in line, (page, line)
        passes_on = command.context_settings.get("ignore_unknown_options")  # to vLLM
        named = "TASK" in line or "NAME" in line
        assert shown <= known or passes_on or named, (page, line, shown - known)
        seen += 1
    assert seen > 15


def test_planning_table_equals_the_one_from_its_script():
    page = documentation.PLANNING.read_text(encoding="utf-8")
    assert documentation.BEGIN in page
    assert documentation.fill_planning_table(page) == page


def test_figure_of_the_first_page_shows_its_results():
    def words(svg):
        return re.findall(r"<text[^>]*>([^<]*)</text>", svg)

    figure = documentation.draw_overview(SPEED.results())
    drawn = drawing.encode_figure(figure, ".svg", documentation.STYLE)
    shown = words(documentation.FIGURE.read_text(encoding="utf-8"))
    assert shown == words(drawn.decode())
    assert {"270", "22.5", "full cache"} <= set(shown)


def test_picture_of_the_readme_shows_its_results():
    figure = picture.draw_picture(picture.PICTURE.results())
    drawn = drawing.encode_figure(figure, ".svg", picture.STYLE).decode()
    words = [
        re.findall(r"<text[^>]*>([^<]*)</text>", svg)
        for svg in (drawn, picture.FIGURE.read_text("utf-8"))
    ]
    assert words[0] == words[1]
    assert "Both caches answer: The FNAME field is required to be" in " ".join(words[0])


def migrations():
    """Return the rows of the table of presses in docs/migrating.md: kvpress's code and ours."""
    page = (ROOT / "docs/migrating.md").read_text(encoding="utf-8")
    table = page.partition("### Which policy replaces which press?")[2].partition("### ")[0]
    return re.findall(r"^\| `(.*)` \| `(.*)` \|$", table, flags=re.MULTILINE)


def test_error_for_a_kvpress_name_equals_the_line_in_migrating_md():
    lines = {}
    for theirs, ours in migrations():
        lines.setdefault(re.findall(r"\w+Press", theirs)[0], ours)
    for name, line in lines.items():
        assert instead_of(name) == f"Write {line}, see docs/migrating.md"


_MIGRATED = """
from snapkv import *
from snapkv_app.models import load
from snapkv.kvzip import read_context

model = load("demo").model
ids = load("demo").tokenizer("One two three. " * 60, return_tensors="pt").input_ids
for made in [{made}]:
    cache = made if isinstance(made, CompressedCache) else CompressedCache(model, made)
    if cache is not made:
        model.generate(ids, past_key_values=cache, max_new_tokens=2)
    report = cache.report()
    assert report.kept_tokens < report.seen_tokens, made
"""


@pytest.mark.docs
def test_replacement_of_every_press_runs_and_compresses():
    code = _MIGRATED.format(made=", ".join(ours for _, ours in migrations()))
    assert code.count("keep_ratio=0.25") > 10
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_table_of_tested_versions_equals_the_installed_versions():
    """Versions are read from the files that `make` installs from."""
    files = [*ROOT.glob("constraints*.txt"), *ROOT.glob("requirements-ray.txt"), ROOT / "Makefile"]
    text = "".join(file.read_text("utf-8") for file in files)
    page = (ROOT / "docs/stability.md").read_text("utf-8")
    table = page.partition("## What it is tested with")[2].partition("## ")[0]
    rows = dict(re.findall(r"^\| (\w+) \| ([^|]+) \|", table, re.MULTILINE))
    packages = {"Ray": r"ray\[serve\]", "vLLM": "vllm(?:-cpu)?"}
    for name in ("transformers", "torch", "vLLM", "Ray", "kvpress"):
        package = packages.get(name, name)
        installed = set(re.findall(rf"(?:^|\s){package}==([\d.]+)", text, re.MULTILINE))
        installed |= set(re.findall(rf"^{name.upper()} \?= ([\d.]+)", text, re.MULTILINE))
        installed -= {"5.2.0"}  # beside kvpress, which takes no newer one
        assert set(re.findall(r"\d+\.\d+\.\d+", rows[name])) == installed, name
    for target in re.findall(r"`make ([a-z-]+)", table):
        assert re.search(rf"^{target}:", text, re.MULTILINE), target


def test_no_shown_plan_is_refused(capsys):
    shown = [line for _, line in shown_commands() if line.startswith("plan --model")]
    assert len(shown) > 2
    for line in dict.fromkeys(shown):
        assert run(shlex.split(line)) == 0
        assert "refused" not in capsys.readouterr().out, line
