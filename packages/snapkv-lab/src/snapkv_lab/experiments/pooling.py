"""Which pooling of the votes, and which window: right answers and loss at equal budgets.

    python -m snapkv_lab.experiments pooling  measure what is not there yet, render page and figure
    python -m snapkv_lab.experiments pooling --render
        render page and figure from the rows that are there
    python -m snapkv_lab.experiments pooling screening   only this part: many settings, few texts

A row is one question about one text: what the full cache answers, and what every setting does. It
is written when it is measured, and a run that was stopped goes on behind it. Rows:
`docs/results/pooling.jsonl`. Page: `docs/results/tables/pooling.md`, figure:
`docs/results/pooling.svg`.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from snapkv import SnapKV
from snapkv.app.models import load
from snapkv_lab.drawing import save
from snapkv_lab.evaluate.tasks.ruler import GENERATORS
from snapkv_lab.experiments.environment import describe_environment
from snapkv_lab.experiments.pooling_cases import Case, Maker, Text
from snapkv_lab.experiments.pooling_page import figure, render
from snapkv_lab.experiments.pooling_reading import (
    FadingBothWays,
    FadingSoFar,
    ReadText,
    RunThenFading,
    Scored,
    SinksStill,
    compressed_rows,
    scored_full,
    scored_rows,
    shown_to,
)
from snapkv_lab.experiments.reading import ReadPrompt
from snapkv_lab.experiments.records import (
    RESULTS,
    TABLES,
    Row,
    read_rows,
)

ROWS = RESULTS / "pooling.jsonl"
PAGE = TABLES / "pooling.md"
FIGURE = RESULTS / "pooling.svg"

Policy = Callable[[int, int], SnapKV]
"""Takes a budget and a window."""


def _centred(width: int) -> Policy:
    return lambda budget, window: SnapKV(budget, window_size=window, kernel_size=width)


def _pair(before: int, behind: int, method: type[SnapKV] = SnapKV, sinks: int = 0) -> Policy:
    pair = (before, behind)
    return lambda budget, window: method(
        budget, window_size=window, kernel_size=pair, sink_tokens=sinks
    )


def _fading(decay: float, method: type[SnapKV] = SnapKV, sinks: int = 0, **own: float) -> Policy:
    return lambda budget, window: method(
        budget, window_size=window, pooling="fading", decay=decay, sink_tokens=sinks, **own
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
    "fading 0.90, back 0.5": _fading(0.90, FadingBothWays, before=0.5),
    "fading 0.90, back 0.7": _fading(0.90, FadingBothWays, before=0.7),
    "fading 0.935, back 0.5": _fading(0.935, FadingBothWays, before=0.5),
    "0+12, sinks still": _pair(0, 12, SinksStill),
    "0+20, sinks still": _pair(0, 20, SinksStill),
    "fading 0.80, sinks still": _fading(0.80, SinksStill),
    "fading 0.85, sinks still": _fading(0.85, SinksStill),
    "fading 0.90, sinks still": _fading(0.90, SinksStill),
    "fading 0.935, sinks still": _fading(0.935, SinksStill),
    "fading 0.95, sinks still": _fading(0.95, SinksStill),
    "0+6 then 0.90, sinks still": _fading(0.90, RunThenFading, run=6),
    "0+12 then 0.90, sinks still": _fading(0.90, RunThenFading, run=12),
    "fading 0.935, 4 sinks": _fading(0.935, sinks=4),
    "fading 0.935, 1 sink": _fading(0.935, sinks=1),
    "fading 0.935, back 0.7, 4 sinks": _fading(0.935, FadingBothWays, sinks=4, before=0.7),
    "fading 0.935, back 0.85, 4 sinks": _fading(0.935, FadingBothWays, sinks=4, before=0.85),
    "6+12, 4 sinks": _pair(6, 12, sinks=4),
    "fading 0.90, 20 far": _fading(0.90, FadingSoFar, reach=20),
    "fading 0.95, 32 far": _fading(0.95, FadingSoFar, reach=32),
}
"""Every pooling that a row may name."""

_FEW = ("centred 7", "centred 13", "0+12", "fading 0.90", "fading 0.935")
_PAPERS_TO_FADING = tuple(
    name for name in POOLINGS if "sink" not in name and not name.endswith("far")
)
_WITHOUT_SINKS = (
    *(name for name in POOLINGS if name.endswith("sinks still") and "then" not in name),
    *("fading 0.90, 20 far", "fading 0.95, 32 far"),
)


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


def _all_kinds(make: Maker) -> Iterator[Text]:
    """Round after round, so that a run that is stopped has some of every kind."""
    tracing = make.ruler("vt", 1024, ROUNDS)
    turns = itertools.cycle(make.ruler(task, 1024, ROUNDS) for task in GENERATORS if task != "vt")
    for index in range(FIRST, FIRST + ROUNDS):
        yield make.needles(1024, index, turns=True)
        yield make.lines(1024, index, questions=2)
        yield make.quotes(1024, index, questions=3)
        yield make.rag(6, index, questions=3)
        yield next(tracing)
        yield from (next(next(turns)) for _ in range(RULER_A_ROUND))
        yield make.prose(1024, 32, index)
        yield make.code(1024, 32, index)
        if index % 4 == 0:
            yield make.needles(2048, index, turns=False)


def _traced(make: Maker) -> Iterator[Text]:
    """Where what stands before a vote is wanted, and a few others beside."""
    yield from make.ruler("vt", 1024, TRACED)
    for index in range(FIRST, FIRST + 2):
        yield make.needles(1024, index, turns=True)
        yield make.lines(1024, index, questions=2)
        yield make.quotes(1024, index, questions=3)


TRACED = 6
"""How many of RULER's vt are also asked of poolings to both sides."""

