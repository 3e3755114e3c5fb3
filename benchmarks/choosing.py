"""The table of docs/choosing.md: a method for every situation, with the measured cells it rests on.

python -m benchmarks.choosing    put the table into docs/choosing.md
"""

from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path

from benchmarks.records import RESULTS, between

PAGE = Path(__file__).parent.parent / "docs/choosing.md"
BEGIN, END = "<!-- chosen: python -m benchmarks.choosing -->\n", "<!-- /chosen -->\n"


@dataclass(frozen=True)
class Cell:
    """A cell of a results page, which its benchmark draws from rows.

    Attributes:
        section: the heading right above the table, perhaps the page's title; of several tables the
            first one counts.
        row: the first cells of the row, as many as tell it from the others.
        column: the heading of the column.
    """

    section: str
    row: tuple[str, ...]
    column: str


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A line of the table.

    Attributes:
        why: the reason, with a pair of braces where each cell goes.
        page: the results page that has the cells.
    """

    situation: str
    settings: str
    why: str
    page: str
    cells: tuple[Cell, ...]


def cell(page: str, wanted: Cell) -> str:
    """What stands in that cell.

    Raises:
        ValueError: the page has no such cell, or several.
    """
    header, *lines = _table_under(page, wanted.section)
    rows = [line for line in lines if line[: len(wanted.row)] == list(wanted.row)]
    if wanted.column not in header or len(rows) != 1:
        raise ValueError(f"{page}: expected one cell of {wanted}, got {len(rows)} rows of {header}")
    return rows[0][header.index(wanted.column)]


def _table_under(page: str, section: str) -> list[list[str]]:
    """The cells of the first table below a heading, line by line."""
    lines = iter((RESULTS / f"{page}.md").read_text(encoding="utf-8").splitlines())
    below = dropwhile(lambda line: line.lstrip("# ") != section, lines)
    table = takewhile(_is_table, dropwhile(lambda line: not _is_table(line), below))
    return [[each.strip() for each in line.strip("|").split("|")] for line in table]


def _is_table(line: str) -> bool:
    return line.startswith("|")


def _cells(section: str, column: str, *rows: str) -> tuple[Cell, ...]:
    """One column of several rows, whose first cells are joined by bars."""
    return tuple(Cell(section, tuple(row.split(" | ")), column) for row in rows)


_LONGER = "Longer texts of kinds that chose nothing"
_SHORT = "Prompts of about 1,030 tokens"
_STREAMING = "Streaming: perplexity over a text many times as long as the cache"
_BITS = "Few bits for what is kept"
_PROTECTED = "Instructions that must stay"
_HIDDEN = "2,048 tokens"

ADVICE = (
    Advice(
        situation="The question stands at the end of the prompt, and you do not want to tune",
        settings='nothing on the command line; `default_policy("auto")` in Python',
        why="right answers, and tokens kept, in texts of 1k to 7k tokens: {}",
        page="auto_budget",
        cells=_cells(_LONGER, "all", "auto 0.0015 (default)"),
    ),
    Advice(
        situation="The same, with a fixed number of tokens per request (servers, static storage)",
        settings="`default_policy(N)`, N a quarter of a typical prompt",
        why="at a quarter of the prompt {}; the paper's settings {}",
        page="pooling",
        cells=_cells(
            "All groups together",
            "1/4",
            "window 16, fading 0.935, 4 sinks",
            "window 32, centred 7",
        ),
    ),
    Advice(
        situation="Fewer bytes, some more wrong answers, and a little more time per token",
        settings="`AdaKV(default_policy(AutoBudget(lost_vote=0.0025)))`",
        why="answers right {}, from {} of the bytes",
        page="auto_budget",
        cells=(
            *_cells(_SHORT, "right", "auto 0.0025, by head"),
            *_cells(_SHORT, "bytes", "auto 0.0025, by head"),
        ),
    ),
    Advice(
        situation="The paper's method, to compare with; answers are numbers or names",
        settings="`SnapKV(N, window_size=16, kernel_size=13)`",
        why="kernel 13 {}, kernel 7 {}, at 512 of 4,096 tokens",
        page="quality",
        cells=_cells(
            "4,096 tokens",
            "budget 512",
            "SnapKV, window 16, max 13",
            "SnapKV, window 16, max 7",
        ),
    ),
    Advice(
        situation="Several questions about one text, and the host has room for all of it",
        settings='`recall="host"`, or `Document` ([turns](turns.md))',
        why="with recall {} right, without {}, at 128 of 2,048 tokens",
        page="recall",
        cells=_cells(
            "Ten questions about one document",
            "right answers",
            "SnapKV with recall | 128",
            "SnapKV, kept for the first question | 128",
        ),
    ),
    Advice(
        situation="The question is not known yet, and the text may be read twice",
        settings="`AdaKV(KVzip(N))`, N at least a quarter of the text",
        why="{}; SnapKV {}, at 512 of 2,048 tokens",
        page="methods",
        cells=_cells(_HIDDEN, "hidden, 512", "AdaKV(KVzip)", "SnapKV, kernel 13"),
    ),
    Advice(
        situation="The question is not known yet, and the text is read once",
        settings="`Compactor(N)`, N half of the text",
        why="{}; KeyDiff {}, at 1,024 of 2,048 tokens",
        page="methods",
        cells=_cells(_HIDDEN, "hidden, 1024", "Compactor", "KeyDiff"),
    ),
    Advice(
        situation="Each step may need other parts of the text, and the host has room for all of it",
        settings="`recall=PageRecall(pages)` ([turns](turns.md#pages-for-every-step))",
        why="the first question scores {} with pages, {} without, {} with the full cache",
        page="evaluation",
        cells=_cells(
            "Several turns",
            "1",
            "SnapKV, recalled, 4 pages of 16 tokens every step",
            "SnapKV, recalled from the host",
            "full",
        ),
    ),
    Advice(
        situation="Answers longer than the budget, such as long reasoning",
        settings="`RKV(N)`, or `PromptThenDecode(prompt=SnapKV(N), decode=RKV(N))`",
        why="in answers of 1,024 tokens R-KV scores {}, TOVA {}, H2O {}, the full cache {}",
        page="evaluation",
        cells=_cells("Long answers", "mean", "RKV", "TOVA", "H2O", "full"),
    ),
    Advice(
        situation="Text without end, of which only the recent part matters",
        settings="`StreamingLLM(N)`",
        why="perplexity {} with sinks, {} without, behind 31,744 tokens",
        page="streaming",
        cells=(
            Cell(_STREAMING, ("31,745-32,768",), "sinks, cache positions"),
            Cell(_STREAMING, ("31,745-32,768",), "no sinks"),
        ),
    ),
    Advice(
        situation="The same documents, asked about again and again",
        settings="a [library](library.md), `--recompute 0.15`",
        why="first token in {} of the time of reading, right {}",
        page="library",
        cells=(
            *_cells("Documents of Python", "of reading in full", "whole, 0.15"),
            *_cells("Documents of Python", "of those right in full", "whole, 0.15"),
        ),
    ),
    Advice(
        situation="Reading the prompt takes too long, and the first token need not be exact",
        settings="`--prefill selective`, after `snapkv study early-layer`",
        why="{} of the time of exact reading, with 19 of 30 layers",
        page="selective",
        cells=_cells("Time on the demo model", "of the exact time", "selective, 19, 15%"),
    ),
    Advice(
        situation="The prompt does not fit while it is read",
        settings="`snapkv.prefill.chunked(cap_tokens=...)` ([speed](speed.md))",
        why="with a cap of 128 of 1,024 tokens {} right, without a cap {}",
        page="chunked",
        cells=_cells("Reading under a cap", "right answers", "128", "none"),
    ),
    Advice(
        situation="Memory is scarcer than time per token",
        settings='`quantize="int4"` beside any budget',
        why="{} instead of {}, right {}",
        page="bits",
        cells=(
            *_cells(_BITS, "held", "SnapKV, int4", "SnapKV, float32"),
            *_cells(_BITS, "right answers", "SnapKV, int4"),
        ),
    ),
    Advice(
        situation="Instructions at the start of the prompt must stay",
        settings="`protect=[(0, n)]`, on the command line `--protect`",
        why="code word, first word and end mark {}; unprotected {}",
        page="instructions",
        cells=(
            *_cells(_PROTECTED, "protected: code, begin, end", "SnapKV, window 16"),
            *_cells(_PROTECTED, "as it is: code, begin, end", "SnapKV, window 16"),
        ),
    ),
    Advice(
        situation="Many requests at once on one server",
        settings="`snapkv serve MODEL --budget N` ([serving](serving.md))",
        why="{} requests side by side in a pool where stock vLLM has {}",
        page="serving",
        cells=_cells(
            "Serving: stock vLLM and compressed prompts",
            "most at once",
            "112 | snapkv, budget 512",
            "112 | stock",
        ),
    ),
)


def table() -> str:
    """All advice, every number taken from a results page."""
    lines = ["| situation | settings | measured |", "| --- | --- | --- |"]
    for each in ADVICE:
        why = each.why.format(*(cell(each.page, one) for one in each.cells))
        link = f"[{each.page.replace('_', ' ')}](results/{each.page}.md)"
        lines.append(f"| {each.situation} | {each.settings} | {why} ({link}) |")
    return "\n" + "\n".join(lines) + "\n\n"


def filled(page: str) -> str:
    """The page with the table between its marks."""
    return between(page, BEGIN, END, table())


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
