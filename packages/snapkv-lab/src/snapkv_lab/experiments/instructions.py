"""Which instructions at the start of a prompt survive, as they are and protected.

    python -m snapkv_lab.experiments instructions    render the page of tables from the rows

Rows, `docs/results/instructions.jsonl`, are the lines of `samples.jsonl` of `snapkv eval
instructions --lengths 768 --samples-each 2 --cloze --budget 96`: with the question visible and
`--policy snapkv:window_size=16`; with `--setting hidden --baseline none` and `--policy
snapkv:window_size=16,h2o,streaming-llm:positions=original`; and the same with `--protect`.

Page: `docs/results/tables/instructions.md`.
"""

from snapkv_lab.experiments.records import (
    RESULTS,
    TABLES,
    Row,
    markdown_table,
    tables_page,
    write_page,
)

ROWS = RESULTS / "instructions.jsonl"
PAGE = TABLES / "instructions.md"


def render(rows: list[Row]) -> str:
    """The table of these rows."""
    names = list(dict.fromkeys(row["cell"]["instruction"] for row in rows))
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        protected = "protected" if row["task"]["protect"] else "as it is"
        found.setdefault((row["method"], row["question"], protected), []).append(row)
    lines = [[*key, *(_right(own, name) for name in names)] for key, own in found.items()]
    table = markdown_table(["method", "question", "instructions", *names], lines)
    model = rows[0]["model"]
    measured = (
        f"Measured on {model['name']} ({model['dtype']}, {model['attn_implementation']}, "
        f"{model['device']}), torch {rows[0]['torch']}, transformers {rows[0]['transformers']}"
    )
    budget = next(row["policy"]["budget"] for row in rows if "budget" in row["policy"])
    title = f"## Right answers, {budget} of {rows[0]['prompt_tokens']} tokens kept"
    return tables_page("instructions", "Instructions that must stay", measured, title, table)


def _right(rows: list[Row], name: str) -> str:
    scores = [row["score"] for row in rows if row["cell"]["instruction"] == name]
    return f"{sum(scores):.0f} of {len(scores)}"


if __name__ == "__main__":
    write_page(render, rows=ROWS, page=PAGE)
