"""How Sphinx builds these pages; `make docs` does."""

import sys
from pathlib import Path

import snapkv

sys.path[:0] = [str(Path(__file__).parents[1] / "packages/snapkv")]
from tests.matrix.__main__ import known, page

project = "snapkv"
author = "the snapkv contributors"
release = snapkv.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
html_theme = "furo"
html_title = f"snapkv {release}"
html_copy_source = False
html_show_copyright = False  # the footer names the licence
html_extra_path = ["../LICENSE"]  # the footer links to it
html_static_path = ["_static"]
html_css_files = ["pages.css"]
templates_path = ["_templates"]
exclude_patterns = ["results/*.jsonl"]
suppress_warnings = ["toc.not_included"]  # pages of tables, which docs/results.md links to
default_role = "code"  # docstrings write `names` with single quotes, as Markdown does
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Keys", "params_style")]


def _all_models(app, name, source):
    """The page of all judged models in the place of the one with a few."""
    if name == "families":
        source[0] = page(known())


def setup(app):
    app.connect("source-read", _all_models)
