"""Errors about a missing package name the command that installs it."""

import importlib.metadata

import pytest

from snapkv.errors import install_command, missing_package


@pytest.mark.parametrize("package", ["pypdfium2", "PyStemmer"])
def test_install_command_has_the_required_versions(monkeypatch, package):
    lines = [f"{package}>=3; extra == 'some'", "torch>=2.8"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: lines)
    assert install_command(package) == f"pip install '{package}>=3'"


def test_install_command_names_packages_without_metadata(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    assert install_command("gguf", "accelerate") == "pip install 'gguf' 'accelerate'"


def test_missing_package_error_says_what_needs_the_package():
    said = str(missing_package("plot: drawing figures", "matplotlib"))
    assert said.startswith("plot: drawing figures needs the package matplotlib, which is not ins")
    assert ". Run pip install 'matplotlib" in said
