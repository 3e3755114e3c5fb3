"""The text of an HTML page as a browser shows it.

It is gathered in one walk: where old pages leave `<p>` open, they nest as deep as they are long.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from typing import Any

from bs4 import BeautifulSoup, CData, NavigableString, Tag

_INVISIBLE = {"script", "style", "template", "noscript"}
_CELLS = {"td", "th"}
_BLOCK = re.compile(
    "address|article|aside|blockquote|br|d[dlt]|div|fig(caption|ure)|footer|form|h[1-6r]|header|li|"
    "main|nav|[ou]l|p|pre|section|table|title|tr"
)
_BLANK_LINES = re.compile(r"(?<![ \t])[ \t]*\n\s*\n")
"""The spaces in front are looked at once, from their first on."""


@dataclass
class _Open:
    """A tag on the way to where the walk is."""

    children: Iterator[Any]
    end: str = ""
    is_pre: bool = False
    last: str = ""  # the name of its child that was walked through last


def shown_text(markup: str) -> str:
    """A line for each block, a tab between cells, and no more than one blank line in a row."""
    parts: list[str] = []
    page = BeautifulSoup(StringIO(markup), "html.parser")  # a text might be taken for a name
    opened = [_Open(iter(page.contents))]
    while opened:
        inside = opened[-1]
        child = next(inside.children, None)
        if child is None:
            parts.append(opened.pop().end)
        elif isinstance(child, Tag):
            if child.name in _INVISIBLE or child.has_attr("hidden"):
                continue
            edge = "\n" if _BLOCK.fullmatch(child.name) else ""
            parts.append("\t" if {inside.last, child.name} <= _CELLS else edge)
            inside.last = child.name
            is_pre = inside.is_pre or child.name == "pre"
            opened.append(_Open(iter(child.contents), edge, is_pre))
        elif type(child) in (NavigableString, CData):  # such as no comment
            parts.append(child if inside.is_pre else re.sub(r"\s+", " ", child))
    return _BLANK_LINES.sub("\n\n", "".join(parts)).strip()
