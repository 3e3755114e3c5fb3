"""Every released name still exists, and every public name is documented."""

import json
import re
from pathlib import Path

import snapkv
from tests.release.surface import RECORD, missing, surface

DOCS = Path(__file__).parents[2] / "docs"


def test_removed_names_and_options_are_listed():
    promised = {"python": {"A": ["x", "y"], "B": []}, "commands": {"snapkv ask": ["--a", "--b"]}}
    here = {"python": {"A": ["y", "z"]}, "commands": {"snapkv ask": ["--b", "--c"]}}
    assert list(missing(promised, here)) == ["A x", "B", "snapkv ask --a"]


def test_every_name_and_option_of_the_last_release_exists():
    promised = json.loads(RECORD.read_text("utf-8"))
    assert promised["python"]["SnapKV"][0] == "budget"
    assert "--budget" in promised["commands"]["snapkv ask"]
    assert list(missing(promised, surface())) == []


def test_every_public_name_is_documented():
    pages = "".join((DOCS / name).read_text("utf-8") for name in ("api.md", "policies.md"))
    listed = set(re.findall(r"auto(?:class|function):: snapkv\.(\w+)$", pages, re.MULTILINE))
    assert re.search(r"automodule:: snapkv\.errors\n +:members:$", pages, re.MULTILINE)
    errors = {name for name in snapkv.__all__ if name.endswith("Error")}
    assert set(snapkv.__all__) - errors == listed
