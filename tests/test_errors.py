"""A missing package is named by the command that brings it, in a checkout and from a wheel."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

import snapkv
from snapkv.errors import install_command, missing_package

SOURCE = Path(snapkv.__file__).parent
PROJECT = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
OPTIONAL = {
    re.match(r"[\w.-]+", line)[0].lower(): line
    for lines in PROJECT["optional-dependencies"].values()
    for line in lines
}
CALLS = re.compile(r"\b(?:missing_package|install_command)\(([^()]*)\)")


def named_packages():
    """Every package that some message names, by file."""
    for path in sorted(SOURCE.rglob("*.py")):
        if path.name == "errors.py":
            continue
        for arguments in CALLS.findall(path.read_text()):
            texts = re.findall(r"f?[\"']([^\"']*)[\"']", arguments)
            yield from ((path.name, text) for text in texts if re.fullmatch(r"[\w.-]+", text))


def test_what_messages_name_is_what_pyproject_asks_for():
    found = list(named_packages())
    assert {name for _, name in found} >= {"matplotlib", "jinja2", "lm-eval"}
    assert not [(file, name) for file, name in found if name.lower() not in OPTIONAL]


def test_no_message_names_an_extra_of_a_package_that_no_index_has():
    said = {path.name for path in SOURCE.rglob("*.py") if "snapkv[" in path.read_text()}
    assert not said


@pytest.mark.parametrize("package", ["pypdf", "gguf", "bm25s", "PyStemmer", "wonderwords"])
def test_packages_come_in_the_releases_that_are_asked_for(monkeypatch, package):
    lines = [f"{OPTIONAL[package.lower()]}; extra == 'some'", "torch>=2.8"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: lines)
    assert install_command(package) == f"pip install '{OPTIONAL[package.lower()]}'"


def test_without_metadata_packages_are_named_all_the_same(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    assert install_command("gguf", "accelerate") == "pip install 'gguf' 'accelerate'"


def test_the_error_says_what_for():
    said = str(missing_package("plot: drawing figures", "matplotlib"))
    assert said.startswith("plot: drawing figures needs the package matplotlib, which is not ins")
    assert "; run pip install 'matplotlib" in said