FIRST = 10
"""The number of the main part's first texts: others than those of the first look."""

ROUNDS = 24
RULER_A_ROUND = 5

SINKS_PART = Part(
    name="sinks",
    settings=[
        *((16, name) for name in ("centred 7", "0+12", "fading 0.90", *_WITHOUT_SINKS)),
        *(
            (window, f"fading {decay}, sinks still")
            for window in (8, 32)
            for decay in ("0.90", "0.935")
        ),
        (32, "0+12, sinks still"),
    ],
    shares=(32, 16, 8, 4),
    texts=_screened,
)
SCREENING = Part(
    name="screening",
    settings=[(16, name) for name in _PAPERS_TO_FADING]
    + [(window, name) for window in (8, 32, 64) for name in _FEW],
    shares=(32, 16, 8, 4),
    texts=_screened,
)

MAIN = Part(
    name="main",
    settings=[
        (16, "centred 7"),
        (32, "centred 7"),
        (16, "centred 13"),
        (16, "0+12, sinks still"),
        (16, "fading 0.90"),
        (8, "fading 0.935, sinks still"),
        (16, "fading 0.935, sinks still"),
        (32, "fading 0.935, sinks still"),
    ],
    shares=(32, 16, 8, 4),
    texts=_all_kinds,
)

MORE = Part(
    name="more",
    settings=[
        (8, "0+12, sinks still"),
        (8, "fading 0.90, sinks still"),
        (16, "fading 0.90, sinks still"),
        (16, "fading 0.95, sinks still"),
        (16, "0+20, sinks still"),
        (16, "0+6 then 0.90, sinks still"),
        (16, "0+12 then 0.90, sinks still"),
    ],
    shares=(32, 16, 8, 4),
    texts=_all_kinds,
)

KEPT = Part(
    name="kept",
    settings=[(16, "fading 0.935, 4 sinks"), (16, "fading 0.935, 1 sink")],
    shares=(32, 16, 8, 4),
    texts=_all_kinds,
)

