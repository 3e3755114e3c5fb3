"""The page of documents that were read once, from its rows; see `library`."""

from collections.abc import Sequence
from statistics import fmean, median

from snapkv_lab.experiments.records import (
    Row,
    environment_line,
    markdown_table,
    tables_page,
)

FULL = "read in full"
_TITLES = {"python": "Documents of Python", "squad": "Paragraphs of SQuAD"}


def render(rows: Sequence[Row]) -> str:
    """The tables of these rows."""
    sections = []
    for group in dict.fromkeys(row["group"] for row in rows):
        own = [row for row in rows if row["group"] == group]
        asked = [row for row in own if "answers" in row]
        sections += [
            f"## {_TITLES[group]}",
            _answers(asked),
            _files([row for row in own if "way" in row]),
        ]
    title = "Documents that were read once"
    return tables_page("library", title, environment_line(rows), *sections)


def _answers(asked: Sequence[Row]) -> str:
    known = [row for row in asked if row["answers"][FULL]["right"]]
    lines = []
    for name in asked[0]["answers"]:
        found = [row["answers"][name] for row in asked]
        shares = [
            row["answers"][name]["seconds"] / row["answers"][FULL]["seconds"] for row in asked
        ]
        kept = sum(row["answers"][name]["right"] for row in known)
        lines.append(
            [
                name,
                f"{median(each['seconds'] for each in found):.2f} s",
                f"{median(shares):.2f}",
                f"{sum(each['right'] for each in found)} of {len(found)}",
                f"{kept} of {len(known)}",
                f"{fmean(each['loss'] for each in found):.3f}",
                f"{fmean(each['kept_tokens'] for each in found):,.0f}",
            ]
        )
    head = [
        "kept, and read again",
        "to the first token",
        "of reading in full",
        "right",
        "of those right in full",
        "loss",
        "tokens held",
    ]
    return markdown_table(head, lines)


def _files(ways: Sequence[Row]) -> str:
    whole = ways[0]["bytes"]
    lines = [
        [
            row["way"],
            f"{row['bytes'] / 1e6:.1f} MB",
            f"{row['bytes'] / row['tokens'] / 1e3:.1f} kB",
            f"{row['bytes'] / whole:.2f}",
        ]
        for row in ways
    ]
    head = [f"{ways[0]['files']} documents, {ways[0]['tokens']:,} tokens", "on disk", "per token"]
    return markdown_table([*head, "of whole"], lines)
