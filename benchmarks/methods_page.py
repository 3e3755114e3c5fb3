"""The page of the comparison, made of nothing but its rows."""

from statistics import fmean

from benchmarks import first_tokens
from benchmarks.contenders import FULL
from benchmarks.records import Row, environment_line, markdown_table
from benchmarks.retrieval import Question
from snapkv.validation import format_bytes

MEASURED_LATER = {
    "second reading": "The methods that read twice",
    "r-kv": "R-KV",
    "no question": "LagKV and Compactor",
}
"""Parts whose rows stand in the tables of "quality", and whose they are."""


def render(rows: list[Row]) -> str:
    """The page that these rows make."""
    quality = [row for row in rows if row["part"] == "quality"]
    timing = [row for row in rows if row["part"] == "timing"]
    lengths = sorted({row["prompt_tokens"] for row in quality})
    sections = [_HEAD, environment_line(quality) + "."]
    answered = quality
    for part, who in MEASURED_LATER.items():
        later = [row for row in rows if row["part"] == part]
        answered = answered + later
        if later:
            sections.append(f"{who}: {environment_line(later)}.")
    sections += [_length([row for row in answered if row["prompt_tokens"] == n]) for n in lengths]
    sections += [_order(answered), _EXPLAINED]
    pooling = [row for row in rows if row["part"] == "pooling"]
    if pooling:
        sections.append(_pooling(pooling))
    first = [row for row in rows if row["part"] == "first tokens"]
    if first:
        sections.append(first_tokens.section(first))
    if timing:
        sections.append(_timing(timing))
    return "\n\n".join(sections) + "\n"


def mean_nll(rows: list[Row], question: Question) -> dict[str, float]:
    """Each method's NLL, the mean over prompt lengths and budgets, best first."""
    parts = ("quality", *MEASURED_LATER)
    asked = [row for row in rows if row["part"] in parts and row["question"] == question]
    of_method: dict[str, list[float]] = {}
    for row in asked:
        if row["method"] != FULL:
            of_method.setdefault(row["method"], []).append(row["nll"])
    means = {method: fmean(values) for method, values in of_method.items()}
    return dict(sorted(means.items(), key=lambda item: item[1]))


def held_tokens(row: Row) -> float:
    """Tokens per layer and KV head that the bytes held have room for, on average."""
    return float(row["held_bytes"] / row["full_bytes"] * row["read_tokens"])


def _length(rows: list[Row]) -> str:
    """One prompt length: methods by question and budget."""
    first = rows[0]
    budgets = sorted({row["budget"] for row in rows if row["budget"]})
    columns = [(question, budget) for question in ("visible", "hidden") for budget in budgets]
    cells: dict[str, dict[tuple[str, int | None], Row]] = {}
    for row in rows:
        cells.setdefault(row["method"], {})[row["question"], row["budget"]] = row
    full = cells.pop(FULL)
    snapkv = next(iter(cells.values()))
    table = markdown_table(
        ["method", *(f"{question}, {budget}" for question, budget in columns)],
        [
            *(
                [name, *(_cell(of[key]) if key in of else "" for key in columns)]
                for name, of in cells.items()
            ),
            ["keys and values held", *(format_bytes(snapkv[key]["held_bytes"]) for key in columns)],
        ],
    )
    return (
        f"## {first['prompt_tokens']:,} tokens\n\n"
        f"{first['haystack']}, {first['documents']} documents, seed {first['seed']}. The full "
        f"cache: {_cell(full['visible', None])} with the question visible, "
        f"{_cell(full['hidden', None])} with it hidden, "
        f"{format_bytes(full['visible', None]['full_bytes'])}.\n\n{table}"
        f"\n\n{_without_budget(rows)}"
    )


def _without_budget(rows: list[Row]) -> str:
    """What a method without a budget held."""
    parts = [
        f"{held_tokens(row):.0f} with {row['policy']['recovery']} in the place of {row['budget']}"
        for row in rows
        if row["method"] == "FastGen" and row["question"] == "visible"
    ]
    return f"FastGen has no budget; it held {', '.join(parts)} tokens (question visible)."


def _cell(row: Row) -> str:
    return f"{row['accuracy']:.2f} ({row['nll']:.2f})"


def _order(rows: list[Row]) -> str:
    """The methods from best to worst in both settings."""
    lines = [
        f"Question {question}: "
        + ", ".join(f"{method} {nll:.2f}" for method, nll in mean_nll(rows, question).items())
        + "."
        for question in ("visible", "hidden")
    ]
    return "\n\n".join(
        [
            "## The order of the methods",
            "NLL, the mean over lengths and budgets, best first.",
            *lines,
        ]
    )


def _pooling(rows: list[Row]) -> str:
    """What is built on SnapKV, around the wide kernel."""
    budgets = sorted({row["budget"] for row in rows})
    cells: dict[str, list[str]] = {}
    for row in rows:
        cells.setdefault(row["method"], []).append(_cell(row))
    table = markdown_table(
        ["method, kernel 13", *(f"visible, {budget}" for budget in budgets)],
        [[method, *texts] for method, texts in cells.items()],
    )
    return (
        f"## Around wide pooling\n\n{rows[0]['prompt_tokens']:,} tokens, the same documents. "
        f"{environment_line(rows)}.\n\n{table}"
    )


