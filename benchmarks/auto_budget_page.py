"""The page of the automatic budget, from its rows; see `benchmarks.auto_budget`."""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

from benchmarks.pooling_rows import Count
from benchmarks.records import Row, environment_line, markdown_table
from snapkv import AutoBudget
from snapkv.cache.lost_votes import DOUBTFUL_BELOW, SAFE_BELOW, word_for
from snapkv.policies.auto_budget import UNDILUTED_TOKENS

PEAKS = (0.00075, SAFE_BELOW, 0.002, 0.004, DOUBTFUL_BELOW, 0.016, 0.032)
MASSES = (0.1, 0.15, 0.2, 0.3, 0.4)

_HEAD = """\
# The budget that the votes choose, and how often its words were right

Texts of about 1,040 tokens with questions of nine kinds (needles of digits, words
and uuids, two-part answers, lines, quotations, documents of a rag task), and the loss on prose and
code. The kinds are those of [the study of pooling](pooling.md); the texts differ from those by
which pooling, window and bound were chosen. Every text is read once with the full cache; each
policy compresses a copy of it, and the right answer is fed to the model. Only answers that the full
cache has right count.

- "fading N" is `default_policy(N)`.
- "auto B" is `default_policy(AutoBudget(lost_vote=B))`: every layer keeps all positions with a
  pooled vote of more than B of the window's attention in any head. "By head" puts `AdaKV` around
  it, where each head keeps its own number.
- "mass M" keeps in every layer as much as is needed to lose no more than M of any head's pooled
  votes.
- "paper's N" is `SnapKV(N)`.

Rendered from `auto_budget.jsonl` by `python -m benchmarks.auto_budget`."""


def render(rows: Sequence[Row], held_out: Sequence[Row]) -> str:
    """The page that these rows make, and those of texts that chose nothing."""
    asked = [row for row in rows if row.get("answers")]
    names = list(asked[0]["answers"]) if asked else []
    sections = [
        _HEAD,
        environment_line([row for row in rows if "environment" in row][-1:]) + ".",
        f"{len(asked)} questions.",
        _policies(asked, names),
        _groups(asked, names),
        _words(asked, names),
        _held_out(held_out),
    ]
    return "\n\n".join(sections) + "\n"


def _held_out(rows: Sequence[Row]) -> str:
    """What was right on longer texts of other kinds, and whether the words were."""
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
    kinds = ", ".join(
        f"{sum(row['kind'] == kind for row in known)} of {kind}"
        for kind in dict.fromkeys(row["kind"] for row in known)
    )
    return (
        "## Longer texts of kinds that chose nothing\n\nThe words were chosen by the texts above, "
        "and the default bound so that its answers are called safe. Here are "
        f"{len(known)} other questions that the full cache has right, of "
        f"{sum('text' in row for row in rows)} that were asked as `snapkv ask` does: {kinds} "
        "(`benchmarks/held_out.py`). An answer is right if it has the expected words. Rendered "
        "from `auto_budget_held_out.jsonl`, which `python -m benchmarks.auto_budget_held_out` "
        'writes. "Undiluted 0.0025" keeps the same bound however long the prompt is; "fading 1/4" '
        "keeps that share. A cell has right answers, and the mean share of the tokens that was "
        f"kept.\n\n{table}\n\n{_held_out_words(known, names)}\n\n"
        f"{environment_line([row for row in rows if 'environment' in row][-1:])}."
    )


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


def _policies(rows: Sequence[Row], names: Sequence[str]) -> str:
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
    return f"## Prompts of about {tokens:,} tokens\n\n{markdown_table(head, lines)}"


def _groups(rows: Sequence[Row], names: Sequence[str]) -> str:
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
    text = "Right answers, and in brackets the mean number of tokens kept."
    return f"## By kind of question\n\n{text}\n\n{markdown_table(['kind', *shown], lines)}"


_SHOWN = ("fading 96", "fading 192", "fading 256", "auto 0.0025", "auto 0.0025, by head")


def _words(rows: Sequence[Row], names: Sequence[str]) -> str:
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
    return (
        "## Lost votes, and whether the answer was right\n\n"
        "`cache.report()` has two numbers. `lost_vote_peak` is the highest vote of a dropped "
        "position after fading, as a share of the window's attention, averaged over heads and "
        "layers. `lost_votes` is the sum of all dropped votes, the mass. The word depends on the "
        f"first: safe below {SAFE_BELOW:g}, doubtful below {DOUBTFUL_BELOW:g}; of a prompt longer "
        f"than {UNDILUTED_TOKENS:,} tokens it is taken as many times higher as that is longer, "
        "since the same vote is a smaller share of more positions.\n\n"
        f"{by_word}\n\nBy the peak:\n\n{peaks}\n\nBy the mass, which says less about a pooling "
        f"that keeps strong votes without what follows them:\n\n{masses}"
    )


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
