"""What may be imported without being asked; `make check` judges who may import whom."""

import subprocess
import sys

import pytest

import snapkv


def test_the_public_names_are_sorted_and_exist():
    assert snapkv.__all__ == sorted(snapkv.__all__)
    assert all(getattr(snapkv, name).__module__.startswith("snapkv") for name in snapkv.__all__)
    with pytest.raises(AttributeError, match="no attribute 'SnapKv'"):
        _ = snapkv.SnapKv


def test_importing_the_package_and_its_command_line_loads_no_torch():
    code = "import sys, snapkv, snapkv_app.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_the_cache_loads_nothing_optional():
    kernels = ("snapkv.ops.ragged.triton", "snapkv.ops.votes.triton")
    optional = ("xberg", "pypdfium2", "inscriptis", "lxml", "gguf", "matplotlib", "vllm", *kernels)
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