def _timing(rows: list[Row]) -> str:
    first = rows[0]
    table = markdown_table(
        ["cache", "keys and values", "held beside them", "ms per token", "against the full cache"],
        [
            [
                row["method"],
                format_bytes(row["held_bytes"]),
                format_bytes(row["index_bytes"]),
                f"{row['ms_per_token']['p50']:.1f}",
                f"{row['against_full']['p50']:.2f} "
                f"({row['against_full']['p20']:.2f} to {row['against_full']['p80']:.2f})",
            ]
            for row in rows
        ],
    )
    budget = next(row["budget"] for row in rows if row["budget"])
    return (
        f"## Bytes and time per token\n\n"
        f"After a prompt of {first['prompt_tokens']:,} tokens, budget {budget}. All caches decode "
        f"in turn, one token each, {first['tokens']} rounds in one process. Times are medians; the "
        "last column is the median over rounds of the ratio to the full cache, with the 20th and "
        "80th percentile. Beside keys and values, a cache holds the kept positions and the notes "
        "of a method that evicts while generating.\n\n"
        f"{environment_line(rows)}.\n\n{table}\n\n{_SLOW_STEPS}"
    )


_HEAD = """\
# Methods side by side, at equal budgets

The task is that of [quality.md](quality.md): one magic number in a long text. "Visible": the prompt
ends in the question and the start of the answer, and is compressed as a whole. "Hidden": the text
is compressed before the question is asked; the question is then read from the compressed cache in
one pass, as `generate` does in a conversation. The right answer is fed token by token. Methods that
evict while generating evict after each of these passes; the others store question and answer in
addition to their budget.

A budget counts tokens per layer and KV head, on average over both, window included. So all methods
of a column hold the same bytes after compression; a run stops if one does not. The one exception is
StreamingLLM, which holds the keys of its 4 sinks twice, original and moved, the bytes of 2 tokens
more; with original positions it does not. Windows have 16 tokens. Methods around SnapKV use kernel
7. Scissorhands and R-KV drop one token at a time. KVzip reads the text twice before the question,
so it has only hidden columns.

A cell is the fraction of documents whose answer was right in every token, and in brackets the mean
over documents of the negative log-likelihood of the answer after its first token, in nats. With n
documents one document is 1/n: small differences between cells mean nothing.

Rendered from `methods.jsonl` by `python -m benchmarks.methods`; each row has all settings."""

_EXPLAINED = """\
With the question visible, the top of the order agrees with the literature: the methods in which the
last queries vote lead, TOVA, which uses only the very last one, follows, and H2O and StreamingLLM
lose the number. It differs, or seems to, in these places:

- PyramidKV, AdaKV and CriticalKV are not ahead of SnapKV, as they are in their papers. A number is
  five tokens of one digit, and with kernel 7 its last digits are lost first. A method that gives
  some heads or layers less than the budget loses them earlier. With kernel 13 all are right, and at
  128 tokens the three are slightly ahead in NLL: see the table below.
- H2O and Scissorhands are behind Random. They give all queries of the prompt, or hundreds of them,
  the same weight, and the few that ask for the number count for little; so every head drops it.
  Random keeps it in some heads at half the tokens, which is enough for some answers.
- ExpectedAttention does well with larger models in the comparisons of kvpress, but does not find
  the number in either setting. It averages over what queries look for, and here one question asks
  for one sentence.
- FastGen is last. Its paper uses a recovery of 0.91 to 0.98 of the attention. To hold a sixteenth
  to a half of the tokens it must be set to 0.001 to 0.82, and most heads then keep little but
  special tokens.

With the question hidden every method that votes loses: the end of an essay does not ask for the
number. The comparisons of kvpress, which hide the question, find the same for SnapKV. Of the
methods that read the text once, Compactor, LagKV with a lag of 32 and KeyDiff are well ahead of
Random. They need no question, and the keys of a number stand out among those of essays. R-KV, whose
redundancy score needs no question either, is the only method that votes ahead of Random, and not by
much. There are two remedies. Let the question vote; or read the text twice, since what the model
needs to repeat the text includes the number. KVzip whose heads share a layer's budget answers every
document from a quarter of the tokens, and with half of them is as sure as the full cache. From a
sixteenth it answers none."""

_SLOW_STEPS = """\
Two methods are much slower than a static cache of the same size:

- Scissorhands rebuilds its counts whenever it drops something, and here it drops with every token.
  The scores of the last 400 queries with the 513 tokens held, in the demo model's 30 layers of 9
  heads of 64 numbers, take 400 * 513 * 64 * 9 * 30 = 3.5 billion multiplications; the model's own
  weights take 135 million for a token. The counts cannot be carried over: every dropped token
  raises the attention to the others, so each weight has to be compared again. Holding the scores
  instead would take 222 MB beside 24 MB of keys and values. `drop=n` rebuilds them only with every
  n-th token; by default, as in the paper, n is half of the budget.
- FastGen ranks all tokens of a head again with every token, and its heads differ in length. So a
  step attends a second time, in a padded copy of the keys, to know what every token received, and
  stores each layer again without gaps. No single part is expensive; it is many small operations in
  every layer, where a static cache has none."""
