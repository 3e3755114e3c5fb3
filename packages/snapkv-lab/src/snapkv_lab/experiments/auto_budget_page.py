"""The page of the automatic budget, from its rows; see `snapkv_lab.experiments.auto_budget`."""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

from snapkv import AutoBudget
from snapkv.cli.lost_votes import DOUBTFUL_BELOW, SAFE_BELOW, word_for
from snapkv_lab.experiments.pooling_rows import Count
from snapkv_lab.experiments.records import (
    Row,
    environment_line,
    markdown_table,
    tables_page,
)

PEAKS = (0.00075, SAFE_BELOW, 0.002, 0.004, DOUBTFUL_BELOW, 0.016, 0.032)
MASSES = (0.1, 0.15, 0.2, 0.3, 0.4)

LAYERS = range(14, 25)
SHARES = (0.075, 0.15, 0.3)


def render(rows: Sequence[Row]) -> str:
    """The tables of these rows."""
    asked = [row for row in rows if row.get("answers")]
    names = list(asked[0]["answers"]) if asked else []
    return tables_page(
        "auto_budget",
        "The budget that the votes choose, and how often its words were right",
        environment_line([row for row in rows if "environment" in row][-1:]),
        *_policies(asked, names),
        *_groups(asked, names),
        *_words(asked, names),
    )


def render_held_out(rows: Sequence[Row]) -> str:
    """The tables of longer texts of kinds that chose nothing: right answers, and the words."""
    known = [row for row in rows if row.get("answers")]
    names = list(known[0]["answers"])
    lengths = sorted({_length(row) for row in known})
    table = markdown_table(
        ["policy", *(f"{length:,} tokens" for length in lengths), "all"],
        [
            [
                f"{name} (default)" if name == DEFAULT else name,
                *(
                    _kept([row for row in known if _length(row) == length], name)
                    for length in lengths
                ),
                _kept(known, name),
            ]
            for name in names
        ],
    )
    asked = sum("text" in row for row in rows)
    return tables_page(
        "auto_budget_held_out",
        "The automatic budget and its words, on texts that chose neither",
        environment_line([row for row in rows if "environment" in row][-1:]),
        f"## Right answers (share of the tokens kept), {len(known)} of {asked} questions",
        table,
        "## The word for the lost votes, and whether the answer was right",
        _held_out_words(known, names),
        "## Answers whose tokens the votes of a layer let go on",
        _going_on_by_layer([row for row in rows if row.get("needed")]),
    )


def _going_on_by_layer(known: Sequence[Row]) -> str:
    """Behind which layer the answers of longer texts go on in selective reading."""
    lengths = sorted({_length(row) for row in known})
    of_length = {n: [row for row in known if _length(row) == n] for n in lengths}
    header = [
        "layers that read all",
        *(f"{share:.1%} go on" for share in SHARES),
        *(f"15.0%, {n:,} tokens" for n in lengths),
    ]
    lines = [
        [
            str(layer),
            *(_going_on(known, layer, share) for share in SHARES),
            *(_going_on(own, layer, 0.15) for own in of_length.values()),
        ]
        for layer in LAYERS
    ]
    return markdown_table(header, lines)


def _going_on(rows: Sequence[Row], layer: int, share: float) -> str:
    needed = [row["needed"][layer - 1] for row in rows]
    found = sum(least is not None and least <= share for least in needed)
    return f"{found}/{len(needed)}"


DEFAULT = f"auto {AutoBudget.lost_vote}"


def _length(row: Row) -> int:
    return int(row["text"].split("/")[1])


def _kept(rows: Sequence[Row], name: str) -> str:
    own = [(row["answers"][name], row["tokens"]) for row in rows]
    if not own:
        return "-"
    share = fmean(found["kept"] / tokens for found, tokens in own)
    return f"{sum(found['right'] for found, _ in own)}/{len(own)} ({share:.0%})"


def _held_out_words(rows: Sequence[Row], names: Sequence[str]) -> str:
    families = {
        "all": lambda name: True,
        DEFAULT: lambda name: name == DEFAULT,
        "fading 1/4": lambda name: name == "fading 1/4",
    }
    lines = []
    for word in ("safe", "doubtful", "lost"):
        cells = []
        for belongs in families.values():
            own = [
                row["answers"][name]["right"]
                for row in rows
                for name in filter(belongs, names)
                if word_for(row["answers"][name]["peak"], row["tokens"]) == word
            ]
            cells.append(str(Count(right=sum(own), of=len(own))))
        lines.append([word, *cells])
    return markdown_table(["word", *families], lines)


