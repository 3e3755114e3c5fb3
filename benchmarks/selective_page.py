"""The page of `benchmarks.selective`, from its rows alone."""

from collections.abc import Sequence
from textwrap import fill

from benchmarks.records import RESULTS, Row, environment_line, markdown_table, read_rows

ROWS = RESULTS / "selective.jsonl"
PAGE = RESULTS / "selective.md"

HELD_OUT = RESULTS / "auto_budget_held_out.jsonl"
"""Rows of `benchmarks.auto_budget_held_out`, with the share that has to go on behind each layer."""

LAYERS = range(14, 25)
SHARES = (0.075, 0.15, 0.3)

ENOUGH = 0.03
"""By how much right answers may be below those of exact reading."""


def render(rows: list[Row]) -> str:
    """The page that these rows make."""
    parts = {name: [row for row in rows if row["part"] == name] for name in _SECTIONS}
    sections = [_SECTIONS[name](own) for name, own in parts.items() if own]
    return "\n\n".join([_HEAD, *sections, _longer(read_rows(HELD_OUT))]) + "\n"


def _longer(rows: list[Row]) -> str:
    """Behind which layer the answers of longer texts go on."""
    known = [row for row in rows if row.get("needed")]
    lengths = sorted({int(row["text"].split("/")[1]) for row in known})
    of_length = {n: [row for row in known if f"/{n}/" in row["text"]] for n in lengths}
    table = markdown_table(
        [
            "layers that read all",
            *(f"{share:.1%} go on" for share in SHARES),
            *(f"15.0%, {n:,} tokens" for n in lengths),
        ],
        [
            [
                str(layer),
                *(_going_on(known, layer, share) for share in SHARES),
                *(_going_on(own, layer, 0.15) for own in of_length.values()),
            ]
            for layer in LAYERS
        ],
    )
    text = (
        f"{len(known)} questions that the full cache has right about texts of {lengths[0]:,} to "
        f"{lengths[-1]:,} tokens, of kinds that chose no setting (`benchmarks/held_out.py`). A "
        "cell counts those of which all tokens of the answer are among what the votes of that "
        "layer let go on. What does not go on can only be found by the lower layers. Rendered from "
        "`auto_budget_held_out.jsonl`, which `python -m benchmarks.auto_budget_held_out` writes."
    )
    return f"## Answers that go on, in longer texts\n\n{fill(text, 100)}\n\n{table}"


def _going_on(rows: list[Row], layer: int, share: float) -> str:
    needed = [row["needed"][layer - 1] for row in rows]
    found = sum(least is not None and least <= share for least in needed)
    return f"{found}/{len(needed)}"


_HEAD = """\
# Reading fewer tokens in the upper half of the model

From some layer on, only a share of the prompt's tokens goes on: those that the prompt's last 16
tokens vote for at that layer, and these 16 (`snapkv.prefill.selective`). GemFilter reads the chosen
tokens again from the first layer. "15, 15%" means that 15 layers read every token and then 15% of
the tokens go on, however few. All ways read into a compressed cache of the same budget.

Rendered from `selective.jsonl` by `python -m benchmarks.selective`; each row has all settings."""


def _time(rows: list[Row]) -> str:
    best = _row(rows, "selective", share=0.15)
    return _timed(
        "Time on the demo model",
        rows,
        f"With {_label(best)} reading takes {_ratio(best)} of the exact time.",
    )


def _shape(rows: list[Row]) -> str:
    layers = rows[0]["model"]["layers"]
    return _timed(
        "Time at a longer prompt",
        rows,
        f"The model has the shape of {rows[0]['model']['name'].split()[-1]}, but only {layers} "
        f"layers, and random weights, which take as long as trained ones. With {_label(rows[1])} "
        "reading "
        f"takes {_ratio(rows[1])} of the exact time.",
    )


def _timed(title: str, rows: list[Row], said: str) -> str:
    first = rows[0]
    table = markdown_table(
        ["reading", "seconds", "of the exact time"],
        [[_label(row), f"{row['ms']['p50'] / 1000:.2f}", _ratio(row)] for row in rows],
    )
    about = (
        f"{first['prompt_tokens']:,} tokens, budget {first['policy']['budget']}; medians of "
        f"{first['rounds']} rounds in which all take turns; ratios are medians over pairs of one "
        f"round, with the lowest and the highest in brackets. {said}"
    )
    return _section(title, about, table, rows)


def _quality(rows: list[Row]) -> str:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    labels = list(dict.fromkeys(_label(row) for row in rows))
    cells = {(_label(row), row["task"]): _cell(row) for row in rows}
    counts = ", ".join(
        f"{row['prompts']} of {task} ({row['prompt_tokens']:,} tokens on average)"
        for task in tasks
        for row in rows
        if row["task"] == task and _label(row) == "exact"
    )
    table = markdown_table(
        ["reading", *tasks, "all"],
        [
            [label, *(cells[label, task] for task in tasks), f"{_share(rows, label):.2f}"]
            for label in labels
        ],
    )
    about = (
        f"Prompts: {counts}. Every prompt begins the answer, and the right tokens are fed one "
        "after the other. A cell is the share of answers whose tokens were all the most likely "
        "ones, and in brackets the loss in nats per token. The magic numbers are those of "
        f"[quality](quality.md), needle and lines those of [evaluation](evaluation.md); budget "
        f"{rows[0]['policy']['budget']}.\n\n{_verdict(rows, labels)}"
    )
    return _section("Right answers", about, table, rows)


def _verdict(rows: Sequence[Row], labels: Sequence[str]) -> str:
    """Which ways of reading lose at most three points of right answers, over all and by task."""
    exact = _share(rows, "exact")
    ways = labels[1:]
    over_all = [label for label in ways if _share(rows, label) >= exact - ENOUGH]
    in_each = [label for label in over_all if _is_enough_in_each(rows, label)]
    return (
        f"At most {100 * ENOUGH:.0f} points below exact reading over all prompts: "
        f"{'; '.join(over_all) or 'none'}. In each task: {'; '.join(in_each) or 'none'}."
    )


def _is_enough_in_each(rows: Sequence[Row], label: str) -> bool:
    own = {row["task"]: row for row in rows if _label(row) == label}
    exact = {row["task"]: row for row in rows if _label(row) == "exact"}
    return all(
        row["right"] >= exact[task]["right"] - ENOUGH * row["prompts"] for task, row in own.items()
    )


def _share(rows: Sequence[Row], label: str) -> float:
    own = [row for row in rows if _label(row) == label]
    return float(sum(row["right"] for row in own) / sum(row["prompts"] for row in own))


def _section(title: str, about: str, table: str, rows: list[Row]) -> str:
    text = "\n\n".join(fill(part, 100) for part in about.split("\n\n"))
    return f"## {title}\n\n{text}\n\n{table}\n\n{environment_line(rows)}."


def _row(rows: Sequence[Row], name: str, share: float) -> Row:
    return next(
        row
        for row in rows
        if row["prefill"]["name"] == name and row["prefill"]["keep_ratio"] == share
    )


def _label(row: Row) -> str:
    prefill = row["prefill"]
    if prefill["name"] == "exact":
        return "exact"
    return f"{prefill['name']}, {prefill['layer']}, {prefill['keep_ratio']:.0%}"


def _ratio(row: Row) -> str:
    ratio = row["ratio"]
    if row["prefill"]["name"] == "exact":
        return "1.00"
    return f"{ratio['p50']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"


def _cell(row: Row) -> str:
    return f"{row['right'] / row['prompts']:.2f} ({row['loss']:.3f})"


_SECTIONS = {"time": _time, "shape": _shape, "quality": _quality}
