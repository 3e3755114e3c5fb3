"""Build the page: one file with data, style and script that needs no network."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from snapkv.inspector.packing import DECADES
from snapkv.inspector.record import Inspection

_ASSETS = Path(__file__).parent
_SCRIPTS = (
    *("data.js", "text.js", "charts.js", "answers.js", "votes.js"),
    *("curve.js", "method.js", "main.js"),
)


def as_page(inspection: Inspection, request: dict[str, Any]) -> str:
    """The page of an inspection.

    Args:
        inspection: what to show.
        request: the model, `documents`, a list of names, `question`, and everything else that is
            needed to reproduce the page.
    """
    return filled_page(inspection.data() | {"request": request})


def filled_page(data: dict[str, Any]) -> str:
    """The page around data; see `Inspection.data`."""
    script = "\n".join(['"use strict";', *map(_asset, _SCRIPTS)])
    script = script.replace("{{decades}}", str(DECADES))
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
    """JSON without characters that could begin or end markup; parses to the same values.

    Lone surrogates, which UTF-8 cannot encode, are escaped, too.
    """
    risky = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
    return risky.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
