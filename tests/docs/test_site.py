"""The documentation builds without a warning, its links have targets, and its search works."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from snapkv.policies import POLICIES

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build/docs"


@pytest.fixture(scope="module")
def site():
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", str(SITE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return SITE


class Links(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.targets, self.ids = [], set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        self.targets += [given[name] for name in ("href", "src") if given.get(name)]


def test_every_internal_link_and_anchor_has_a_target(site):
    pages = {page: Links(page) for page in site.rglob("*.html")}
    assert len(pages) > 15
    broken = []
    for page, links in pages.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            anchors = pages[file].ids if file in pages else None
            if not file.exists() or (anchors and parts.fragment and parts.fragment not in anchors):
                broken.append(f"{page.name}: {target}")
    assert not broken


def test_every_page_is_in_the_site(site):
    for page in (ROOT / "docs").rglob("*.md"):
        built = site / page.relative_to(ROOT / "docs").with_suffix(".html")
        assert built.exists(), page


@pytest.mark.parametrize(
    "name",
    [
        "SnapKVPress", "AdaKVPress", "compression_ratio", "max_capacity_prompt", "window_size",
        "kernel_size", "replace_mistral", "SnapKVCluster", "KVPressTextGenerationPipeline",
        "group_reduce",
    ],
)  # fmt: skip
def test_search_finds_names_of_other_projects(site, name):
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(re.fullmatch(r"Search\.setIndex\((.*)\)\s*", text, re.S)[1])
    from sphinx.search.en import SearchEnglish

    found = index["terms"].get(SearchEnglish({}).stem(name.lower()))  # as the page's script does
    assert found is not None
    pages = [index["docnames"][i] for i in (found if isinstance(found, list) else [found])]
    assert "migrating" in pages or name in ("group_reduce",), pages


def test_every_policy_is_on_the_page_of_policies(site):
    page = (site / "policies.html").read_text(encoding="utf-8")
    for name, policy in POLICIES.items():
        assert f"snapkv.{policy.__name__}" in page, name
        assert f">{name}<" in page, name
