"""Which pooling of the votes, and which window: right answers and loss at equal budgets.

    python -m benchmarks.pooling             measure what is not there yet, render page and figure
    python -m benchmarks.pooling --render    render page and figure from the rows that are there
    python -m benchmarks.pooling screening   only this part: many settings, few texts

A row is one question about one text: what the full cache answers, and what every setting does. It
is written when it is measured, and a run that was stopped goes on behind it. Rows:
`docs/results/pooling.jsonl`. Page: `docs/results/pooling.md`, figure `docs/results/pooling.svg`.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.environment import describe_environment
from benchmarks.pooling_cases import Case, Maker, Text
from benchmarks.pooling_page import figure, render
from benchmarks.pooling_reading import (
    FadingBothWays,
    ReadText,
    Scored,
    compressed_rows,
    scored_full,
    scored_rows,
)
from benchmarks.reading import ReadPrompt
from benchmarks.records import RESULTS, Row, read_rows
from snapkv import SnapKV
from snapkv.app.models import load
from snapkv.lab.drawing import save

ROWS = RESULTS / "pooling.jsonl"
PAGE = RESULTS / "pooling.md"
FIGURE = RESULTS / "pooling.svg"

Policy = Callable[[int, int], SnapKV]
"""Takes a budget and a window."""


def _centred(width: int) -> Policy:
    return lambda budget, window: SnapKV(budget, window_size=window, kernel_size=width)


def _pair(before: int, behind: int) -> Policy:
    pair = (before, behind)
    return lambda budget, window: SnapKV(budget, window_size=window, kernel_size=pair)


def _fading(decay: float) -> Policy:
    return lambda budget, window: SnapKV(budget, window_size=window, pooling="fading", decay=decay)


def _both_ways(decay: float, before: float) -> Policy:
    return lambda budget, window: FadingBothWays(
        budget, window_size=window, pooling="fading", decay=decay, before=before
    )


POOLINGS: dict[str, Policy] = {
    "centred 7": _centred(7),
    "centred 13": _centred(13),
    "0+6": _pair(0, 6),
    "0+12": _pair(0, 12),
    "2+10": _pair(2, 10),
    "0+20": _pair(0, 20),
    "fading 0.80": _fading(0.80),
    "fading 0.85": _fading(0.85),
    "fading 0.90": _fading(0.90),
    "fading 0.935": _fading(0.935),
    "fading 0.95": _fading(0.95),
    "fading 0.90, back 0.5": _both_ways(0.90, 0.5),
    "fading 0.90, back 0.7": _both_ways(0.90, 0.7),
    "fading 0.935, back 0.5": _both_ways(0.935, 0.5),
}
"""Every pooling that a row may name."""

_FEW = ("centred 7", "centred 13", "0+12", "fading 0.90", "fading 0.935")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the study.

    Attributes:
        name: as rows have it.
        settings: window and pooling of every setting.
        shares: budgets, as what part of the prompt: 8 for an eighth.
        texts: makes what is read.
    """

    name: str
    settings: Sequence[tuple[int, str]]
    shares: Sequence[int]
    texts: Callable[[Maker], Iterator[Text]]


def _screened(make: Maker) -> Iterator[Text]:
    for index in range(2):
        yield make.needles(1024, index, turns=True)
        yield make.quotes(1024, index, questions=3)
        yield make.lines(1024, index, questions=3)
        yield make.prose(1024, 32, index)
        yield make.code(1024, 32, index)
    for index in range(2, 6):
        yield make.needles(1024, index, turns=index < 4)
    yield make.needles(2048, 0, turns=False)


SCREENING = Part(
    name="screening",
    settings=[(16, name) for name in POOLINGS]
    + [(window, name) for window in (8, 32, 64) for name in _FEW],
    shares=(32, 16, 8, 4),
    texts=_screened,
)

PARTS = {part.name: part for part in (SCREENING,)}


def measure(part: Part) -> None:
    """Read every text that has no row yet; append a row for each of its questions."""
    loaded = load("demo")
    done = {(row["part"], row["text"]) for row in _rows()}
    with ROWS.open("a", encoding="utf-8") as file:
        common = {"model": loaded.description(), "environment": describe_environment()}
        for text in part.texts(Maker(loaded.tokenizer)):
            if (part.name, text.name) in done:
                continue
            read = ReadText(loaded.model, text.ids)
            rows = [_row(read, case, part) for case in text.cases]
            for number, row in enumerate(rows):
                whole = {"part": part.name, "text": text.name, "question": number, **row, **common}
                file.write(json.dumps(whole) + "\n")
            file.flush()
            print(f"{part.name}: {text.name}", file=sys.stderr)


def _rows() -> list[Row]:
    return read_rows(ROWS) if ROWS.exists() else []


def _row(read: ReadText, case: Case, part: Part) -> Row:
    prompt = read.asked(case.question_ids)
    return {
        "group": case.group,
        "setting": case.setting,
        "prompt_tokens": prompt.prompt_tokens,
        "answer_tokens": len(case.answer_ids),
        "full": _scores(scored_full(prompt, case)),
        "answers": [
            answer for share in part.shares for answer in _answers(prompt, case, part, share)
        ],
    }


def _answers(prompt: ReadPrompt, case: Case, part: Part, share: int) -> Iterator[Row]:
    """What every setting answers at one budget; windows that it has no room for are left out."""
    budget = prompt.prompt_tokens // share
    settings = [(window, name) for window, name in part.settings if window < budget]
    if not settings:
        return
    policies = [POOLINGS[name](budget, window) for window, name in settings]
    kept = compressed_rows(prompt, policies)
    scores = scored_rows(prompt, kept.cache, len(policies), case)
    for place, (window, name) in enumerate(settings):
        yield {
            "share": share,
            "budget": budget,
            "window": window,
            "pooling": name,
            **_scores(scores[place]),
            "lost": kept.lost_of(place),
        }


def _scores(scored: Scored) -> Row:
    return {"right": [int(right) for right in scored.right], "nll": scored.nll}


def main() -> None:
    """Measure unless told only to render."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--render", action="store_true", help="only render from the rows")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"expected parts of {', '.join(PARTS)}, got {', '.join(unknown)}")
    if not given.render:
        for name in given.parts or PARTS:
            measure(PARTS[name])
    rows = read_rows(ROWS)
    PAGE.write_text(render(rows), encoding="utf-8")
    save(figure(rows), FIGURE)
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
