"""The tables and the figure of the study of pooling, made of nothing but its rows."""

import itertools
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from snapkv_lab.drawing import STYLE
from snapkv_lab.experiments.pooling_rows import (
    Answer,
    answers_of,
    count,
    loss_above_full,
    paired,
)
from snapkv_lab.experiments.pooling_tables import (
    CHOSEN,
    LEAST,
    at,
    mean_of_groups,
    named,
    of_group,
    right_in,
    settings_of,
    shares_of,
    table,
    told_apart,
    with_room,
    with_signal,
    worse_in,
)
from snapkv_lab.experiments.records import (
    Row,
    environment_line,
    markdown_table,
    tables_page,
)
from snapkv_lab.report.figures import line_style

LOST_BINS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)


def render(rows: list[Row]) -> str:
    """The tables of these rows."""
    main = [row for row in rows if row.get("part") == "main"]
    answers = _compared(rows)
    sections = {
        "All groups together": table(answers),
        "Mean of the groups": _mean_of_groups(answers),
        **_families(answers),
        f"Answers that only {named(CHOSEN)} has right, and only the other": _pairs(answers),
        f"Where {named(CHOSEN)} is not the best": _worse(answers),
        **_variations(answers, _answers(rows, "more")),
        **_traced(rows, answers),
        "Share of the votes that is lost, and right answers": _lost(answers),
        "Groups with too few right answers": _without_signal(main),
        "The first comparison, sinks": table(_answers(rows, "sinks")),
        "The first comparison, poolings": table(_answers(rows, "screening")),
        **_groups(main, answers),
    }
    headed = [part for name, own in sections.items() for part in (f"## {name}", own)]
    return tables_page("pooling", "Which pooling, which window", _environments(rows), *headed)


def _answers(rows: Iterable[Row], part: str) -> list[Answer]:
    return list(answers_of(row for row in rows if row.get("part") == part))


def _compared(rows: list[Row]) -> list[Answer]:
    """The answers of the large tables: to the questions that all of their settings were asked."""
    main, kept = _answers(rows, "main"), _answers(rows, "kept")
    both = {answer.question for answer in kept} or {answer.question for answer in main}
    asked = both & {answer.question for answer in main}
    return [answer for answer in [*main, *kept] if answer.question in asked]


def _environments(rows: Iterable[Row]) -> str:
    """A line for every machine and model, with all commits at which something was measured."""
    commits: dict[str, list[str]] = {}
    for row in rows:
        if "run" in row:
            line, _, commit = environment_line([row]).rpartition(", commit ")
            commits.setdefault(line, []).append(commit)
    return "; ".join(
        f"{line}; commits {', '.join(dict.fromkeys(own))}" for line, own in commits.items()
    )


def _mean_of_groups(answers: list[Answer]) -> str:
    """Over those in which the full cache has enough right; each counts once."""
    groups, shares = with_signal(answers), shares_of(answers)
    return markdown_table(
        ["setting", *(f"1/{share}" for share in shares)],
        [
            [named(setting), *(mean_of_groups(answers, groups, setting, s) for s in shares)]
            for setting in settings_of(answers)
        ],
    )


def _families(answers: Sequence[Answer]) -> dict[str, str]:
    """A table for every kind of task, in few parts."""
    found: dict[str, list[Answer]] = {}
    for answer in answers:
        found.setdefault(_family(answer.group), []).append(answer)
    return {name: table(own) for name, own in found.items()}


def _family(group: str) -> str:
    if group.startswith("RULER"):
        return "RULER"
    return next((name for name, groups in _FAMILIES.items() if group in groups), "Needles")


_FAMILIES = {
    "Questions that did not vote": ("needles, hidden question", "needles, second question"),
    "Lines": ("lines",),
    "Quotations": ("quotations",),
    "Documents": ("rag",),
    "Natural text and code": ("prose", "code"),
}


def _variations(main: Sequence[Answer], more: Sequence[Answer]) -> dict[str, str]:
    """More settings beside some of the others, on the questions that all were asked."""
    both = {answer.question for answer in more} & {answer.question for answer in main}
    beside = [a for a in main if a.setting in _BESIDE and a.question in both]
    own = [*beside, *(answer for answer in more if answer.question in both)]
    return {f"Variations, {_questions(own)} questions": table(own)}


