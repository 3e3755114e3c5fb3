"""Which pooling of the votes, and which window: right answers and loss at equal budgets.

A row is one question about one text: what the full cache answers, and what every setting does. It
is written when it is measured, and a run that was stopped goes on behind it. , figure:
`docs/results/pooling.svg`.
"""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from snapkv import SnapKV
from snapkv_lab.drawing import STYLE, save
from snapkv_lab.evaluate.tasks.ruler import GENERATORS
from snapkv_lab.experiments.environment import describe_environment
from snapkv_lab.experiments.experiment import Experiment, Given, Shown, of
from snapkv_lab.experiments.pooling_cases import Case, Maker, Text
from snapkv_lab.experiments.pooling_reading import (
    FadingBothWays,
    FadingSoFar,
    ReadText,
    RunThenFading,
    SinksStill,
    compressed_rows,
    scored_full,
    scored_rows,
    shown_to,
)
from snapkv_lab.experiments.pooling_rows import (
    Answer,
    Setting,
    answers_of,
    count,
    loss_above_full,
    paired,
)
from snapkv_lab.experiments.reading import ReadPrompt
from snapkv_lab.experiments.records import (
    RESULTS,
    Row,
    append_rows,
    environment_line,
    markdown_table,
)
from snapkv_lab.report.figures import line_style

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


def measure(given: Given) -> Iterator[Row]:
    """Read every text that a part has no row of; append a row for each question and part."""
    described = {"model": given.loaded.description(), "environment": describe_environment()}
    for texts in (_screened, _all_kinds, _traced):
        parts = [PARTS[name] for name in given.parts if PARTS[name].texts is texts]
        if not parts:
            continue
        known = EXPERIMENT.known()
        done = {(row["part"], row["text"]) for row in known if "run" not in row}
        runs: list[Row] = [{"run": part.name, **described} for part in parts]
        append_rows(EXPERIMENT.rows, [run for run in runs if run not in known])
        for text in texts(Maker(given.loaded.tokenizer)):
            wanted = [part for part in parts if (part.name, text.name) not in done]
            read = ReadText(given.loaded.model, text.ids) if wanted else None
            for part in wanted:
                assert read is not None
                rows = [question_row(read, text, each, part) for each in range(len(text.cases))]
                append_rows(EXPERIMENT.rows, rows)
                print(f"{part.name}: {text.name}", file=sys.stderr)
                yield from rows


def question_row(read: ReadText, text: Text, number: int, part: Part) -> Row:
    """The row of one question: what the full cache and every setting of a part answer."""
    case = text.cases[number]
    prompt = read.asked(case.question_ids)
    full = scored_full(prompt, case)
    says_something = any(full.right) or not full.right  # settings can be told apart
    return {
        "part": part.name,
        "text": text.name,
        "question": number,
        "group": case.group,
        "setting": case.setting,
        "prompt_tokens": prompt.prompt_tokens,
        "answer_tokens": len(case.answer_ids),
        "full": {"right": list(map(int, full.right)), "nll": full.nll},
        "answers": list(_answers(prompt, case, part)) if says_something else [],
    }


def _answers(prompt: ReadPrompt, case: Case, part: Part) -> Iterator[list[object]]:
    """What every setting answers at every budget, as `pooling_rows.COLUMNS` says.

    Windows that a budget has no room for are left out.
    """
    shown = shown_to(prompt, {window for window, _ in part.settings})
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


CHOSEN: Setting = (16, "fading 0.935, 4 sinks")
"""The default of `snapkv.policies.default`, with which the others are compared."""

LEAST = 5
"""Right answers of the full cache below which a group says nothing of right answers."""

LOST_BINS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)

_BESIDE = (
    (8, "fading 0.935, sinks still"),
    (16, "fading 0.935, sinks still"),
    (16, "0+12, sinks still"),
)
_FAMILIES = {
    "Questions that did not vote": ("needles, hidden question", "needles, second question"),
    "Lines": ("lines",),
    "Quotations": ("quotations",),
    "Documents": ("rag",),
    "Natural text and code": ("prose", "code"),
}


