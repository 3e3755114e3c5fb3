"""The pages of tables, and the small tables of docs/results.md and README.md that come from them.

    python -m snapkv_lab.experiments results
        render every page of tables and both pages from the rows

A page of tables, `docs/results/tables/NAME.md`, is made of nothing but rows. The two other pages
are written by hand around tables between `<!-- shown: NAME -->` and `<!-- end -->`, whose cells are
copied from those pages.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path

from snapkv_lab.experiments import (
    appending,
    auto_budget,
    auto_budget_held_out,
    bits,
    chunked,
    compatibility,
    evaluation,
    first_day,
    flat,
    instructions,
    kvpress,
    leaderboard,
    library,
    medusa,
    methods,
    pooling,
    quality,
    ragged,
    recall,
    selective,
    serving,
    serving_caps,
    shared_documents,
    sharing,
    speed,
    streaming,
    studies,
    workers,
)
from snapkv_lab.experiments.records import TABLES, markdown_table, read_rows

ROOT = Path(__file__).parents[5]
PAGES = (ROOT / "docs/results.md", ROOT / "README.md")

OF_ROWS = (
    appending,
    auto_budget,
    auto_budget_held_out,
    bits,
    chunked,
    compatibility,
    first_day,
    flat,
    instructions,
    kvpress,
    library,
    medusa,
    methods,
    pooling,
    quality,
    ragged,
    recall,
    selective,
    serving,
    serving_caps,
    shared_documents,
    sharing,
    speed,
    streaming,
    studies,
    workers,
)
"""Benchmarks with a file of rows."""


def rendered() -> Iterator[tuple[Path, Callable[[], str]]]:
    """Every page of tables, and what makes it."""
    for each in OF_ROWS:
        yield each.PAGE, lambda each=each: each.render(read_rows(each.ROWS))
    yield evaluation.PAGE, lambda: evaluation.render(evaluation.measured())
    yield leaderboard.PAGE, lambda: leaderboard.render(leaderboard.measured())


@dataclass(frozen=True)
class Shown:
    """A part of a table.

    Attributes:
        page: the page of tables that has it.
        section: the heading right above it, perhaps the page's title.
        columns: by their headings, in the order in which they are shown.
        rows: by their first cells, joined by bars, as many as tell a row from the others; none
            shows all.
    """

    page: str
    section: str
    columns: tuple[str, ...]
    rows: tuple[str, ...] = ()


def shown_table(shown: Shown) -> str:
    """The table of it.

    Raises:
        ValueError: the page has no such row or column, or a row is not the only one of its name.
    """
    header, _, *lines = _table_under(shown.page, shown.section)
    if missing := set(shown.columns) - set(header):
        raise ValueError(f"{shown.page}: expected columns of {header}, got {sorted(missing)}")
    found = [_row(lines, name, shown) for name in shown.rows] or lines
    places = [header.index(column) for column in shown.columns]
    return markdown_table(shown.columns, [[line[place] for place in places] for line in found])


def _row(lines: list[list[str]], name: str, shown: Shown) -> list[str]:
    first = name.split(" | ")
    found = [line for line in lines if line[: len(first)] == first]
    if len(found) != 1:
        raise ValueError(f"{shown.page}, {shown.section}: expected one row {name}, got {found}")
    return found[0]


def _table_under(page: str, section: str) -> list[list[str]]:
    """The cells of the first table below a heading, line by line."""
    lines = iter((TABLES / f"{page}.md").read_text(encoding="utf-8").splitlines())
    below = dropwhile(lambda line: line.lstrip("# ") != section, lines)
    table = takewhile(_is_table, dropwhile(lambda line: not _is_table(line), below))
    return [[each.strip() for each in line.strip("|").split("|")] for line in table]


def _is_table(line: str) -> bool:
    return line.startswith("|")


def filled(text: str) -> str:
    """The text of a page with its tables made anew."""

    def table(mark: re.Match[str]) -> str:
        return f"<!-- shown: {mark[1]} -->\n\n{shown_table(SHOWN[mark[1]])}\n\n<!-- end -->"

    return re.sub(r"<!-- shown: (\S+) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


_DEFAULT = "fading 0.935, 4 sinks"
_WINDOWS = ("vote | 4", "sinks and recent | 4")

SHOWN: dict[str, Shown] = {
    "hidden": Shown(
        "methods",
        "2,048 tokens, 8 documents",
        ("method", "hidden, 128", "hidden, 512", "hidden, 1024"),
        (
            "full cache",
            "AdaKV(KVzip)",
            "KVzip",
            "Compactor",
            "KeyDiff",
            "SnapKV, kernel 13",
        ),
    ),
    "variables": Shown(
        "pooling",
        "Variables, 6 samples",
        ("setting", "1/4"),
        (f"window 16, {_DEFAULT}", "window 16, centred 7", "window 16, 0+6"),
    ),
    "drafts": Shown(
        "medusa",
        "float32, times faster than plain, full cache",
        ("decoding", "1,025", "4,097"),
        ("plain, SnapKV", "Medusa, SnapKV", "self-speculation, SnapKV drafts"),
    ),
    "drafts-16-bit": Shown(
        "medusa",
        "bfloat16, times faster than plain, full cache",
        ("decoding", "1,025", "4,097", "7,937"),
        ("plain, SnapKV", "Medusa, full cache", "Medusa, SnapKV"),
    ),
    "slow": Shown(
        "methods",
        "Bytes and time per token",
        ("cache", "ms per token", "against the full cache"),
        (
            "full cache",
            "SnapKV, kernel 7",
            "AdaKV(SnapKV)",
            "H2O",
            "FastGen",
            "Scissorhands",
        ),
    ),
    "uneven": Shown(
        "ragged",
        "One layer: store the token and attend",
        ("shape", "batch", "budget", "time"),
        (
            "demo model | 1 | 512",
            "demo model | 4 | 2048",
            "Llama 3.1 8B | 1 | 512",
            "Llama 3.1 8B | 4 | 2048",
        ),
    ),
    "ruler": Shown("evaluation", "RULER at 2k", ("method", "mean", "difference")),
    "long-answers": Shown("evaluation", "Long answers", ("method", "mean", "difference")),
    "registering": Shown(
        "shared_documents",
        "Registering a document",
        ("tokens kept", "heads", "seconds", "of reading it once"),
        ("1,024 | alike", "1,024 | of different length"),
    ),
    "first-day": Shown(
        "first_day",
        "First day: ten files and questions, without any option",
        ("questions", "full cache right", "`ask` right too", "bytes", "at most"),
    ),
    "pooling": Shown(
        "pooling",
        "All groups together",
        ("setting", "1/8", "1/4"),
        (
            f"window 16, {_DEFAULT}",
            "window 16, 0+12, sinks still",
            "window 16, centred 13",
            "window 32, centred 7",
        ),
    ),
    "kernels": Shown(
        "quality",
        "4,096 tokens, 8 documents",
        ("method", "budget 256", "budget 512"),
        (
            "full cache",
            "SnapKV, window 16, max 13",
            "SnapKV, window 16, max 7",
            "SnapKV, window 16, no pooling",
            "random",
            "keys and values held",
        ),
    ),
    "auto": Shown(
        "auto_budget",
        "Prompts of about 1,030 tokens",
        ("policy", "tokens kept", "bytes", "right"),
        (
            "paper's 256",
            "fading 192",
            "fading 256",
            "auto 0.0025",
            "auto 0.0025, by head",
        ),
    ),
    "longer": Shown(
        "auto_budget_held_out",
        "Right answers (share of the tokens kept), 117 of 195 questions",
        ("policy", "1,024 tokens", "7,168 tokens", "all"),
        ("undiluted 0.0025", "auto 0.0015 (default)", "auto 0.001", "fading 1/4"),
    ),
    "longer-words": Shown(
        "auto_budget_held_out",
        "The word for the lost votes, and whether the answer was right",
        ("word", "all", "auto 0.0015", "fading 1/4"),
    ),
    "default": Shown(
        "auto_budget",
        "Prompts of about 1,030 tokens",
        ("policy", "bytes", "right"),
        ("paper's 128", "paper's 256", "fading 128", "auto 0.0025"),
    ),
    "words": Shown(
        "auto_budget",
        "The word for the lost votes, and whether the answer was right",
        ("word", "all", "auto"),
    ),
    "leaderboard": Shown(
        "leaderboard",
        "Beside the full cache",
        ("kept", "no difference seen", "worse"),
    ),
    "visible": Shown(
        "methods",
        "2,048 tokens, 8 documents",
        ("method", "visible, 128", "visible, 512", "visible, 1024"),
        ("full cache", "SnapKV, kernel 13", "SnapKV, kernel 7", "R-KV", "TOVA", "H2O", "Random"),
    ),
    "sinks": Shown(
        "methods",
        "First tokens",
        ("method", "64 tokens, 0 sinks", "64 tokens, 4 sinks"),
    ),
    "streaming": Shown(
        "streaming",
        "Perplexity, budget 256",
        (
            "tokens",
            "sinks, cache positions",
            "no sinks",
            "sinks, original positions",
            "full cache",
        ),
    ),
    "instructions": Shown(
        "instructions",
        "Right answers, 96 of 700 tokens kept",
        ("method", "question", "instructions", "code", "begin", "end"),
        (
            "full | visible",
            "snapkv:window_size=16@96 | hidden | as it is",
            "snapkv:window_size=16@96 | hidden | protected",
        ),
    ),
    "flat": Shown(
        "flat",
        "Time per token by length of the prompt, budget 512",
        ("prompt tokens", "ms per token", "against the shortest"),
        ("1,024", "8,192"),
    ),
    "batch": Shown(
        "flat",
        "Against the full cache, 4 requests of 8,192 tokens",
        ("cache", "ms per token", "against snapkv", "bytes held"),
    ),
    "decoding": Shown(
        "speed",
        "Decoding after a prompt",
        ("cache", "prompt tokens", "ms per token", "bytes held"),
    ),
    "voting": Shown(
        "flat",
        "Vote, selection and gather",
        ("prompt tokens", "reading, s", "compressing, ms", "share"),
    ),
    "peak": Shown("flat", "Memory", ("cache", "peak", "held after it"), ("transformers", "snapkv")),
    "appending": Shown(
        "appending",
        "Appending in place",
        ("batch", "in place, ms", "copying, ms", "ratio"),
        ("1 | 1,024", "4 | 1,024", "8 | 1,024"),
    ),
    "recall": Shown(
        "recall",
        "Ten questions about one document",
        ("cache", "right answers", "s per question", "device", "host"),
        (
            "full cache, read once | all",
            "SnapKV, kept for the first question | 128",
            "AdaKV(KVzip), kept before any question | 128",
            "SnapKV with recall | 128",
            "SnapKV, read again for every question | 128",
        ),
    ),
    "turns": Shown(
        "evaluation",
        "Several turns",
        ("method", "1", "5", "mean", "cache"),
        (
            "full",
            "SnapKV",
            "SnapKV, compressed every turn",
            "SnapKV, recalled from the host",
            "SnapKV, recalled, 4 pages of 16 tokens every step",
        ),
    ),
    "bits": Shown(
        "bits",
        "Few bits for what is kept",
        ("cache", "held", "right answers", "ms per token", "against its own dtype"),
        ("full cache, float32", "SnapKV, float32", "SnapKV, int8", "SnapKV, int4"),
    ),
    "caps": Shown(
        "serving_caps",
        "8 documents of 1,024 tokens, budget 128",
        ("cap", "right in vLLM", "right in the library"),
        ("none", "256", "128"),
    ),
    "selective": Shown(
        "selective",
        "Time on the demo model",
        ("reading", "of the exact time"),
        ("exact", "selective, 16, 15%", "gemfilter, 16, 15%"),
    ),
    "selective-right": Shown(
        "selective",
        "Right answers",
        ("reading", "lines", "all"),
        ("exact", "selective, 16, 15%", "gemfilter, 16, 15%"),
    ),
    "library": Shown(
        "library",
        "Documents of Python",
        (
            "kept, and read again",
            "to the first token",
            "of reading in full",
            "of those right in full",
            "tokens held",
        ),
        (
            "read in full",
            "whole, 0",
            "whole, 0.15",
            "KVzip 0.3, 0.15",
            "KVzip 0.3 by head, 0.15",
            "whole, 0.15, then snapkv 512",
        ),
    ),
    "serving": Shown(
        "serving",
        "16 requests of 4,000 tokens at once",
        ("engine", "seconds", "prefill s", "decode s", "most at once"),
    ),
    "documents": Shown(
        "shared_documents",
        "One document, 64 questions, in vLLM",
        ("document", "heads", "blocks held", "of prefix cached", "right"),
        (
            "whole, prefix cached | alike",
            "shared, 1024 tokens | alike",
            "shared, 1024 tokens | of different length",
            "shared, 2048 tokens | of different length",
        ),
    ),
    "sharing": Shown(
        "sharing",
        "Ten methods for little more than one",
        ("prompt", "one method, s", "ten methods, s", "ratio"),
        ("1,024", "4,096"),
    ),
    "workers": Shown(
        "workers",
        "Two workers beside one",
        ("prompt tokens", "answers", "one worker, s", "two workers, s", "times as fast"),
    ),
    "kvpress": Shown(
        "kvpress",
        "Beside kvpress",
        ("work", "prompt tokens", "ms", "against kvpress", "against its full cache"),
        ("prefill | snapkv | 4,096", "decode | snapkv | 4,096"),
    ),
    "hit-rate": Shown(
        "studies", "hit-rate", ("kept", "window", "weighted", "beyond the first 4"), _WINDOWS
    ),
    "compatibility": Shown(
        "compatibility",
        "Compatibility",
        ("check", "Python", "torch", "transformers", "outcome"),
    ),
}
"""By the names of the marks."""


def main() -> None:
    """Render everything from the rows that are there."""
    TABLES.mkdir(exist_ok=True)
    for page, render in rendered():
        page.write_text(render(), encoding="utf-8")
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
