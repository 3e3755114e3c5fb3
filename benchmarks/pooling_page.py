"""The page and the figure of the study of pooling, made of nothing but its rows."""

import itertools
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from benchmarks.pooling_rows import (
    COLUMNS,
    Answer,
    Setting,
    answers_of,
    count,
    loss_above_full,
    paired,
)
from benchmarks.records import Row, environment_line, markdown_table
from snapkv.lab.drawing import STYLE
from snapkv.lab.report.figures import line_style

BASE: Setting = (32, "centred 7")
"""The paper's."""

LEAST = 5
"""Right answers of the full cache below which a group says nothing of right answers."""

LOST_BINS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)


def render(rows: list[Row]) -> str:
    """The page that these rows make."""
    main = [row for row in rows if row.get("part") == "main"]
    screened = [row for row in rows if row.get("part") == "screening"]
    answers = list(answers_of(main))
    parts = [
        _HEAD,
        _environments(rows),
        _overall(answers),
        "![Right answers and loss against the budget](pooling.svg)",
        _pairs(answers),
        _worse(answers),
        *_groups(main),
        _lost(answers),
        _screening(list(answers_of(screened))),
        _NOT_MEASURED,
    ]
    return "\n\n".join(parts) + "\n"


_HEAD = """\
# Which pooling, which window: the study behind the default

A prompt is read once with the full cache. Each setting then keeps what its policy keeps of that
reading, and the right answer is fed to the model token by token. A budget is a part of the prompt,
in tokens per KV head and layer, the window included. "Centred 7" is the paper's pooling, max over
seven neighbours; "0+12" lifts a voted position and the twelve behind it; "fading 0.90" lifts all
that stands behind a vote, by that factor less for every token; "back 0.5" also what stands before
it, by another factor.

Cells of right answers say how many are right **of those that the full cache has right**, with
Wilson's interval at 95 percent in brackets, and behind it the negative log-likelihood of the answer
per token after its first, in nats, above that of the full cache, the mean over all questions. An
answer is right if every token of it is the most likely one. Several questions are asked about one
text, each of a cache of its own, so they are not independent of each other: where intervals of two
settings overlap, the table of pairs says more, since all settings answer the same questions.

Rendered from `pooling.jsonl` by `python -m benchmarks.pooling`."""


def _environments(rows: Iterable[Row]) -> str:
    lines = dict.fromkeys(environment_line([row]) for row in rows if "run" in row)
    return " ".join(f"{line}." for line in lines)


def _settings(answers: Iterable[Answer]) -> list[Setting]:
    return list(dict.fromkeys(answer.setting for answer in answers))


def _shares(answers: Iterable[Answer]) -> list[int]:
    return sorted({answer.share for answer in answers}, reverse=True)


def _named(setting: Setting) -> str:
    return f"window {setting[0]}, {setting[1]}"


def _at(answers: Iterable[Answer], setting: Setting, share: int | None = None) -> list[Answer]:
    return [
        answer for answer in answers if answer.setting == setting and share in (None, answer.share)
    ]


def _cell(answers: Sequence[Answer]) -> str:
    if not answers:
        return "no room"
    counted, loss = count(answers), loss_above_full(answers)
    right = f"{counted}" if counted.of else ""
    return ", ".join(filter(None, [right, "" if loss is None else f"{loss:+.2f}"]))


def _table(answers: Sequence[Answer]) -> str:
    shares = _shares(answers)
    return markdown_table(
        ["setting", *(f"1/{share}" for share in shares)],
        [
            [_named(setting), *(_cell(_at(answers, setting, share)) for share in shares)]
            for setting in _settings(answers)
        ],
    )


def _with_signal(answers: Sequence[Answer]) -> list[str]:
    """Groups of which the full cache has enough right."""
    groups = dict.fromkeys(answer.group for answer in answers)
    return [
        group
        for group in groups
        if max(
            (
                count(_at(_of(answers, group), setting, share)).of
                for setting, share in _cells(answers)
            ),
            default=0,
        )
        >= LEAST
    ]


