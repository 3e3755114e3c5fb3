"""The cells, tables and lists of the page of the study of pooling."""

from collections.abc import Iterable, Sequence
from statistics import fmean

from snapkv_lab.experiments.pooling_rows import Answer, Setting, count, loss_above_full
from snapkv_lab.experiments.records import markdown_table

CHOSEN: Setting = (16, "fading 0.935, 4 sinks")
"""The default of `snapkv.policies.default`, with which the others are compared."""

LEAST = 5
"""Right answers of the full cache below which a group says nothing of right answers."""


def settings_of(answers: Iterable[Answer]) -> list[Setting]:
    """Every setting once, in the order of the rows."""
    return list(dict.fromkeys(answer.setting for answer in answers))


def shares_of(answers: Iterable[Answer]) -> list[int]:
    """Every budget once, the smallest first."""
    return sorted({answer.share for answer in answers}, reverse=True)


def named(setting: Setting) -> str:
    """What a table calls a setting."""
    return f"window {setting[0]}, {setting[1]}"


def at(answers: Iterable[Answer], setting: Setting, share: int | None = None) -> list[Answer]:
    """The answers of one setting, at one budget or at all."""
    return [
        answer for answer in answers if answer.setting == setting and share in (None, answer.share)
    ]


def of_group(answers: Iterable[Answer], group: str) -> list[Answer]:
    """The answers to questions of one group."""
    return [answer for answer in answers if answer.group == group]


def with_signal(answers: Sequence[Answer]) -> list[str]:
    """Groups of which the full cache has enough right."""
    groups = dict.fromkeys(answer.group for answer in answers)
    return [
        group
        for group in groups
        if max(
            (
                count(at(of_group(answers, group), setting, share)).of
                for setting, share in _cells(answers)
            ),
            default=0,
        )
        >= LEAST
    ]


def _cells(answers: Sequence[Answer]) -> list[tuple[Setting, int]]:
    return [(setting, share) for setting in settings_of(answers) for share in shares_of(answers)]


def table(answers: Sequence[Answer]) -> str:
    """Settings by budgets."""
    shares = shares_of(answers)
    return markdown_table(
        ["setting", *(f"1/{share}" for share in shares)],
        [
            [named(setting), *(_cell(with_room(answers, setting, share)) for share in shares)]
            for setting in settings_of(answers)
        ],
    )


def with_room(answers: Sequence[Answer], setting: Setting, share: int) -> list[Answer]:
    """The answers of one setting at one budget; none if other settings have room for more."""
    own = at(answers, setting, share)
    most = max(len(at(answers, other, share)) for other in settings_of(answers))
    return own if len(own) == most else []


def _cell(answers: Sequence[Answer]) -> str:
    if not answers:
        return "no room"
    counted, loss = count(answers), loss_above_full(answers)
    right = f"{counted}" if counted.of else ""
    return ", ".join(filter(None, [right, "" if loss is None else f"{loss:+.2f}"]))


def mean_of_groups(
    answers: Sequence[Answer], groups: Sequence[str], setting: Setting, share: int
) -> str:
    """The mean over groups of their share of right answers."""
    own = with_room(answers, setting, share)
    counts = [counted for group in groups if (counted := count(of_group(own, group))).of]
    return f"{fmean(counted.share for counted in counts):.2f}" if counts else "no room"


def worse_in(answers: list[Answer]) -> list[list[str]]:
    """The best setting, what it has and what the chosen one has, where that is not the best.

    By more than one answer; in groups without answers, by more than 0.02 nats a token.
    """
    ours = at(answers, CHOSEN)
    others = {other: at(answers, other) for other in settings_of(answers) if other != CHOSEN}
    if not ours or not others:
        return []
    mine, loss = count(ours), loss_above_full(ours)
    if mine.of:
        best = max(others, key=lambda other: count(others[other]).right)
        theirs = count(others[best])
        if theirs.right > mine.right + 1:
            return [[named(best), f"{theirs.right} of {theirs.of}", str(mine.right)]]
    elif loss is not None:
        losses = {other: loss_above_full(own) for other, own in others.items()}
        lowest, best = min((value, other) for other, value in losses.items() if value is not None)
        if lowest < loss - 0.02:
            return [[named(best), f"{lowest:+.2f}", f"{loss:+.2f}"]]
    return []


def right_in(answers: Iterable[Answer], place: int, low: float, high: float) -> str:
    """How many are right of the answers whose lost mass lies between two numbers."""
    inside = [a for a in answers if low <= a.lost[place] < high or a.lost[place] == high == 1]
    counted = count(inside)
    return f"{counted.share:.2f} of {counted.of}" if counted.of else ""


def told_apart(answers: Iterable[Answer], place: int) -> str:
    """How often, of a right and a wrong answer, the wrong one has lost more mass."""
    lost: tuple[list[float], list[float]] = [], []
    for answer in answers:
        lost[all(answer.counted)].append(answer.lost[place])
    pairs = [(wrong > right) + (wrong == right) / 2 for wrong in lost[0] for right in lost[1]]
    return f"{fmean(pairs):.2f}" if pairs else ""
