"""The rooms of the package and who may look into whom; what may be imported without being asked."""

import subprocess
import sys
from pathlib import Path

import pytest

import snapkv
from tests.structure import house
from tests.structure.source import Source, import_circles

SOURCE = Source(Path(snapkv.__file__).parent)

GOOD = {
    "__init__.py": "from typing import TYPE_CHECKING\n"
    "if TYPE_CHECKING:\n    from snapkv.hf import Cache\n__version__ = '1'",
    "__main__.py": "from snapkv.cli import main",
    "py.typed": "",
    "errors.py": "class Error(Exception): ...",
    "ops/__init__.py": "from snapkv.ops.api import top",
    "ops/api.py": "from snapkv.errors import Error\ndef top(): ...",
    "policies/__init__.py": "from snapkv import ops\nfrom snapkv.errors import Error",
    "storage/__init__.py": "",
    "storage/dense.py": "from snapkv import ops\n"
    "class Dense:\n    def clear(self):\n        self.keys = self.values = None",
    "cache/layer.py": "from snapkv.storage.dense import Dense\n"
    "def view(layer):\n    keys = layer.keys\n    return record(keys=keys, values=layer.values)",
    "hf/__init__.py": "from .attention import attend\nclass Cache: ...",
    "hf/attention.py": "from snapkv.cache.layer import view\n"
    "def attend(layer):\n    return isinstance(layer, dict) and layer.keys.copy()",
    "document.py": "from snapkv.hf import Cache\nimport snapkv.plan",
    "plan/__init__.py": "def choose():\n    from snapkv.cache.layer import view",
    "serving/__init__.py": "from snapkv import ops, policies",
    "lab/run.py": "from snapkv import __version__, document",
    "cli/__init__.py": "import snapkv_lab.run",
}
RULES = {
    rule.__name__: rule
    for rule in (
        house.strangers,
        house.upward_imports,
        house.room_circles,
        import_circles,
        house.states_written_elsewhere,
    )
}


@pytest.fixture
def made_up(tmp_path):
    """A source of the good files, with others added or put in their place."""

    def make(**changed):
        for name, text in {**GOOD, **changed}.items():
            path = tmp_path / "snapkv" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return Source(tmp_path / "snapkv")

    return make


@pytest.mark.parametrize("rule", RULES)
def test_the_source_keeps_the_rules_of_the_house(rule):
    assert RULES[rule](SOURCE) == []


@pytest.mark.parametrize("rule", RULES)
def test_a_good_source_breaks_no_rule(made_up, rule):
    assert RULES[rule](made_up()) == []


@pytest.mark.parametrize(
    ("rule", "name", "text", "found"),
    [
        ("strangers", "utils.py", "", ["utils.py"]),
        ("strangers", "more/__init__.py", "", ["more"]),
        ("upward_imports", "errors.py", "import snapkv.ops.api", ["snapkv.ops.api"]),
        ("upward_imports", "errors.py", "from . import ops", ["snapkv.ops"]),
        ("upward_imports", "cache/a.py", "def f():\n from snapkv.hf import Cache", ["snapkv.hf"]),
        (
            "upward_imports",
            "cache/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n from snapkv.hf import Cache",
            ["snapkv.hf"],
        ),
        ("upward_imports", "hf/a.py", "from snapkv import __version__", ["snapkv"]),
        ("upward_imports", "storage/a.py", "from snapkv import policies", ["snapkv.policies"]),
        ("upward_imports", "serving/a.py", "import snapkv.cache.layer", ["snapkv.cache.layer"]),
        (
            "upward_imports",
            "serving/documents/files.py",
            "import snapkv.cache.layer, snapkv_lab.run",
            ["snapkv_lab.run"],
        ),
        ("upward_imports", "lab/a.py", "from snapkv import cli", ["snapkv.cli"]),
        ("room_circles", "plan/more.py", "import snapkv.document", ["document", "plan"]),
        (
            "import_circles",
            "ops/api.py",
            "from snapkv import ops",
            ["snapkv.ops", "snapkv.ops.api"],
        ),
        (
            "import_circles",
            "hf/__init__.py",
            "from snapkv.hf import attention\nclass Cache: ...",
            None,
        ),
        ("states_written_elsewhere", "hf/a.py", "def f(x): x.layer.keys = 1", ["hf/a.py:1"]),
        ("states_written_elsewhere", "hf/a.py", "def f(x): x.keys, y = 1, 2", ["hf/a.py:1"]),
        ("states_written_elsewhere", "cache/a.py", "def f(x): x.values += 1", ["cache/a.py:1"]),
        ("states_written_elsewhere", "cache/a.py", "def f(x): x.keys[:, 1] = 2", ["cache/a.py:1"]),
        ("states_written_elsewhere", "cache/a.py", "def f(x): x.keys.copy_(2)", ["cache/a.py:1"]),
        ("states_written_elsewhere", "lab/a.py", "def f(x): setattr(x, 'keys', 1)", ["lab/a.py:1"]),
        ("states_written_elsewhere", "cache/a.py", "def f(x): del x.values", ["cache/a.py:1"]),
    ],
)
def test_a_bad_source_is_named(made_up, rule, name, text, found):
    told = RULES[rule](made_up(**{name: text}))
    if found is None:
        assert told == []
    elif rule.endswith("circles"):
        assert told == [found]
    elif rule == "upward_imports":
        assert told == [f"{name} imports {module}" for module in found]
    else:
        assert told == found


def test_the_public_names_are_sorted_and_exist():
    assert snapkv.__all__ == sorted(snapkv.__all__)
    assert all(getattr(snapkv, name).__module__.startswith("snapkv") for name in snapkv.__all__)
    with pytest.raises(AttributeError, match="no attribute 'SnapKv'"):
        _ = snapkv.SnapKv


def test_importing_the_package_and_its_command_line_loads_no_torch():
    code = "import sys, snapkv, snapkv.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_the_cache_loads_nothing_optional():
    kernels = ("snapkv.ops.ragged.triton", "snapkv.ops.votes.triton")
    optional = ("pypdf", "bs4", "gguf", "matplotlib", "vllm", *kernels)
    code = (
        "import sys\nfrom snapkv import CompressedCache\n"
        f"sys.exit(any(n in sys.modules for n in {optional!r}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_the_package_registers_nothing():
    code = (
        "import sys\nfrom snapkv import CompressedCache, install\n"
        "from transformers.modeling_utils import AttentionInterface\n"
        "sys.exit(any(n.startswith('snapkv') for n in AttentionInterface._global_mapping))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