def _tables(rows: list[Row]) -> Iterator[str]:
    main = of(rows, part="main")
    answers = _compared(rows)
    sections = {
        "All groups together": _by_budget(answers),
        "Mean of the groups": _by_budget(answers, _mean_of(with_signal(answers))),
        **{name: _by_budget(own) for name, own in _grouped(answers, _family).items()},
        f"Answers that only {_named(CHOSEN)} has right, and only the other": _pairs(answers),
        f"Where {_named(CHOSEN)} is not the best": _worse(answers),
        **_variations(answers, _of_part(rows, "more")),
        **_traced_beside([*_of_part(rows, "back"), *_of_part(rows, "short")], answers),
        "Share of the votes that is lost, and right answers": _lost(answers),
        "Groups with too few right answers": _without_signal(main),
        "The first comparison, sinks": _by_budget(_of_part(rows, "sinks")),
        "The first comparison, poolings": _by_budget(_of_part(rows, "screening")),
        **_groups(main, answers),
    }
    return (part for name, own in sections.items() for part in (f"## {name}", own))


def _line(rows: list[Row]) -> str:
    """A line for every machine and model, with all commits at which something was measured."""
    commits: dict[str, list[str]] = {}
    for row in rows:
        if "run" in row:
            line, _, commit = environment_line([row]).rpartition(", commit ")
            commits.setdefault(line, []).append(commit)
    return "; ".join(
        f"{line}; commits {', '.join(dict.fromkeys(own))}" for line, own in commits.items()
    )


def _of_part(rows: list[Row], part: str) -> list[Answer]:
    return list(answers_of(of(rows, part=part)))


def _asked(answers: Iterable[Answer]) -> dict[str, None]:
    return dict.fromkeys(answer.question for answer in answers)


def _compared(rows: list[Row]) -> list[Answer]:
    """The answers of the large tables: to the questions that all of their settings were asked."""
    main, kept = _of_part(rows, "main"), _of_part(rows, "kept")
    both = (_asked(kept) or _asked(main)).keys() & _asked(main).keys()
    return [answer for answer in [*main, *kept] if answer.question in both]


def _grouped(answers: Iterable[Answer], by: Callable[[Answer], Any]) -> dict[Any, list[Answer]]:
    found: dict[Any, list[Answer]] = {}
    for answer in answers:
        found.setdefault(by(answer), []).append(answer)
    return found


def _settings(answers: Iterable[Answer]) -> dict[Setting, list[Answer]]:
    return _grouped(answers, lambda answer: answer.setting)


def _shares(answers: Iterable[Answer]) -> list[int]:
    """Every budget once, the smallest first."""
    return sorted({answer.share for answer in answers}, reverse=True)


def _at(answers: Iterable[Answer], share: int) -> list[Answer]:
    return [answer for answer in answers if answer.share == share]


def _family(answer: Answer) -> str:
    if answer.group.startswith("RULER"):
        return "RULER"
    return next((name for name, own in _FAMILIES.items() if answer.group in own), "Needles")


def _named(setting: Setting) -> str:
    return f"window {setting[0]}, {setting[1]}"


def _with_room(answers: Sequence[Answer]) -> dict[tuple[Setting, int], list[Answer]]:
    """The answers by setting and budget, where other settings have no room for more."""
    found = _grouped(answers, lambda answer: (answer.setting, answer.share))
    most = {
        share: max(len(own) for (_, at), own in found.items() if at == share)
        for share in _shares(answers)
    }
    return {key: own for key, own in found.items() if len(own) == most[key[1]]}


def _by_budget(
    answers: Sequence[Answer], told: Callable[[Sequence[Answer]], str] | None = None
) -> str:
    """Settings by budgets."""
    shares, cells, told = _shares(answers), _with_room(answers), told or _right_and_loss
    return markdown_table(
        ["setting", *(f"1/{share}" for share in shares)],
        [
            [_named(each), *(told(cells.get((each, share), ())) or "no room" for share in shares)]
            for each in _settings(answers)
        ],
    )


def _right_and_loss(answers: Sequence[Answer]) -> str:
    counted, loss = count(answers), loss_above_full(answers)
    right = f"{counted}" if counted.of else ""
    return ", ".join(filter(None, [right, "" if loss is None else f"{loss:+.2f}"]))


