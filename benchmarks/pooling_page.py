"""The page and the figure of the study of pooling, made of nothing but its rows."""

import itertools
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from benchmarks.pooling_rows import (
    Answer,
    answers_of,
    count,
    loss_above_full,
    paired,
)
from benchmarks.pooling_tables import (
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
from benchmarks.records import Row, environment_line, markdown_table
from snapkv.lab.drawing import STYLE
from snapkv.lab.report.figures import line_style

LOST_BINS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)


def render(rows: list[Row]) -> str:
    """The page that these rows make."""
    main = [row for row in rows if row.get("part") == "main"]
    answers = _compared(rows)
    parts = [
        _HEAD,
        _environments(rows),
        _overall(answers),
        "![Right answers and loss against the budget](pooling.svg)",
        *_families(answers),
        _pairs(answers),
        _worse(answers),
        _variations(answers, _answers(rows, "more")),
        _lost(answers),
        _without_signal(main),
        _first_look(_answers(rows, "sinks"), _answers(rows, "screening")),
        _NOT_MEASURED,
        *_groups(main, answers),
    ]
    return "\n\n".join(parts) + "\n"


def _answers(rows: Iterable[Row], part: str) -> list[Answer]:
    return list(answers_of(row for row in rows if row.get("part") == part))


def _compared(rows: list[Row]) -> list[Answer]:
    """The answers of the large tables: to the questions that all of their settings were asked."""
    main, kept = _answers(rows, "main"), _answers(rows, "kept")
    both = {answer.question for answer in kept} or {answer.question for answer in main}
    asked = both & {answer.question for answer in main}
    return [answer for answer in [*main, *kept] if answer.question in asked]


_HEAD = """\
# Which pooling, which window

A prompt is read once with the full cache. Each setting then keeps what its policy keeps of that
reading, and the right answer is fed to the model token by token. A budget is a part of the prompt,
in tokens per KV head and layer, the window included; "no room" is a budget no larger than the
window, in some of the prompts at least.

- "Centred 7" is the paper's pooling: the maximum over seven neighbours. "0+12" is the maximum over
  a position and the twelve before it: a vote lifts the twelve tokens behind it.
- "Fading 0.90": a vote lifts all that stands behind it, by that factor less for every token. "Back
  0.5": and what stands before it, by that one. "20 far": no further than 20 tokens.
- "Sinks still": the votes for the first 4 tokens lift nothing but these tokens themselves. "4
  sinks" and "1 sink": the same of so many first tokens, and each head keeps them, whatever their
  votes; "fading 0.935, 4 sinks" is what `SnapKV(pooling="fading")` does.

Cells say how many answers are right **of those that the full cache has right**, with Wilson's
interval at 95 percent in brackets; behind it the negative log-likelihood of the answer per token
after its first, in nats, above that of the full cache, the mean over questions. An answer is right
if every token of it behind the first is the most likely one. The first is predicted while the
prompt is read, before anything is dropped; it counts only where the question is asked of the
compressed cache. Where the full cache has nothing right, no setting was asked. Several questions
are asked about one text, each of a cache of its own, so they are not independent of each other.
All settings answer the same questions: where two intervals overlap, the pairs below say more.

Rendered from `pooling.jsonl` by `python -m benchmarks.pooling`."""


def _environments(rows: Iterable[Row]) -> str:
    lines = dict.fromkeys(environment_line([row]) for row in rows if "run" in row)
    return " ".join(f"{line}." for line in lines)


def _overall(answers: list[Answer]) -> str:
    groups = with_signal(answers)
    counted = [answer for answer in answers if answer.group in groups]
    shares = shares_of(counted)
    questions = len({answer.question for answer in counted})
    macro = markdown_table(
        ["setting", *(f"1/{share}" for share in shares)],
        [
            [named(setting), *(mean_of_groups(counted, groups, setting, s) for s in shares)]
            for setting in settings_of(counted)
        ],
    )
    return (
        f"## All groups together\n\n{questions} questions of {len(groups)} groups in which the "
        f"full cache has {LEAST} or more right: {', '.join(groups)}.\n\n{table(counted)}\n\n"
        f"The mean over groups, each counted once, however many questions it has:\n\n{macro}"
    )


def _families(answers: Sequence[Answer]) -> list[str]:
    """A table for every kind of task, in few parts."""
    found: dict[str, list[Answer]] = {}
    for answer in answers:
        found.setdefault(_family(answer.group), []).append(answer)
    return [
        f"## {name}\n\n{len({answer.question for answer in own})} questions. {_MEANT[name]}\n\n"
        f"{table(own)}"
        for name, own in found.items()
    ]


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

_MEANT = {
    "Needles": "Six kinds of needles in an essay, each asked for: numbers of 4, 7 and 12 digits, "
    "four words, uuids, a number and a word.",
    "Questions that did not vote": "Needles again, asked of a cache that was compressed before the "
    "question, or behind another question and its answer.",
    "Lines": "LongEval's lines, with three examples and a begun answer.",
    "Quotations": "Sentences of essays and of Python's manual, begun and to be continued by eight "
    "tokens.",
    "Documents": "SQuAD's questions about six paragraphs of one article, the longest of the "
    "accepted answers.",
    "RULER": "Its tasks at 1,024 tokens, as far as the full cache has something right. Of several "
    "values each counts, from its second token on.",
    "Natural text and code": "The next 32 tokens of essays, Python's manual, and its standard "
    "library.",
}
"""What each kind of task is."""