BACK = Part(
    name="back",
    settings=[
        (16, "fading 0.935, back 0.7, 4 sinks"),
        (16, "fading 0.935, back 0.85, 4 sinks"),
        (16, "6+12, 4 sinks"),
    ],
    shares=(32, 16, 8, 4),
    texts=_traced,
)

SHORT = Part(
    name="short",
    settings=[(16, "0+6"), (16, "fading 0.80, sinks still")],
    shares=(32, 16, 8, 4),
    texts=_traced,
)

PARTS = {part.name: part for part in (SCREENING, SINKS_PART, MAIN, MORE, KEPT, BACK, SHORT)}


def measure(parts: Sequence[Part]) -> None:
    """Read every text that a part has no row of; append a row for each question and part.

    Args:
        parts: all of the same texts, each of which is read once for all of them.
    """
    loaded, known = load("demo"), _rows()
    done = {(row["part"], row["text"]) for row in known if "run" not in row}
    described = {"model": loaded.description(), "environment": describe_environment()}
    with ROWS.open("a", encoding="utf-8") as file:
        runs = [{"run": part.name, **described} for part in parts]
        _write(file, [run for run in runs if run not in known])
        for text in parts[0].texts(Maker(loaded.tokenizer)):
            wanted = [part for part in parts if (part.name, text.name) not in done]
            if not wanted:
                continue
            read = ReadText(loaded.model, text.ids)
            for part in wanted:
                numbers = range(len(text.cases))
                _write(file, [question_row(read, text, number, part) for number in numbers])
                print(f"{part.name}: {text.name}", file=sys.stderr)


def _rows() -> list[Row]:
    return read_rows(ROWS) if ROWS.exists() else []


def _write(file: TextIO, rows: Sequence[Row]) -> None:
    """All rows of a text at once, so that none is left half measured."""
    file.write("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    file.flush()


def question_row(read: ReadText, text: Text, number: int, part: Part) -> Row:
    """The row of one question: what the full cache and every setting of a part answer."""
    case = text.cases[number]
    prompt = read.asked(case.question_ids)
    full = scored_full(prompt, case)
    return {
        "part": part.name,
        "text": text.name,
        "question": number,
        "group": case.group,
        "setting": case.setting,
        "prompt_tokens": prompt.prompt_tokens,
        "answer_tokens": len(case.answer_ids),
        "full": {"right": list(map(int, full.right)), "nll": full.nll},
        "answers": list(_answers(prompt, case, part)) if _says_something(full) else [],
    }


def _says_something(full: Scored) -> bool:
    """Whether settings can be told apart: not where the full cache has no part of an answer."""
    return any(full.right) or not full.right


def _answers(prompt: ReadPrompt, case: Case, part: Part) -> Iterator[list[object]]:
    """What every setting answers at every budget, as `pooling_rows.COLUMNS` says.

    Windows that a budget has no room for are left out.
    """
    windows = {window for window, _ in part.settings}
    shown = shown_to(prompt, windows)
    for share in part.shares:
        budget = prompt.prompt_tokens // share
        settings = [(window, name) for window, name in part.settings if window < budget]
        if not settings:
            continue
        policies = [POOLINGS[name](budget, window) for window, name in settings]
        kept = compressed_rows(prompt, shown, policies)
        scores = scored_rows(prompt, kept.cache, len(policies), case)
        for place, (setting, scored) in enumerate(zip(settings, scores, strict=True)):
            right = list(map(int, scored.right))
            yield [share, budget, *setting, right, scored.nll, *kept.lost_of(place)]


def main() -> None:
    """Measure unless told only to render."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--render", action="store_true", help="only render from the rows")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"expected parts of {', '.join(PARTS)}, got {', '.join(unknown)}")
    if not given.render:
        names = given.parts or PARTS
        for texts in (_screened, _all_kinds, _traced):
            if parts := [PARTS[name] for name in names if PARTS[name].texts is texts]:
                measure(parts)
    rows = read_rows(ROWS)
    PAGE.write_text(render(rows), encoding="utf-8")
    save(figure(rows), FIGURE)
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