_BESIDE = (
    (8, "fading 0.935, sinks still"),
    (16, "fading 0.935, sinks still"),
    (16, "0+12, sinks still"),
)


def _traced(rows: list[Row], compared: list[Answer]) -> dict[str, str]:
    """Where many short places are wanted: settings of a part of their own beside the others."""
    own = [*_answers(rows, "back"), *_answers(rows, "short")]
    both = {answer.question for answer in own} & {answer.question for answer in compared}
    asked = [answer for answer in [*compared, *own] if answer.question in both]
    variables = [answer for answer in asked if answer.group == "RULER vt"]
    others = [answer for answer in asked if answer.group != "RULER vt"]
    return {
        f"Variables, {_questions(variables)} samples": table(variables),
        f"The same settings, {_questions(others)} other questions": table(others),
    }


def _pairs(answers: list[Answer]) -> str:
    """The chosen setting against every other one, question by question."""
    shares = shares_of(answers)
    return markdown_table(
        ["against", *(f"1/{share}" for share in shares)],
        [
            [
                named(other),
                *(
                    "{} : {}".format(*paired([a for a in answers if a.share == s], CHOSEN, other))
                    for s in shares
                ),
            ]
            for other in settings_of(answers)
            if other != CHOSEN
        ],
    )


def _worse(answers: list[Answer]) -> str:
    """The best other setting of a group that is better by more than chance may explain."""
    lines = []
    for group in dict.fromkeys(answer.group for answer in answers):
        for share in shares_of(answers):
            own = [answer for answer in answers if (answer.group, answer.share) == (group, share)]
            lines += [[f"{group}, 1/{share}", *cells] for cells in worse_in(own)]
    return markdown_table(["group, budget", "best", "it has", "the chosen one"], lines)


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
    found = {}
    for group in dict.fromkeys(row["group"] for row in rows):
        own, of = [row for row in rows if row["group"] == group], of_group(answers, group)
        rights = [right for row in own for right in row["full"]["right"]]
        of_full = f", {sum(rights)} of {len(rights)} right" if rights else ""
        loss = fmean(row["full"]["nll"] for row in own if row["full"]["nll"] is not None)
        title = f"Group {group}: {len(own)} questions, full cache{of_full}, loss {loss:.2f}"
        if of:
            found[title] = table(of)
    return found


def _lost(answers: list[Answer]) -> str:
    """How right answers go with the mass of votes that was not kept."""
    own = [answer for answer in at(answers, CHOSEN) if answer.counted]
    names = ["mean", "highest layer", "highest head"]
    names += [f"{name}, without the first 4" for name in names]
    places = range(len(names))
    return markdown_table(
        ["lost mass", *names],
        [
            *(
                [f"{low:.1f} to {high:.1f}", *(right_in(own, n, low, high) for n in places)]
                for low, high in itertools.pairwise(LOST_BINS)
            ),
            ["told apart", *(told_apart(own, place) for place in places)],
        ],
    )


def _questions(answers: Iterable[Answer]) -> int:
    return len({answer.question for answer in answers})


def figure(rows: list[Row]) -> Any:
    """Right answers on the left and the loss above the full cache on the right, by budget."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    answers = _compared(rows)
    with rc_context(STYLE):
        made = Figure(figsize=(9.0, 4.4), layout="constrained")
        left, right = made.subplots(1, 2)
        for index, setting in enumerate(settings_of(answers)):
            shares = [share for share in shares_of(answers) if with_room(answers, setting, share)]
            cells = [at(answers, setting, share) for share in shares]
            style = line_style(index)
            left.plot(shares, [100 * count(cell).share for cell in cells], **style)
            losses = [loss_above_full(cell) for cell in cells]
            right.plot(shares, losses, label=named(setting), **style)
        _label(left, shares_of(answers), "right where the full cache is right (percent)")
        _label(right, shares_of(answers), "loss per token above the full cache (nats)")
        left.set_ylim(0, 100)
        right.set_ylim(bottom=0)
        made.legend(loc="outside upper center", ncols=3, frameon=False)
    return made


def _label(panel: Any, shares: Sequence[int], label: str) -> None:
    panel.set_xscale("log", base=2)
    panel.invert_xaxis()
    panel.minorticks_off()
    panel.set_xticks(shares, [f"1/{share}" for share in shares])
    panel.set(xlabel="budget, part of the prompt", ylabel=label)
    panel.grid(alpha=0.3)
