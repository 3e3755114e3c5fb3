"""The rooms of the package and who may look into whom; what may be imported without being asked."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import snapkv

SOURCE = Path(snapkv.__file__).parent

# From the ground up: a room may import from its own row and from the rows above it in this list.
ROWS = (
    ("errors", "validation", "writing"),
    ("ops",),
    ("policies", "rotary", "projections"),
    ("cache",),
    ("masks", "faithfulness"),
    ("calls", "selection"),
    ("attention", "generation"),
    ("installation",),
    ("plan",),
    ("prefill", "document", "kvzip", "decoding"),
    ("app", "serving"),
    ("lab",),
    ("cli",),
)

# The cache puts the seam into place when it is made, and the seam knows the cache.
EXCEPTIONS = {("cache", "installation")}


def rooms():
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts[0] not in ("__init__", "__main__"):
            yield parts[0], path


def imported_rooms(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("snapkv"):
            package = node.module.split(".")[1:]
            yield from package[:1] or [name.name for name in node.names]


def row_of(room):
    found = [index for index, row in enumerate(ROWS) if room in row]
    assert found, f"{room} has no row: place it in ROWS"
    return found[0]


@pytest.mark.parametrize(
    ("room", "path"), [pytest.param(*r, id=str(r[1].relative_to(SOURCE))) for r in rooms()]
)
def test_imports_go_down_the_rows_only(room, path):
    for other in imported_rooms(path):
        if other in ("__version__", room) or (room, other) in EXCEPTIONS:
            continue
        assert row_of(other) <= row_of(room), f"{room} must not import {other}"


def test_the_public_names_are_sorted_and_exist():
    assert snapkv.__all__ == sorted(snapkv.__all__)
    assert all(getattr(snapkv, name).__module__.startswith("snapkv") for name in snapkv.__all__)
    with pytest.raises(AttributeError, match="no attribute 'SnapKv'"):
        _ = snapkv.SnapKv


def test_importing_the_package_and_its_command_line_loads_no_torch():
    code = "import sys, snapkv, snapkv.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_the_cache_loads_nothing_optional():
    kernels = ("snapkv.ops.triton_ragged", "snapkv.ops.triton_votes")
    optional = ("pypdf", "bs4", "gguf", "matplotlib", "vllm", *kernels)
    code = f"import sys, snapkv.cache; sys.exit(any(n in sys.modules for n in {optional!r}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_the_package_registers_nothing():
    code = (
        "import sys, snapkv.attention\n"
        "from transformers.modeling_utils import AttentionInterface\n"
        "sys.exit(any(n.startswith('snapkv') for n in AttentionInterface._global_mapping))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_files_stay_within_a_screenful_of_ideas():
    long = {p.name: n for _, p in rooms() if (n := len(p.read_text().splitlines())) > 400}
    assert not long
