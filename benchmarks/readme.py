"""The measured table of the README, made of committed rows.

python -m benchmarks.readme    put the table into README.md
"""

from pathlib import Path
from statistics import fmean

from benchmarks import auto_budget, quality, speed
from benchmarks.auto_budget_page import mean, right
from benchmarks.records import Row, between, environment_line, markdown_table, read_rows
from snapkv.validation import format_bytes

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- measured: python -m benchmarks.readme -->\n", "<!-- /measured -->\n"

PROMPT_TOKENS, BUDGET = 4096, 512
_SHOWN = {
    "full cache": {"policy": "full"},
    "SnapKV, kernel 13": {"policy": "snapkv", "window_size": 16, "kernel_size": 13},
    "SnapKV, kernel 7": {"policy": "snapkv", "window_size": 16, "kernel_size": 7},
    "SnapKV without pooling": {"policy": "snapkv", "window_size": 16, "kernel_size": 1},
    "first and last tokens": {"policy": "sinks_and_recent"},
    "random": {"policy": "random"},
}


def table(quality_rows: list[Row], speed_rows: list[Row]) -> str:
    """Right answers and bytes of every method, and time per token of the full cache and SnapKV."""
    times = _times(speed_rows)
    cells = []
    for label, wanted in _SHOWN.items():
        row = _find(quality_rows, wanted)
        cells.append(
            [
                label,
                f"{row['accuracy']:.0%}",
                format_bytes(row["held_bytes"]),
                times.get(label, ""),
            ]
        )
    header = ["cache", "right answers", "keys and values", "ms per token after 6k"]
    documents = _find(quality_rows, _SHOWN["full cache"])["documents"]
    return (
        f"One magic number in {PROMPT_TOKENS:,} tokens of essays, {documents} documents, budget "
        f"{BUDGET}, window 16.\n{environment_line(quality_rows)}.\n\n"
        f"{markdown_table(header, cells)}\n"
    )


SMALL = ("paper's 128", "paper's 256", "paper's 384", "fading 128", "fading 192", "auto 0.0025")
_SMALL_LABELS = {"paper's": "`SnapKV({})`", "fading": "`default_policy({})`"}


def small_budgets(rows: list[Row]) -> str:
    """Right answers of the paper's method and of the default at budgets of a few hundred tokens."""
    asked = [row for row in rows if row.get("answers")]
    lines = [
        [_label(name), f"{mean(asked, name, 'bytes'):.0%}", str(right(asked, name))]
        for name in SMALL
    ]
    tokens = round(fmean(row["prompt_tokens"] for row in asked))
    return (
        f"Numbers, words, uuids, lines and quotations copied out of prompts of about {tokens:,} "
        f"tokens, answers that the full cache has right, 95 % intervals in brackets.\n"
        f"{environment_line([row for row in rows if 'environment' in row][-1:])}.\n\n"
        f"{markdown_table(['cache', 'bytes of the full cache', 'right answers'], lines)}\n"
    )


def _label(name: str) -> str:
    kind, _, number = name.partition(" ")
    return _SMALL_LABELS.get(kind, "`default_policy(AutoBudget(lost_vote={}))`").format(number)


def _find(rows: list[Row], wanted: Row) -> Row:
    """The one row of that method at the shown length and budget; maximum pooling."""
    settings = {key: value for key, value in wanted.items() if key != "policy"}
    if wanted["policy"] != "full":
        settings["budget"] = BUDGET
    if wanted["policy"] == "snapkv":
        settings["pooling"] = "max"
    found = [
        row
        for row in rows
        if row["prompt_tokens"] == PROMPT_TOKENS
        and row["policy"] == wanted["policy"]
        and settings.items() <= row["settings"].items()
    ]
    if len(found) != 1:
        raise ValueError(f"expected one row of {wanted}, got {len(found)}")
    return found[0]


def _times(rows: list[Row]) -> dict[str, str]:
    timed = [row for row in rows if row["benchmark"] == "decode" and "ms_per_token" in row]
    longest = max(row["prompt_tokens"] for row in timed)
    decode = [row for row in timed if row["prompt_tokens"] == longest]
    labels = {"full": "full cache", "snapkv": "SnapKV, kernel 7"}
    return {labels[row["cache"]]: f"{row['ms_per_token']['p50']:.0f}" for row in decode}


def rendered(readme: str) -> str:
    """The README with its table made anew."""
    measured = table(read_rows(quality.ROWS), read_rows(speed.ROWS))
    small = small_budgets(read_rows(auto_budget.ROWS))
    return between(readme, BEGIN, END, f"\n{measured}\n{small}\n")


def main() -> None:
    """Write the table into the README."""
    README.write_text(rendered(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
