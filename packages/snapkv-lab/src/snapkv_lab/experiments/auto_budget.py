"""A budget that the votes choose, against fixed ones; and how often the words for it were right.

    python -m snapkv_lab.experiments auto_budget  measure what is not there yet, render the page
    python -m snapkv_lab.experiments auto_budget --render
        render the page from the rows that are there

The texts and questions are those of `snapkv_lab.experiments.pooling`. A row is one question: what
the full cache has right, and of every policy what it has right, its loss, what it kept, and what
its votes lost. Rows: `docs/results/auto_budget.jsonl`. Page: `docs/results/tables/auto_budget.md`.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from snapkv import AdaKV, AutoBudget, SnapKV, default_policy
from snapkv.app.models import load
from snapkv.policies import Policy
from snapkv_lab.experiments.auto_budget_page import render
from snapkv_lab.experiments.environment import describe_environment
from snapkv_lab.experiments.pooling_cases import Maker, Text
from snapkv_lab.experiments.pooling_reading import ReadText, scored_full, scored_rows
from snapkv_lab.experiments.reading import ReadPrompt
from snapkv_lab.experiments.records import (
    RESULTS,
    TABLES,
    Row,
    read_rows,
)

ROWS = RESULTS / "auto_budget.jsonl"
PAGE = TABLES / "auto_budget.md"

FIRST, ROUNDS = 80, 12
"""Other texts than those that the pooling was chosen by."""

BUDGETS = (48, 64, 96, 128, 192, 256, 384)
MASSES = (0.5, 0.4, 0.3)
BOUNDS = (0.01, 0.005, 0.0025, 0.001)


def policies() -> dict[str, Policy]:
    """Every policy of the comparison, by its name in the rows."""
    fixed = {f"fading {budget}": default_policy(budget) for budget in BUDGETS}
    papers = {f"paper's {budget}": SnapKV(budget) for budget in (128, 256, 384)}
    auto = {f"auto {bound}": default_policy(AutoBudget(lost_vote=bound)) for bound in BOUNDS}
    shared = {
        f"auto {bound}, by head": AdaKV(default_policy(AutoBudget(lost_vote=bound)))
        for bound in (0.005, 0.0025)
    }
    masses = {f"mass {most}": default_policy(_MassBudget(lost_vote=most)) for most in MASSES}
    return {**fixed, **papers, **auto, **shared, **masses}


@dataclass(frozen=True, kw_only=True)
class _MassBudget(AutoBudget):
    """Bounds the sum of the lost votes instead of the highest: `lost_vote` is their share."""

    def voted(self, shares: Tensor) -> Tensor:
        """How many of the best positions of every head have all but that share of its votes."""
        held = shares.sort(dim=-1, descending=True).values.cumsum(dim=-1)
        short = held < (1 - self.lost_vote) * held[..., -1:]
        return short.sum(dim=-1) + 1


def texts(make: Maker) -> Iterator[Text]:
    """Round after round, so that a run that is stopped has some of every kind."""
    for index in range(FIRST, FIRST + ROUNDS):
        yield make.needles(1024, index, turns=False)
        yield make.lines(1024, index, questions=2)
        yield make.quotes(1024, index, questions=2)
        yield make.rag(6, index, questions=2)
        yield make.prose(1024, 32, index)
        yield make.code(1024, 32, index)


def measure() -> None:
    """Read every text that has no row yet; append a row for each question."""
    loaded = load("demo")
    known = read_rows(ROWS) if ROWS.exists() else []
    done = {row["text"] for row in known if "text" in row}
    tried = policies()
    run = {"model": loaded.description(), "environment": describe_environment()}
    with ROWS.open("a", encoding="utf-8") as file:
        if run not in known:
            file.write(json.dumps(run) + "\n")
        for text in texts(Maker(loaded.tokenizer)):
            if text.name in done:
                continue
            read = ReadText(loaded.model, text.ids)
            rows = [_row(read, text, number, tried) for number in range(len(text.cases))]
            file.write("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
            file.flush()
            print(text.name, file=sys.stderr)


def _row(read: ReadText, text: Text, number: int, tried: dict[str, Policy]) -> Row:
    case = text.cases[number]
    prompt = read.asked(case.question_ids)
    full = scored_full(prompt, case)
    answers: dict[str, Any] = {}
    if any(full.right) or not full.right:
        for name, policy in tried.items():
            answers[name] = _answer(prompt, policy, case)
    return {
        "text": text.name,
        "question": number,
        "group": case.group,
        "prompt_tokens": prompt.prompt_tokens,
        "full": {"right": list(map(int, full.right)), "nll": full.nll},
        "answers": answers,
    }


def _answer(prompt: ReadPrompt, policy: Policy, case: Any) -> dict[str, Any]:
    """What one policy answers, and what its cache reports behind the prompt."""
    cache = prompt.compressed(policy)
    report = cache.report()
    scored = scored_rows(prompt, cache, 1, case)[0]
    kept = [layer["kept_tokens"] for layer in report["layers"]]
    return {
        "right": list(map(int, scored.right)),
        "nll": scored.nll,
        "kept": round(report.kept_tokens, 1),
        "kept_least": min(kept),
        "kept_most": max(kept),
        "bytes": report.held_bytes / report.full_bytes,
        "lost": report["lost_votes"],
        "peak": report["lost_vote_peak"],
    }


def main(arguments: Sequence[str]) -> None:
    """Measure unless told only to render."""
    if "--render" not in arguments:
        measure()
    PAGE.write_text(render(read_rows(ROWS)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
