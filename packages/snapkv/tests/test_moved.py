"""Code that was written for 0.1.0 finds what has moved since."""

import sys
from importlib import import_module

import pytest

from snapkv.errors import MissingDependencyError
from snapkv.moved import moved


@pytest.fixture(autouse=True)
def _imported_anew(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "modules", sys.modules.copy())


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("snapkv.lab.evaluate.runner", "snapkv_lab.evaluate.runner", "Run"),
        ("snapkv.lab.inspect", "snapkv.inspector", "as_page"),
        ("snapkv.serving", "snapkv_vllm", "engine_args"),
        ("snapkv.serving.settings", "snapkv_vllm.settings", "ServingSettings"),
    ],
)
def test_a_moved_module_is_the_same_under_both_names_and_says_so(old, new, name):
    with pytest.warns(DeprecationWarning, match=r"since 0\.2\.0; the old name goes in 0\.4\.0"):
        found = getattr(import_module(old), name)
    assert found is getattr(import_module(new), name)
    assert import_module(new).__name__ == new


@pytest.mark.filterwarnings("ignore:snapkv")
def test_a_package_that_is_missing_is_named_and_a_module_that_never_was_is_not_found():
    moved("snapkv.was", "snapkv_nowhere", "snapkv-nowhere")
    moved("snapkv.had", "snapkv.ops", "snapkv")
    with pytest.raises(MissingDependencyError, match="pip install 'snapkv-nowhere'"):
        import_module("snapkv.was")
    with pytest.raises(ModuleNotFoundError, match=r"snapkv\.ops\.nothing"):
        import_module("snapkv.had.nothing")
