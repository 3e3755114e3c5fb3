"""Ten questions about a document, and fifty turns in one cache: what recall keeps and costs."""

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

import torch

from snapkv import CompressedCache, Document, FullCache, SnapKV
from snapkv.hf.cache_argument import cache_among, passed
from snapkv.policies import Policy
from snapkv.validation import format_bytes
from snapkv_lab.evaluate.haystack import load_haystack
from snapkv_lab.experiments.experiment import Experiment, RunContext, Size
from snapkv_lab.experiments.pages import Listing
from snapkv_lab.experiments.prompts import QuotedDocument, generate_greedily, quoted_document
from snapkv_lab.rows import Row, group_rows, select_rows

FULL, PLAIN, RECALL, AGAIN = "full", "plain", "recall", "again"
NAMES = {
    FULL: "full cache, read once",
    PLAIN: "SnapKV, kept for the first question",
    RECALL: "SnapKV with recall",
    AGAIN: "SnapKV, read again for every question",
}

Ask = Callable[[list[int]], tuple[list[int], CompressedCache]]
"""Takes a question, and returns the prompt that ends with it and a cache for that prompt."""


def _measure(context: RunContext) -> Iterator[Row]:
    """Yield the answers of all contenders, followed by the turns of a conversation."""
    loaded, haystack = context.loaded, load_haystack()
    for number in range(context.count):
        start = len(haystack.pieces) * number // context.count
        text = "\n\n".join(haystack.pieces[start:])
        shape = {"tokens": context.tokens, "questions": context.questions}
        document = quoted_document(loaded.tokenizer, text, **shape)
        for row in answer_rows(loaded.model, document, context.budgets):
            yield {"document": number, **row, "text": haystack.name}
    for row in _turns(context, haystack.text):
        yield row | {"text": haystack.name}


def answer_rows(model: Any, document: QuotedDocument, budgets: Sequence[int]) -> Iterator[Row]:
    """Yield a row for each contender, each budget and each question. The full cache comes first,
    with the budget None.

    Args:
        model: the model.
        document: the document and its questions.
        budgets: how many tokens SnapKV keeps.

    Returns:
        Rows with "right", whether the answer is right, the seconds of the question and of the
        reading before it, and the bytes of the cache.
    """
    contenders: list[tuple[str, int | None]] = [(FULL, None)]
    contenders += [(name, budget) for budget in budgets for name in NAMES if name != FULL]
    for name, budget in contenders:
        begin = time.perf_counter()
        ask = _asking(model, document, name, budget)
        read_seconds = time.perf_counter() - begin
        for quote in document.quotes:
            begin = time.perf_counter()
            prompt, cache = ask(quote.question_ids)
            answer = generate_greedily(model, prompt, cache, len(quote.answer_ids))
            seconds, report = time.perf_counter() - begin, cache.report()
            yield {
                "task": "questions",
                "contender": name,
                "budget": budget,
                "document_tokens": len(document.ids),
                "depth": quote.depth,
                "right": answer == quote.answer_ids,
                "seconds": round(seconds, 3),
                "read_seconds": round(read_seconds, 3),
                "held_bytes": report.held_bytes,
                "host_bytes": report.host_bytes,
                "full_bytes": report.full_bytes,
            }


def _asking(model: Any, document: QuotedDocument, name: str, budget: int | None) -> Ask:
    """Read the document, and return a function that asks a question.

    Questions do not affect each other, because each gets a cache of its own.

    Args:
        model: the model.
        document: the document and its questions.
        name: the contender, a key of `NAMES`.
        budget: the tokens that SnapKV keeps; None for the full cache.
    """
    policy: Policy = SnapKV(budget, window_size=16, kernel_size=13) if budget else FullCache()
    ids, first = document.ids, document.quotes[0].question_ids
    if name == RECALL:
        read_once = Document(model, torch.tensor(ids), policy)
        return lambda question: ([*ids, *question], cache_among(read_once.inputs([question])))
    if name == AGAIN:
        return lambda question: ([*ids, *question], CompressedCache(model, policy))
    # With PLAIN, later questions are asked of the cache that the first question left.
    known_ids, read = [*ids, *first] if name == PLAIN else ids, CompressedCache(model, policy)
    with torch.no_grad():
        model(torch.tensor([known_ids]), **passed(read), logits_to_keep=1)

    def ask(question: list[int]) -> tuple[list[int], CompressedCache]:
        own = copy.deepcopy(read)
        if name == PLAIN and question == first:
            own.crop(-1)  # the last token is read again, for its logits
            return known_ids, own
        return [*known_ids, *question], own

    return ask


class _Watched(CompressedCache):
    """A cache that records the maximum number of bytes held by all layers."""

    most_bytes = 0

    def update(self, *args: Any, **kwargs: Any) -> Any:
        updated = super().update(*args, **kwargs)
        held = sum(self.layers[index].held_bytes for index in self.compressed_layers)
        self.most_bytes = max(self.most_bytes, held)
        return updated


