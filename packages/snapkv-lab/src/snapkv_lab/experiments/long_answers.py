"""Whether a long answer gets worse towards its end, with and without eviction while generating.

The right answer is fed to the model. In passages the question quotes the beginning of a sentence,
and the answer is what the text says next, so everything that it needs is in the text. In prose and
code the answer is the continuation of the text, and only its loss says something.
"""

from collections.abc import Callable, Iterator
from statistics import fmean

from torch import Tensor

from snapkv import FullCache, default_policy
from snapkv.policies import TOVA, Policy, PromptThenDecode
from snapkv.policies.default import by_layer
from snapkv_lab.experiments.experiment import Experiment, RunContext, Size
from snapkv_lab.experiments.pages import Listing
from snapkv_lab.experiments.texts import (
    QuestionedText,
    ReadText,
    TextMaker,
    make_prompts,
    score_tokens,
)
from snapkv_lab.report.tables import Pivot
from snapkv_lab.rows import Row, group_rows

FIRST = 900
QUARTERS = ("first quarter", "second quarter", "third quarter", "last quarter")
"""The parts of equal length that an answer is divided into."""

SHARES = {"1/8": 8, "1/4": 4}


def _same_for_layers(budget: int) -> Policy:
    return by_layer(default_policy(budget))


def _then_tova(budget: int) -> Policy:
    """Return a method that selects like `_same_for_layers`, and then evicts a token for each new
    one, so that the cache does not grow.
    """
    return PromptThenDecode(prompt=_same_for_layers(budget), decode=TOVA(budget))


WAYS: dict[str, Callable[[int], Policy]] = {
    "default": default_policy,
    "default, same for layers": _same_for_layers,
    "default, same for layers, then TOVA": _then_tova,
}


def _texts(context: RunContext, part: str) -> Iterator[QuestionedText]:
    """Yield three texts in each round: a passage to copy, prose and code."""
    del part
    make, size = TextMaker(context.loaded.tokenizer), (context.tokens, context.answer_tokens)
    for index in range(FIRST, FIRST + context.rounds):
        yield make.passages(*size, index)
        yield make.prose(*size, index)
        yield make.code(*size, index)


def _measure(context: RunContext, text: QuestionedText) -> Iterator[Row]:
    """Yield a row for the full cache, and one for every method and share."""
    (source,) = make_prompts(ReadText(context.loaded.model, text.ids), text, "visible")
    (case,), tokens = source.cases, source.ids.shape[1]
    policies = {("full", ""): FullCache()} | {
        (name, share): make(tokens // parts)
        for share, parts in SHARES.items()
        for name, make in WAYS.items()
    }
    for (name, share), policy in policies.items():
        is_right, losses = score_tokens(source.prompt, source.prompt.compressed(policy), case)
        yield {
            "text": text.name,
            "group": case.group,
            "method": name,
            "share": share,
            "right": quarter_means(is_right.float()),
            "nll": quarter_means(losses),
        }


def quarter_means(values: Tensor) -> list[float]:
    """Return the mean of each quarter. `values` are one number per token of the answer."""
    return [round(float(part.mean()), 4) for part in values.chunk(len(QUARTERS))]


def _cells(rows: list[Row]) -> Iterator[Row]:
    """Yield a cell for every method, share and quarter, with its mean over all texts.

    "right" is the fraction of tokens that are the most likely one, and "above" is the loss above
    the full cache's in nats per token.
    """
    full = {row["text"]: row for row in rows if row["method"] == "full"}
    for (name, share), own in group_rows(rows, lambda row: (row["method"], row["share"])).items():
        for place, quarter in enumerate(QUARTERS):
            above = (row["nll"][place] - full[row["text"]]["nll"][place] for row in own)
            yield {
                "line": f"{name}, {share}" if share else name,
                "quarter": quarter,
                "right": fmean(row["right"][place] for row in own),
                "above": fmean(above),
            }


def _listing(title: str, groups: tuple[str, ...], cell: str) -> Listing:
    def cells(rows: list[Row]) -> Iterator[Row]:
        return _cells([row for row in rows if row.get("group") in groups])

    return Listing(
        Pivot("method, share of the tokens", "{line}", "{quarter}", cell), title, make_lines=cells
    )


LONG_ANSWERS = Experiment(
    name="long_answers",
    title="Answers of 200 tokens, from their beginning to their end",
    duration="twenty minutes",
    measure=_measure,
    cases=_texts,
    options={
        "tokens": Size(1024, 512),
        "answer_tokens": Size(200, 40),
        "rounds": Size(6, 1),
        "dtype": "bfloat16",
    },
    tables=[
        _listing("Passages: tokens that are the most likely ones", ("passages",), "{right:.0%}"),
        _listing("Passages: loss per token above the full cache's", ("passages",), "{above:+.2f}"),
        _listing(
            "Prose and code: loss per token above the full cache's",
            ("prose", "code"),
            "{above:+.2f}",
        ),
    ],
)