def _mean_of(groups: Sequence[str]) -> Callable[[Sequence[Answer]], str]:
    """The mean over groups of their share of right answers; each counts once."""

    def told(answers: Sequence[Answer]) -> str:
        own = _grouped(answers, lambda answer: answer.group)
        counts = [found for group in groups if (found := count(own.get(group, ()))).of]
        return f"{fmean(found.share for found in counts):.2f}" if counts else ""

    return told


def with_signal(answers: Sequence[Answer]) -> list[str]:
    """Groups of which the full cache has enough right."""
    most: dict[str, int] = {}
    cells = _grouped(answers, lambda answer: (answer.group, answer.setting, answer.share))
    for (group, *_), own in cells.items():
        most[group] = max(most.get(group, 0), count(own).of)
    return [group for group, right in most.items() if right >= LEAST]


def _variations(main: Sequence[Answer], more: Sequence[Answer]) -> dict[str, str]:
    """More settings beside some of the others, on the questions that all were asked."""
    both = _asked(more).keys() & _asked(main).keys()
    beside = [answer for answer in main if answer.setting in _BESIDE]
    own = [answer for answer in [*beside, *more] if answer.question in both]
    return {f"Variations, {len(_asked(own))} questions": _by_budget(own)}


def _traced_beside(own: list[Answer], compared: list[Answer]) -> dict[str, str]:
    """Where many short places are wanted: settings of a part of their own beside the others."""
    both = _asked(own).keys() & _asked(compared).keys()
    asked = [answer for answer in [*compared, *own] if answer.question in both]
    variables = [answer for answer in asked if answer.group == "RULER vt"]
    others = [answer for answer in asked if answer.group != "RULER vt"]
    return {
        f"Variables, {len(_asked(variables))} samples": _by_budget(variables),
        f"The same settings, {len(_asked(others))} other questions": _by_budget(others),
    }


def _pairs(answers: list[Answer]) -> str:
    """The chosen setting against every other one, question by question."""
    shares = _shares(answers)
    lines = [
        [_named(each), *("{} : {}".format(*paired(_at(answers, s), CHOSEN, each)) for s in shares)]
        for each in _settings(answers)
        if each != CHOSEN
    ]
    return markdown_table(["against", *(f"1/{share}" for share in shares)], lines)


def _worse(answers: list[Answer]) -> str:
    """The best other setting of a group that is better by more than chance may explain.

    By more than one answer; in groups without answers, by more than 0.02 nats a token.
    """
    lines = []
    for group, of_group in _grouped(answers, lambda answer: answer.group).items():
        for share in _shares(answers):
            others = _settings(_at(of_group, share))
            ours = others.pop(CHOSEN, [])
            if not ours or not others:
                continue
            mine, loss, name = count(ours), loss_above_full(ours), f"{group}, 1/{share}"
            if mine.of:
                best = max(others, key=lambda other: count(others[other]).right)
                theirs = count(others[best])
                if theirs.right > mine.right + 1:
                    told = f"{theirs.right} of {theirs.of}"
                    lines.append([name, _named(best), told, str(mine.right)])
            elif loss is not None:
                losses = {other: loss_above_full(own) for other, own in others.items()}
                lowest, best = min((one, other) for other, one in losses.items() if one is not None)
                if lowest < loss - 0.02:
                    lines.append([name, _named(best), f"{lowest:+.2f}", f"{loss:+.2f}"])
    return markdown_table(["group, budget", "best", "it has", "the chosen one"], lines)


def _lost(answers: list[Answer]) -> str:
    """How right answers go with the mass of votes that was not kept."""
    own = [answer for answer in answers if answer.setting == CHOSEN and answer.counted]
    names = ["mean", "highest layer", "highest head"]
    names += [f"{name}, without the first 4" for name in names]
    lines = [
        [f"{low:.1f} to {high:.1f}", *(_right_in(own, n, low, high) for n in range(len(names)))]
        for low, high in itertools.pairwise(LOST_BINS)
    ]
    told = ["told apart", *(_told_apart(own, place) for place in range(len(names)))]
    return markdown_table(["lost mass", *names], [*lines, told])


