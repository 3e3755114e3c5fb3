"""What is listed as what the plugin stands on is what the tests look at."""

import ast
from pathlib import Path

from snapkv_vllm import versions
from tests.serving.seams import SEAMS, VERSIONS


def test_every_part_has_a_test_of_its_own():
    source = Path(__file__).parent.joinpath("vllm/test_seams.py").read_text(encoding="utf-8")
    found = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    named = [seam.test for seam in SEAMS]
    assert len(named) == len(set(named))
    assert set(named) <= found


def test_the_versions_are_those_that_pass():
    releases = [tuple(map(int, version.split("."))) for version in VERSIONS]
    assert releases == sorted(releases)
    assert releases[0] == versions.OLDEST