def _turns(context: RunContext, text: str) -> Iterator[Row]:
    """Yield a row for each turn of a conversation that uses recall.

    A row says how many bytes the device and the host hold after the turn, and how many the device
    held at most within it.
    """
    model, (budget, new_tokens, tokens) = context.loaded.model, context.turned
    quoted = quoted_document(context.loaded.tokenizer, text, tokens=tokens, questions=5)
    policy = SnapKV(budget, window_size=16, kernel_size=13)
    cache, ids = _Watched(model, policy, recall="host"), list(quoted.ids)
    for turn in range(context.turns):
        ids += quoted.quotes[turn % len(quoted.quotes)].question_ids
        begin, prompt_tokens = time.perf_counter(), len(ids)
        cache.most_bytes = 0
        ids += generate_greedily(model, ids, cache, new_tokens)
        report = cache.report()
        yield {
            "task": "turns",
            "turn": turn + 1,
            "budget": budget,
            "new_tokens": new_tokens,
            "prompt_tokens": prompt_tokens,
            "bytes_per_token": report.full_bytes // report.seen_tokens,
            "layers": len(cache.layers),
            "held_bytes": report.held_bytes,
            "most_bytes": cache.most_bytes,
            "host_bytes": report.host_bytes,
            "seconds": round(time.perf_counter() - begin, 3),
        }


def cap_bytes(row: Row) -> int:
    """Return how many bytes the device may hold at most within a turn, by the numbers in its row.

    They are those of the budget and the new tokens in all layers, and those of all tokens of the
    prompt in one layer, because recall restores one layer after the other.
    """
    per_token, tokens = row["bytes_per_token"], row["budget"] + row["new_tokens"]
    staged = row["prompt_tokens"] * per_token // row["layers"]
    return int(tokens * per_token + staged)


def _means(rows: list[Row]) -> Iterable[Row]:
    """Yield the lines of the table about questions: the means of each budget and contender.

    `rows` must include those of the full cache, which "of_full" is relative to.
    """
    names, full = list(NAMES), right_share(rows, FULL, None)
    cells = group_rows(rows, lambda row: (row["budget"] or 0, names.index(row["contender"])))
    for (budget, place), own in sorted(cells.items()):
        right = fmean(row["right"] for row in own)
        yield {
            "name": NAMES[names[place]],
            "budget": budget or "all",
            "right": right,
            "of_full": f"{right / full:.0%}" if full else "-",
            **{
                key: fmean(row[key] for row in own)
                for key in ("seconds", "read_seconds", "held_bytes", "host_bytes")
            },
        }


def right_share(rows: Sequence[Row], contender: str, budget: int | None) -> float:
    """Return the fraction of right answers for one contender and one budget.

    There must be at least one row of them.
    """
    return fmean(row["right"] for row in select_rows(rows, contender=contender, budget=budget))


def _turns_table(rows: list[Row]) -> Iterator[str]:
    """Yield the heading and the table of turns 1, 2, 5, 10, 20, 30, 40 and 50, as far as there are
    rows of them; nothing without any.
    """
    shown_rows = [row for row in rows if row["turn"] in (1, 2, 5, 10, 20, 30, 40, 50)]
    columns = {
        "turn": "{turn}",
        "tokens seen": lambda row: f"{row['prompt_tokens'] + row['new_tokens'] - 1:,}",
        "device after it": "{held_bytes:bytes}",
        "most within it": "{most_bytes:bytes}",
        "cap": lambda row: format_bytes(cap_bytes(row)),
        "host": "{host_bytes:bytes}",
        "s": "{seconds:.2f}",
    }
    return Listing(columns, f"{len(rows)} turns in one cache").parts(shown_rows)


_QUESTIONS = Listing(
    {
        "cache": "{name}",
        "budget": "{budget}",
        "right answers": "{right:.0%}",
        "of the full cache's": "{of_full}",
        "s per question": "{seconds:.2f}",
        "s to read before": "{read_seconds:.1f}",
        "device": "{held_bytes:bytes}",
        "host": "{host_bytes:bytes}",
    },
    "Ten questions about one document",
    {"task": "questions"},
    _means,
)

MANY_QUESTIONS = Experiment(
    name="recall",
    title="Many questions, many turns",
    measure=_measure,
    options={
        "count": Size(6, 1),
        "tokens": Size(2048, 512),
        "questions": Size(10, 2),
        "turns": Size(50, 2),
        "budgets": Size((128,), (96,)),
        "turned": Size((128, 8, 512), (64, 2, 256)),
    },
    tables=lambda rows: [*_QUESTIONS.parts(rows), *_turns_table(select_rows(rows, task="turns"))],
)
