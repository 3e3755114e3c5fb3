"""The page of documents that were read once, from its rows; see `benchmarks.library`."""

from collections.abc import Sequence
from statistics import fmean, median

from benchmarks.records import Row, environment_line, markdown_table

_HEAD = """\
# Documents that were read once

Questions about ten docstrings of Python's standard library, each over four of the documents in
random order; and questions of SQuAD, each over four paragraphs of one article. Every document was
read by itself and saved. For a question, the files of its four documents are loaded, their keys are
rotated to their places in the joint prompt, and a fraction of the tokens, those that change most,
is read again; 0 means reuse only. "read in full" reads documents and question together.

"to the first token" is the median time from opening the files to the logits after the question. The
next column is the median of its share of reading in full, question by question. All methods answer
every question one after the other, in rotating order.

The questions about Python are sentences to complete. They follow the text closely and were chosen
so that this small model completes most of them when it reads everything. So "right in full" says
nothing about the model; only differences between the rows count, and copying a phrase is easier
than answering. An answer is right if each of its tokens is the most likely one when it is fed to
the model. The loss is the mean over the answers' tokens, in nats.

Rendered from `library.jsonl` by `python -m benchmarks.library`."""

FULL = "read in full"
_TITLES = {"python": "Documents of Python", "squad": "Paragraphs of SQuAD"}


def render(rows: Sequence[Row]) -> str:
    """The page that these rows make."""
    groups = dict.fromkeys(row["group"] for row in rows)
    sections = [_HEAD, environment_line(rows) + "."]
    for group in groups:
        own = [row for row in rows if row["group"] == group]
        asked = [row for row in own if "answers" in row]
        tokens = round(fmean(row["prompt_tokens"] for row in asked))
        sections += [
            f"## {_TITLES[group]}",
            f"{len(asked)} questions, prompts of {tokens:,} tokens on average.",
            _answers(asked),
            _files([row for row in own if "way" in row]),
        ]
    return "\n\n".join(sections) + "\n"


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