def _policies(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """What every policy kept, and had right."""
    tokens = round(fmean(row["prompt_tokens"] for row in rows))
    lines = [
        [
            name,
            f"{mean(rows, name, 'kept'):.0f}",
            f"{100 * mean(rows, name, 'bytes'):.0f} %",
            str(right(rows, name)),
            f"{_loss(rows, name):+.3f}",
        ]
        for name in names
    ]
    head = ["policy", "tokens kept", "bytes", "right", "loss per token above the full cache's"]
    return [f"## Prompts of about {tokens:,} tokens", markdown_table(head, lines)]


def _groups(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Right answers by kind of question, of the policies that a reader would choose among."""
    shown = [name for name in names if name in _SHOWN]
    groups = [
        group
        for group in dict.fromkeys(row["group"] for row in rows)
        if right(_of(rows, group), shown[0]).of
    ]
    lines = [
        [
            group,
            *(
                f"{found.right}/{found.of} ({mean(own, name, 'kept'):.0f})"
                for name in shown
                if (found := right(own, name))
            ),
        ]
        for group in groups
        for own in [_of(rows, group)]
    ]
    title = "## Right answers by kind of question (mean number of tokens kept)"
    return [title, markdown_table(["kind", *shown], lines)]


_SHOWN = ("fading 96", "fading 192", "fading 256", "auto 0.0025", "auto 0.0025, by head")


def _words(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """How often answers were right, by the word and by the numbers it could go by."""
    families = {
        "all": lambda name: True,
        "fading, fixed": lambda name: name.startswith("fading"),
        "auto": lambda name: name.startswith("auto"),
        "the paper's": lambda name: name.startswith("paper"),
    }
    answers = [(name, row, row["answers"][name]) for row in rows for name in names]

    def table(what: str, label: Callable[[dict[str, Any]], str], order: Sequence[str]) -> str:
        lines = []
        for value in order:
            own = [answer for answer in answers if label(answer[2]) == value]
            cells = [
                str(_counted((row, found) for name, row, found in own if belongs(name)))
                for belongs in families.values()
            ]
            lines.append([value, *cells])
        return markdown_table([what, *families], lines)

    by_word = table("word", lambda found: word_for(found["peak"], 0), ("safe", "doubtful", "lost"))
    peaks = table("peak", lambda found: _bin(found["peak"], PEAKS), _bins(PEAKS))
    masses = table("mass", lambda found: _bin(found["lost"], MASSES), _bins(MASSES))
    return [
        "## The word for the lost votes, and whether the answer was right",
        by_word,
        "## The highest lost vote, and whether the answer was right",
        peaks,
        "## The sum of the lost votes, and whether the answer was right",
        masses,
    ]


def _bin(value: float, borders: Sequence[float]) -> str:
    below = next((border for border in borders if value < border), None)
    return f"{borders[-1]:g} and more" if below is None else f"below {below:g}"


def _bins(borders: Sequence[float]) -> list[str]:
    return [*(f"below {border:g}" for border in borders), f"{borders[-1]:g} and more"]


def _of(rows: Sequence[Row], group: str) -> list[Row]:
    return [row for row in rows if row["group"] == group]


def right(rows: Sequence[Row], name: str) -> Count:
    """What a policy has right, of what the full cache has right."""
    return _counted((row, row["answers"][name]) for row in rows)


def _counted(answers: Iterable[tuple[Row, dict[str, Any]]]) -> Count:
    """Parts of answers that are right, of those that the full cache has right."""
    counted = [
        own
        for row, found in answers
        for own, full in zip(found["right"], row["full"]["right"], strict=True)
        if full
    ]
    return Count(right=sum(counted), of=len(counted))


def mean(rows: Sequence[Row], name: str, number: str) -> float:
    """The mean of a number of a policy's rows."""
    return fmean(row["answers"][name][number] for row in rows)


def _loss(rows: Sequence[Row], name: str) -> float:
    above = [
        row["answers"][name]["nll"] - row["full"]["nll"]
        for row in rows
        if row["full"]["nll"] is not None
    ]
    return fmean(above)