def _cells(answers: Sequence[Answer]) -> list[tuple[Setting, int]]:
    return [(setting, share) for setting in _settings(answers) for share in _shares(answers)]


def _of(answers: Iterable[Answer], group: str) -> list[Answer]:
    return [answer for answer in answers if answer.group == group]


def _overall(answers: list[Answer]) -> str:
    groups = _with_signal(answers)
    counted = [answer for answer in answers if answer.group in groups]
    shares = _shares(counted)
    questions = len({answer.question for answer in counted})
    macro = markdown_table(
        ["setting", *(f"1/{share}" for share in shares)],
        [
            [_named(setting), *(_mean_of_groups(counted, groups, setting, s) for s in shares)]
            for setting in _settings(counted)
        ],
    )
    return (
        f"## All groups together\n\n{questions} questions of {len(groups)} groups in which the "
        f"full cache has {LEAST} or more right: {', '.join(groups)}.\n\n{_table(counted)}\n\n"
        f"The mean over groups, each counted once, however many questions it has:\n\n{macro}"
    )


def _mean_of_groups(
    answers: Sequence[Answer], groups: Sequence[str], setting: Setting, share: int
) -> str:
    own = _at(answers, setting, share)
    counts = [counted for group in groups if (counted := count(_of(own, group))).of]
    return f"{fmean(counted.share for counted in counts):.2f}" if counts else "no room"


def best(answers: Sequence[Answer]) -> Setting:
    """The setting with the largest share of right answers over all budgets that all have."""
    settings = _settings(answers)
    shares = [s for s in _shares(answers) if all(_at(answers, one, s) for one in settings)]
    return max(
        settings,
        key=lambda setting: count(a for a in _at(answers, setting) if a.share in shares).share,
    )


def _pairs(answers: list[Answer]) -> str:
    """The best setting against every other one, question by question."""
    winner, shares = best(answers), _shares(answers)
    table = markdown_table(
        ["against", *(f"1/{share}" for share in shares)],
        [
            [
                _named(other),
                *(
                    "{} : {}".format(*paired([a for a in answers if a.share == s], winner, other))
                    for s in shares
                ),
            ]
            for other in _settings(answers)
            if other != winner
        ],
    )
    return (
        f"## Pairs\n\nThe setting with most right answers over the budgets that all have room for "
        f"is {_named(winner)}. Answers that only it has right, and answers that only the other "
        f"has right, of those that the full cache has right:\n\n{table}"
    )


def _worse(answers: list[Answer]) -> str:
    """Where the best setting is not the best."""
    winner = best(answers)
    lines = []
    for group in dict.fromkeys(answer.group for answer in answers):
        for share in _shares(answers):
            own = [answer for answer in answers if (answer.group, answer.share) == (group, share)]
            lines += _worse_in(own, winner, f"{group}, 1/{share}")
    shown = "\n".join(f"- {line}" for line in lines) or "Nowhere."
    return (
        f"## Where {_named(winner)} is not the best\n\nMore right answers of another setting by "
        "more than one answer; in groups without right answers, a loss lower by more than 0.02 "
        f"nats a token. Small differences are within chance.\n\n{shown}"
    )


def _worse_in(answers: list[Answer], winner: Setting, name: str) -> list[str]:
    ours = _at(answers, winner)
    lines = []
    for other in _settings(answers):
        theirs = _at(answers, other)
        if not ours or not theirs or other == winner:
            continue
        mine, other_count = count(ours), count(theirs)
        loss, other_loss = loss_above_full(ours), loss_above_full(theirs)
        if mine.of >= LEAST:
            if other_count.right > mine.right + 1:
                lines.append(
                    f"{name}: {_named(other)} has {other_count.right} of {other_count.of}, "
                    f"it {mine.right}"
                )
        elif loss is not None and other_loss is not None and other_loss < loss - 0.02:
            lines.append(f"{name}: {_named(other)} loses {other_loss:+.2f}, it {loss:+.2f}")
    return lines


