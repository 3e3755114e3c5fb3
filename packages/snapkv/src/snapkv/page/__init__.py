"""The page that shows what a cache has kept.

It is one HTML file with its data, its styles and its scripts, so it needs no network.
"""

import base64
import functools
import hashlib
import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from snapkv.page.packing import MOST_COUNTS, Ballot, bin_tokens, packed_counts

_ASSETS = Path(__file__).parent
_SCRIPTS = ("data.js", "text.js", "main.js")
_FRAME_HEIGHT = 760


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The tokens that one cache has kept, and the answer that it gave.

    Attributes:
        label: the budget of the cache, in a word or two.
        sentences: sentences that say how much it kept, and whether its answer is that of the full
            cache.
        counts: (T,) int64, how many heads of all layers keep each token of the text.
        heads: the number of heads in all layers.
        answer: a dictionary with `text`, `changes` (see `word_changes`) and `same`; None if there
            is no answer.
    """

    label: str
    sentences: Sequence[str]
    counts: Tensor
    heads: int
    answer: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A method on the page, with the tokens that it has kept at each of its budgets.

    Attributes:
        label: the method's name.
        stops: one entry for each budget, in the order of increasing memory.
        chosen: the index of the entry that is shown when the page is opened.
        ballot: the votes for each token; None if the method does not vote, or they are not known.
        unvoted: the text that is shown for a token if there is no ballot.
    """

    label: str
    stops: Sequence[Stop]
    chosen: int = 0
    ballot: Ballot | None = None
    unvoted: str


@dataclass(frozen=True)
class Page:
    """A page that shows what caches have kept; a notebook displays it directly.

    Attributes:
        title: the title, which says what was kept from which text.
        question: the question, or an empty string if it is not known.
        pieces: the text of every token.
        methods: the methods; the page opens with the first one.
        full: the text of the full cache's answer; None if it is not known.
        request: all further values that are needed to make the page again.
    """

    title: str
    question: str
    pieces: Sequence[str]
    methods: Sequence[Shown]
    full: str | None = None
    request: dict[str, Any] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        """Return the data of the page as JSON values, in the format that its scripts read."""
        stops = sum(len(method.stops) for method in self.methods)
        size = bin_tokens(len(self.pieces) * stops, MOST_COUNTS)
        return {
            "title": self.title,
            "question": self.question,
            "pieces": list(self.pieces),
            "full": self.full,
            "bin_tokens": size,
            "methods": [
                {
                    "label": method.label,
                    "chosen": method.chosen,
                    "unvoted": method.unvoted,
                    "ballot": None if method.ballot is None else method.ballot.data(),
                    "stops": [
                        {
                            "label": stop.label,
                            "sentences": list(stop.sentences),
                            "answer": stop.answer,
                            "heads": stop.heads,
                            "counts": packed_counts(stop.counts, size),
                        }
                        for stop in method.stops
                    ],
                }
                for method in self.methods
            ],
            "request": self.request,
        }

    @functools.cached_property
    def html(self) -> str:
        """The content of the page's HTML file."""
        return filled_page(self.data())

    def _repr_html_(self) -> str:
        """Return an HTML frame in which the page can access neither the notebook nor a network."""
        return (
            f'<iframe sandbox="allow-scripts" srcdoc="{html.escape(self.html)}" title="SnapKV" '
            f'style="border: 0; height: {_FRAME_HEIGHT}px; width: 100%"></iframe>'
        )

    def __repr__(self) -> str:
        """Return the sentences that a terminal shows instead of the page."""
        stop = self.methods[0].stops[self.methods[0].chosen]
        return " ".join(stop.sentences)


def filled_page(data: dict[str, Any]) -> str:
    """Return the HTML file of a page.

    Args:
        data: the data that `Page.data` returned.
    """
    script = "\n".join(['"use strict";', *map(_asset, _SCRIPTS)])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "policy": "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'",
        "style": _asset("page.css"),
        "script": script,
        "data": _harmless(json.dumps(data, ensure_ascii=False, separators=(",", ":"))),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _harmless(text: str) -> str:
    """Escape all characters of a JSON text that could begin or end an HTML tag.

    The text still has the same values. Lone surrogates, which UTF-8 cannot encode, are escaped,
    too.
    """
    risky = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
    return risky.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