def _right_in(answers: Iterable[Answer], place: int, low: float, high: float) -> str:
    """How many are right of the answers whose lost mass lies between two numbers."""
    inside = [a for a in answers if low <= a.lost[place] < high or a.lost[place] == high == 1]
    found = count(inside)
    return f"{found.share:.2f} of {found.of}" if found.of else ""


def _told_apart(answers: Iterable[Answer], place: int) -> str:
    """How often, of a right and a wrong answer, the wrong one has lost more mass."""
    lost: tuple[list[float], list[float]] = [], []
    for answer in answers:
        lost[all(answer.counted)].append(answer.lost[place])
    pairs = [(wrong > right) + (wrong == right) / 2 for wrong in lost[0] for right in lost[1]]
    return f"{fmean(pairs):.2f}" if pairs else ""


def _without_signal(rows: list[Row]) -> str:
    """What the full cache itself cannot answer."""
    asked: dict[str, list[int]] = {}
    for row in rows:
        asked.setdefault(row["group"], []).extend(row["full"]["right"])
    lines = [
        [group, f"{sum(rights)} of {len(rights)}"]
        for group, rights in asked.items()
        if rights and sum(rights) < LEAST
    ]
    return markdown_table(["group", "full cache right"], lines)


def _groups(rows: list[Row], answers: list[Answer]) -> dict[str, str]:
    found, of_group = {}, _grouped(answers, lambda answer: answer.group)
    for group in dict.fromkeys(row["group"] for row in rows):
        own = of(rows, group=group)
        rights = [right for row in own for right in row["full"]["right"]]
        of_full = f", {sum(rights)} of {len(rights)} right" if rights else ""
        loss = fmean(row["full"]["nll"] for row in own if row["full"]["nll"] is not None)
        title = f"Group {group}: {len(own)} questions, full cache{of_full}, loss {loss:.2f}"
        if group in of_group:
            found[title] = _by_budget(of_group[group])
    return found


def figure(rows: list[Row]) -> Any:
    """Right answers on the left and the loss above the full cache on the right, by budget."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    answers = _compared(rows)
    cells, shares = _with_room(answers), _shares(answers)
    with rc_context(STYLE):
        made = Figure(figsize=(9.0, 4.4), layout="constrained")
        panels = made.subplots(1, 2)
        for index, setting in enumerate(_settings(answers)):
            own = {share: cells[setting, share] for share in shares if (setting, share) in cells}
            style = line_style(index)
            panels[0].plot([*own], [100 * count(each).share for each in own.values()], **style)
            losses = [loss_above_full(each) for each in own.values()]
            panels[1].plot([*own], losses, label=_named(setting), **style)
        labels = (
            "right where the full cache is right (percent)",
            "loss per token above the full cache (nats)",
        )
        for panel, label in zip(panels, labels, strict=True):
            panel.set_xscale("log", base=2)
            panel.invert_xaxis()
            panel.minorticks_off()
            panel.set_xticks(shares, [f"1/{share}" for share in shares])
            panel.set(xlabel="budget, part of the prompt", ylabel=label)
            panel.grid(alpha=0.3)
        panels[0].set_ylim(0, 100)
        panels[1].set_ylim(bottom=0)
        made.legend(loc="outside upper center", ncols=3, frameon=False)
    return made


_DEFAULT = _named(CHOSEN)

EXPERIMENT = Experiment(
    name="pooling",
    title="Which pooling, which window",
    takes="a day",
    measure=measure,
    resumes=True,
    parts=tuple(PARTS),
    measured=_line,
    tables=_tables,
    drawn=lambda rows: save(figure(rows), RESULTS / "pooling.svg"),
    shown={
        "variables": Shown(
            "Variables, 6 samples",
            ("setting", "1/4"),
            (_DEFAULT, "window 16, centred 7", "window 16, 0+6"),
        ),
        "pooling": Shown(
            "All groups together",
            ("setting", "1/8", "1/4"),
            (
                _DEFAULT,
                "window 16, 0+12, sinks still",
                "window 16, centred 13",
                "window 32, centred 7",
            ),
        ),
    },
)


if __name__ == "__main__":
    EXPERIMENT.main()