def _groups(rows: list[Row]) -> list[str]:
    return ["## Group by group"] + [
        _group(group, [row for row in rows if row["group"] == group])
        for group in dict.fromkeys(row["group"] for row in rows)
    ]


def _group(group: str, rows: list[Row]) -> str:
    answers = list(answers_of(rows))
    parts = [right for row in rows for right in row["full"]["right"]]
    losses = [row["full"]["nll"] for row in rows if row["full"]["nll"] is not None]
    texts = len({row["text"] for row in rows})
    tokens = sorted(row["prompt_tokens"] for row in rows)
    right = f"{sum(parts)} of {len(parts)} answers or parts of answers right, " if parts else ""
    loss = f"loss {fmean(losses):.2f}" if losses else "answers of one token"
    return (
        f"### {group[0].upper()}{group[1:]}\n\n{len(rows)} questions about {texts} texts, prompts "
        f"of {tokens[0]:,} to {tokens[-1]:,} tokens. The full cache: {right}{loss}.\n\n"
        f"{_table(answers)}"
    )


def _lost(answers: list[Answer]) -> str:
    """How right answers go with the mass of votes that was not kept."""
    winner = best(answers)
    own = [answer for answer in _at(answers, winner) if answer.counted]
    names = ["mean", "highest layer", "highest head"]
    names += [f"{name}, without the first 4" for name in names]
    table = markdown_table(
        ["lost mass", *names],
        [
            [
                f"{low:.1f} to {high:.1f}",
                *(_right_in(own, place, low, high) for place in range(len(COLUMNS) - 6)),
            ]
            for low, high in itertools.pairwise(LOST_BINS)
        ],
    )
    return (
        "## How much of the votes is lost, and whether the answer is right\n\nThe lost mass is the "
        "part of the window's votes on the prefix, before pooling, that falls on positions which "
        f"are not kept. All answers of {_named(winner)}, at all budgets: the share of right "
        "answers of those that the full cache has right, and how many there are. Mean: over all "
        "layers and KV heads; highest layer: the layer with the highest mean over its heads.\n\n"
        f"{table}"
    )


def _right_in(answers: Iterable[Answer], place: int, low: float, high: float) -> str:
    inside = [a for a in answers if low <= a.lost[place] < high or a.lost[place] == high == 1]
    counted = count(inside)
    return f"{counted.share:.2f} of {counted.of}" if counted.of else ""


def _screening(answers: list[Answer]) -> str:
    questions = len({answer.question for answer in answers})
    return (
        f"## The first look: more settings, fewer texts\n\n{questions} questions, all groups "
        "together. What went on to the tables above was chosen from these.\n\n"
        f"{_table(answers)}"
    )


_NOT_MEASURED = ""


def figure(rows: list[Row]) -> Any:
    """Right answers on the left and the loss above the full cache on the right, by budget."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    answers = list(answers_of(row for row in rows if row.get("part") == "main"))
    with rc_context(STYLE):
        made = Figure(figsize=(9.0, 4.4), layout="constrained")
        left, right = made.subplots(1, 2)
        for index, setting in enumerate(_settings(answers)):
            shares = [share for share in _shares(answers) if _at(answers, setting, share)]
            cells = [_at(answers, setting, share) for share in shares]
            style = line_style(index)
            left.plot(shares, [100 * count(cell).share for cell in cells], **style)
            losses = [loss_above_full(cell) for cell in cells]
            right.plot(shares, losses, label=_named(setting), **style)
        _label(left, _shares(answers), "right where the full cache is right (percent)")
        _label(right, _shares(answers), "loss per token above the full cache (nats)")
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
