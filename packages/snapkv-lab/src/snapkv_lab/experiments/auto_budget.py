"""A budget that the votes choose, against fixed ones; and how often the words for it were right.

The texts and questions are those of `snapkv_lab.experiments.pooling`. A row is one question: what
the full cache has right, and of every policy what it has right, its loss, what it kept, and what
its votes lost.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from torch import Tensor

from snapkv import AdaKV, AutoBudget, SnapKV, default_policy
from snapkv.cli.notes import DOUBTFUL_BELOW, SAFE_BELOW, word_for
from snapkv.policies import Policy
from snapkv_lab.experiments.environment import describe_environment
from snapkv_lab.experiments.experiment import Experiment, Given, Shown, table
from snapkv_lab.experiments.pooling_cases import Maker, Text
from snapkv_lab.experiments.pooling_reading import ReadText, scored_full, scored_rows
from snapkv_lab.experiments.pooling_rows import Count, counted
from snapkv_lab.experiments.reading import ReadPrompt
from snapkv_lab.experiments.records import Row, append_rows, environment_line, markdown_table

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


def measure(given: Given) -> Iterator[Row]:
    """Read every text that has no row yet; append a row for each question."""
    known, tried = EXPERIMENT.known(), policies()
    done = {row["text"] for row in known if "text" in row}
    run = {"model": given.loaded.description(), "environment": describe_environment()}
    append_rows(EXPERIMENT.rows, [run] if run not in known else [])
    for text in texts(Maker(given.loaded.tokenizer)):
        if text.name not in done:
            read = ReadText(given.loaded.model, text.ids)
            rows = [_row(read, text, number, tried) for number in range(len(text.cases))]
            append_rows(EXPERIMENT.rows, rows)
            print(text.name, file=sys.stderr)
            yield from rows


def _row(read: ReadText, text: Text, number: int, tried: dict[str, Policy]) -> Row:
    case = text.cases[number]
    prompt = read.asked(case.question_ids)
    full = scored_full(prompt, case)
    says_something = any(full.right) or not full.right
    return {
        "text": text.name,
        "question": number,
        "group": case.group,
        "prompt_tokens": prompt.prompt_tokens,
        "full": {"right": list(map(int, full.right)), "nll": full.nll},
        "answers": {
            name: _answer(prompt, policy, case) for name, policy in tried.items() if says_something
        },
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


PEAKS = (0.00075, SAFE_BELOW, 0.002, 0.004, DOUBTFUL_BELOW, 0.016, 0.032)
LOST_MASSES = (0.1, 0.15, 0.2, 0.3, 0.4)
WORDS = ("safe", "doubtful", "lost")
WORDS_TITLE = "The word for the lost votes, and whether the answer was right"

_SHOWN = ("fading 96", "fading 192", "fading 256", "auto 0.0025", "auto 0.0025, by head")
_FAMILIES = {"all": "", "fading, fixed": "fading", "auto": "auto", "the paper's": "paper"}
"""Of policies, by how their names begin."""

Answered = tuple[str, Row, dict[str, Any]]
"""A policy's name, a question's row, and what the policy answered."""


def last_run(rows: Sequence[Row]) -> str:
    """What the page says of where its rows were measured: the last run's line."""
    return environment_line([row for row in rows if "environment" in row][-1:])


def _tables(rows: list[Row]) -> list[str]:
    asked = [row for row in rows if row.get("answers")]
    tokens = round(fmean(row["prompt_tokens"] for row in asked))
    answers = {
        name: [(name, row, row["answers"][name]) for row in asked] for name in asked[0]["answers"]
    }
    everything = [answer for own in answers.values() for answer in own]
    return [
        f"## Prompts of about {tokens:,} tokens",
        table(
            answers.items(),
            {
                "policy": lambda item: item[0],
                "tokens kept": lambda item: f"{_mean(item[1], 'kept'):.0f}",
                "bytes": lambda item: f"{100 * _mean(item[1], 'bytes'):.0f} %",
                "right": lambda item: str(_right(item[1])),
                "loss per token above the full cache's": lambda item: f"{_loss(item[1]):+.3f}",
            },
        ),
        "## Right answers by kind of question (mean number of tokens kept)",
        _by_kind({name: own for name, own in answers.items() if name in _SHOWN}),
        f"## {WORDS_TITLE}",
        _families("word", everything, lambda found: word_for(found["peak"], 0), WORDS),
        "## The highest lost vote, and whether the answer was right",
        _families("peak", everything, lambda found: _bin(found["peak"], PEAKS), _bins(PEAKS)),
        "## The sum of the lost votes, and whether the answer was right",
        _families(
            "mass", everything, lambda found: _bin(found["lost"], LOST_MASSES), _bins(LOST_MASSES)
        ),
    ]


def _by_kind(answers: dict[str, list[Answered]]) -> str:
    lines = []
    for group in dict.fromkeys(row["group"] for own in answers.values() for _, row, _ in own):
        of_group = [[each for each in own if each[1]["group"] == group] for own in answers.values()]
        counts = [_right(own) for own in of_group]
        if counts[0].of:
            pairs = zip(counts, of_group, strict=True)
            cells = (f"{each.right}/{each.of} ({_mean(own, 'kept'):.0f})" for each, own in pairs)
            lines.append([group, *cells])
    return markdown_table(["kind", *answers], lines)


def _families(
    what: str,
    answers: Sequence[Answered],
    label: Callable[[dict[str, Any]], str],
    order: Sequence[str],
) -> str:
    """How often answers were right, by what a number of theirs is called."""
    lines = []
    for value in order:
        own = [answer for answer in answers if label(answer[-1]) == value]
        counts = (
            _right([each for each in own if each[0].startswith(begin)])
            for begin in _FAMILIES.values()
        )
        lines.append([value, *map(str, counts)])
    return markdown_table([what, *_FAMILIES], lines)


def _bin(value: float, borders: Sequence[float]) -> str:
    below = next((border for border in borders if value < border), None)
    return f"{borders[-1]:g} and more" if below is None else f"below {below:g}"


def _bins(borders: Sequence[float]) -> list[str]:
    return [*(f"below {border:g}" for border in borders), f"{borders[-1]:g} and more"]


def _right(answers: Iterable[Answered]) -> Count:
    """Parts of answers that are right, of those that the full cache has right."""
    return counted(
        own
        for _, row, found in answers
        for own, full in zip(found["right"], row["full"]["right"], strict=True)
        if full
    )


def _mean(answers: Iterable[Answered], number: str) -> float:
    return fmean(found[number] for *_, found in answers)


def _loss(answers: Iterable[Answered]) -> float:
    return fmean(
        found["nll"] - row["full"]["nll"]
        for _, row, found in answers
        if row["full"]["nll"] is not None
    )


_FEW = "Prompts of about 1,030 tokens"

EXPERIMENT = Experiment(
    name="auto_budget",
    title="The budget that the votes choose, and how often its words were right",
    takes="hours",
    measure=measure,
    resumes=True,
    measured=last_run,
    tables=_tables,
    shown={
        "auto": Shown(
            _FEW,
            ("policy", "tokens kept", "bytes", "right"),
            ("paper's 256", "fading 192", "fading 256", "auto 0.0025", "auto 0.0025, by head"),
        ),
        "default": Shown(
            _FEW,
            ("policy", "bytes", "right"),
            ("paper's 128", "paper's 256", "fading 128", "auto 0.0025"),
        ),
        "words": Shown(WORDS_TITLE, ("word", "all", "auto")),
    },
)


if __name__ == "__main__":
    EXPERIMENT.main()