def _variations(main: Sequence[Answer], more: Sequence[Answer]) -> str:
    """More settings beside some of the others, on the questions that all were asked."""
    both = {answer.question for answer in more} & {answer.question for answer in main}
    beside = [a for a in main if a.setting in _BESIDE and a.question in both]
    own = [*beside, *(answer for answer in more if answer.question in both)]
    return (
        f"## Variations\n\nOther runs, factors and windows, on {_questions(own)} of the questions. "
        '"0+12 then 0.90": the twelve tokens behind a vote are lifted as high as itself, and those '
        f"behind them fade.\n\n{table(own)}"
    )


_BESIDE = (
    (8, "fading 0.935, sinks still"),
    (16, "fading 0.935, sinks still"),
    (16, "0+12, sinks still"),
)


def _pairs(answers: list[Answer]) -> str:
    """The chosen setting against every other one, question by question."""
    shares = shares_of(answers)
    shown = markdown_table(
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
    return (
        f"## Pairs\n\nAnswers that only {named(CHOSEN)} has right, and answers that only the "
        f"other has right, of those that the full cache has right:\n\n{shown}"
    )


def _worse(answers: list[Answer]) -> str:
    """Where the chosen setting is not the best."""
    lines = []
    for group in dict.fromkeys(answer.group for answer in answers):
        for share in shares_of(answers):
            own = [answer for answer in answers if (answer.group, answer.share) == (group, share)]
            lines += worse_in(own, f"{group}, 1/{share}")
    shown = "\n".join(f"- {line}" for line in lines) or "Nowhere."
    return (
        f"## Where {named(CHOSEN)} is not the best\n\nThe best other setting of a group, where "
        "it has more than one right answer more; in groups without answers, a loss lower by more "
        f"than 0.02 nats a token. Of few answers, differences are within chance.\n\n{shown}"
    )


def _without_signal(rows: list[Row]) -> str:
    """What the full cache itself cannot answer."""
    asked: dict[str, list[int]] = {}
    for row in rows:
        asked.setdefault(row["group"], []).extend(row["full"]["right"])
    lines = [
        f"{group} ({sum(rights)} of {len(rights)})"
        for group, rights in asked.items()
        if rights and sum(rights) < LEAST
    ]
    return (
        "## What says nothing here\n\nGroups of which the full cache has fewer than "
        f"{LEAST} answers or parts of answers right: {', '.join(lines) or 'none'}."
    )


def _groups(rows: list[Row], answers: list[Answer]) -> list[str]:
    return ["## Group by group"] + [
        _group(group, [row for row in rows if row["group"] == group], of_group(answers, group))
        for group in dict.fromkeys(row["group"] for row in rows)
    ]


def _group(group: str, rows: list[Row], answers: list[Answer]) -> str:
    parts = [right for row in rows for right in row["full"]["right"]]
    losses = [row["full"]["nll"] for row in rows if row["full"]["nll"] is not None]
    texts = len({row["text"] for row in rows})
    tokens = sorted(row["prompt_tokens"] for row in rows)
    right = f"{sum(parts)} of {len(parts)} answers or parts of answers right, " if parts else ""
    said = (
        f"### {group[0].upper()}{group[1:]}\n\n{len(rows)} questions about {texts} texts, prompts "
        f"of {tokens[0]:,} to {tokens[-1]:,} tokens. The full cache: {right}loss "
        f"{fmean(losses):.2f}."
    )
    return f"{said}\n\n{table(answers)}" if answers else said


def _lost(answers: list[Answer]) -> str:
    """How right answers go with the mass of votes that was not kept."""
    own = [answer for answer in at(answers, CHOSEN) if answer.counted]
    names = ["mean", "highest layer", "highest head"]
    names += [f"{name}, without the first 4" for name in names]
    places = range(len(names))
    shown = markdown_table(
        ["lost mass", *names],
        [
            *(
                [f"{low:.1f} to {high:.1f}", *(right_in(own, n, low, high) for n in places)]
                for low, high in itertools.pairwise(LOST_BINS)
            ),
            ["told apart", *(told_apart(own, place) for place in places)],
        ],
    )
    return (
        "## How much of the votes is lost, and whether the answer is right\n\nThe lost mass is the "
        "part of the window's votes on the prefix, before pooling, that falls on positions which "
        f"are not kept. All answers of {named(CHOSEN)}, at all budgets: the share of right "
        "answers of those that the full cache has right, and how many there are. Mean: over all "
        "layers and KV heads; highest layer: the layer with the highest mean over its heads. "
        '"Told apart" is how often, of a right and a wrong answer, the wrong one has lost more: '
        f"0.5 is chance.\n\n{shown}"
    )


def _first_look(sinks: list[Answer], screened: list[Answer]) -> str:
    """The two tables from which the settings of the others were chosen."""
    return (
        "## The first look: more settings, few texts\n\nThe settings above were chosen from "
        "these, on other texts. Here the first token of an answer counts too, and all questions "
        f"were asked. {_questions(sinks)} questions:\n\n{table(sinks)}\n\nThe poolings without "
        f"still sinks, {_questions(screened)} questions:\n\n{table(screened)}"
    )


def _questions(answers: Iterable[Answer]) -> int:
    return len({answer.question for answer in answers})


_NOT_MEASURED = """\
## What was not measured

- Budgets of a half: hardly anything is lost at a quarter, and time was short.
- Windows of 64 tokens, fading to both sides, and factors beside 0.90 and 0.935 in the large
  tables: the first look did not speak for them.
- LongBench: no installed package carries its rows. HotpotQA's questions: the demo model does not
  answer them from the full cache.
- Prompts over 2,100 tokens, other models, and answers that the model generates by itself: an answer
  that is fed cannot go astray, so these numbers are upper bounds of what `generate` gives."""


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
