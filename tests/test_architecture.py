"""Importing the package imports nothing optional, and the places in structures.md exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import snapkv


def test_public_names_are_sorted_and_exist():
    assert snapkv.__all__ == sorted(snapkv.__all__)
    assert all(getattr(snapkv, name).__module__.startswith("snapkv") for name in snapkv.__all__)
    with pytest.raises(AttributeError, match="no attribute 'SnapKv'"):
        _ = snapkv.SnapKv


def test_importing_the_package_and_its_command_line_does_not_import_torch():
    code = "import sys, snapkv, snapkv_app.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_the_cache_imports_no_optional_package():
    kernels = ("snapkv.ops.ragged.triton", "snapkv.ops.votes.triton")
    optional = ("xberg", "pypdfium2", "inscriptis", "lxml", "gguf", "matplotlib", "vllm", *kernels)
    code = (
        "import sys\nfrom snapkv import CompressedCache\n"
        f"sys.exit(any(n in sys.modules for n in {optional!r}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_the_package_registers_no_attention_function():
    code = (
        "import sys\nfrom snapkv import CompressedCache, install\n"
        "from transformers.modeling_utils import AttentionInterface\n"
        "sys.exit(any(n.startswith('snapkv') for n in AttentionInterface._global_mapping))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


STRUCTURES = (Path(__file__).parents[1] / "docs/structures.md").read_text("utf-8")
PLACES = re.findall(
    r"`([a-z_/]+\.py)(?:: ([\w., ]+))?`", STRUCTURES.partition("## Where do I look?")[2]
)


@pytest.mark.parametrize(("path", "names"), PLACES, ids=lambda text: text.replace("/", "."))
def test_places_named_in_structures_md_exist(path, names):
    sources = Path(__file__).parents[1].glob(f"packages/*/src/snapkv*/{path}")
    texts = [source.read_text("utf-8") for source in sources]
    assert texts, "there is no such file"
    for name in re.findall(r"\w+", names):
        assert any(re.search(rf"(def|class) {name}\b|^{name}\b", text, re.M) for text in texts), (
            name
        )
