"""Which instructions at the start of a prompt survive, as they are and protected.

Rows, `docs/results/instructions.jsonl`, are the lines of `samples.jsonl` of `snapkv eval
instructions --lengths 768 --samples-each 2 --cloze --budget 96`: with the question visible and
`--policy snapkv:window_size=16`; with `--setting hidden --baseline none` and `--policy
snapkv:window_size=16,h2o,streaming-llm:positions=original`; and the same with `--protect`.
"""

from snapkv_lab.experiments.experiment import Experiment, Shown
from snapkv_lab.experiments.records import Row, markdown_table


def _measured(rows: list[Row]) -> str:
    return (
        "Measured on {model[name]} ({model[dtype]}, {model[attn_implementation]}, "
        "{model[device]}), torch {torch}, transformers {transformers}"
    ).format_map(rows[0])


def _tables(rows: list[Row]) -> list[str]:
    names = list(dict.fromkeys(row["cell"]["instruction"] for row in rows))
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        protected = "protected" if row["task"]["protect"] else "as it is"
        found.setdefault((row["method"], row["question"], protected), []).append(row)
    lines = [[*key, *(_right(own, name) for name in names)] for key, own in found.items()]
    budget = next(row["policy"]["budget"] for row in rows if "budget" in row["policy"])
    return [
        f"## Right answers, {budget} of {rows[0]['prompt_tokens']} tokens kept",
        markdown_table(["method", "question", "instructions", *names], lines),
    ]


def _right(rows: list[Row], name: str) -> str:
    scores = [row["score"] for row in rows if row["cell"]["instruction"] == name]
    return f"{sum(scores):.0f} of {len(scores)}"


EXPERIMENT = Experiment(
    name="instructions",
    title="Instructions that must stay",
    measured=_measured,
    tables=_tables,
    shown={
        "instructions": Shown(
            "Right answers, 96 of 700 tokens kept",
            ("method", "question", "instructions", "code", "begin", "end"),
            (
                "full | visible",
                "snapkv:window_size=16@96 | hidden | as it is",
                "snapkv:window_size=16@96 | hidden | protected",
            ),
        )
    },
)


if __name__ == "__main__":
    EXPERIMENT.main()
