"""Ten questions about a document, and fifty turns in one cache: what recall keeps and costs."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

import torch

from snapkv import AdaKV, CompressedCache, Document, FullCache, KVzip, SnapKV
from snapkv.app.models import LoadedModel
from snapkv.kvzip import read_context
from snapkv.policies import Policy
from snapkv.validation import format_bytes
from snapkv_lab.evaluate.haystack import load_haystack
from snapkv_lab.experiments.experiment import Experiment, Given, Shown, of, table
from snapkv_lab.experiments.quotes import QuotedDocument, quoted_document
from snapkv_lab.experiments.records import Row, environment_line

TURN_BUDGET, TURN_NEW_TOKENS, TURN_DOCUMENT_TOKENS = 128, 8, 512

FULL, PLAIN, HIDDEN, TWICE, RECALL, AGAIN = "full", "plain", "hidden", "twice", "recall", "again"
NAMES = {
    FULL: "full cache, read once",
    PLAIN: "SnapKV, kept for the first question",
    HIDDEN: "SnapKV, kept before any question",
    TWICE: "AdaKV(KVzip), kept before any question",
    RECALL: "SnapKV with recall",
    AGAIN: "SnapKV, read again for every question",
}

Ask = Callable[[list[int], int], tuple[list[int], CompressedCache]]
"""Takes a question and how many tokens to answer; gives them, and the cache."""


def measure(given: Given) -> Iterator[Row]:
    """All answers of all contenders, then a conversation, turn by turn."""
    loaded, haystack, asked = given.loaded, load_haystack(), given.options
    for number in range(asked["documents"]):
        start = len(haystack.pieces) * number // asked["documents"]
        text = "\n\n".join(haystack.pieces[start:])
        document = quoted_document(loaded.tokenizer, text, tokens=asked["tokens"])
        for row in measure_questions(loaded.model, document, asked["budgets"]):
            yield {"document": number, **row, "text": haystack.name}
    for row in measure_turns(loaded, haystack.text, asked["turns"]):
        yield row | {"text": haystack.name}


def measure_questions(
    model: Any, document: QuotedDocument, budgets: Sequence[int]
) -> Iterator[Row]:
    """Every question asked of every contender."""
    contenders: list[tuple[str, int | None]] = [(FULL, None)]
    contenders += [(name, b) for b in budgets for name in _CONTENDERS if name != FULL]
    for name, budget in contenders:
        policy = _policy(name, budget)
        begin = time.perf_counter()
        ask = _CONTENDERS[name](model, document, policy)
        read_seconds = time.perf_counter() - begin
        for quote in document.quotes:
            begin = time.perf_counter()
            said, cache = ask(quote.question_ids, len(quote.answer_ids))
            seconds, report = time.perf_counter() - begin, cache.report()
            yield {
                "task": "questions",
                "contender": name,
                "budget": budget,
                "document_tokens": len(document.ids),
                "depth": quote.depth,
                "right": said == quote.answer_ids,
                "seconds": round(seconds, 3),
                "read_seconds": round(read_seconds, 3),
                "held_bytes": report.held_bytes,
                "host_bytes": report.host_bytes,
                "full_bytes": report.full_bytes,
            }


def _policy(name: str, budget: int | None) -> Policy:
    if budget is None:
        return FullCache()
    if name == TWICE:
        return AdaKV(KVzip(budget, window_size=16))
    return SnapKV(budget, window_size=16, kernel_size=13)


def _ask_copies(model: Any, cache: CompressedCache, ids: list[int]) -> Ask:
    """Ask a copy of a cache that has read the text, so that no question sees another."""

    def ask(question: list[int], tokens: int) -> tuple[list[int], CompressedCache]:
        own = copy.deepcopy(cache)
        return _continue(model, [*ids, *question], own, tokens), own

    return ask


def _read(model: Any, ids: list[int], policy: Policy) -> CompressedCache:
    cache = CompressedCache(model, policy)
    with torch.no_grad():
        model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1)
    return cache


def _read_once(model: Any, document: QuotedDocument, policy: Policy) -> Ask:
    return _ask_copies(model, _read(model, document.ids, policy), document.ids)


def _read_twice(model: Any, document: QuotedDocument, policy: Policy) -> Ask:
    return _ask_copies(
        model, read_context(model, torch.tensor([document.ids]), policy), document.ids
    )


def _read_for_the_first(model: Any, document: QuotedDocument, policy: Policy) -> Ask:
    """Compressed behind the first question; the others are asked of what that one left."""
    ids = [*document.ids, *document.quotes[0].question_ids]
    cache = _read(model, ids, policy)
    others = _ask_copies(model, cache, ids)

    def ask(question: list[int], tokens: int) -> tuple[list[int], CompressedCache]:
        if question != document.quotes[0].question_ids:
            return others(question, tokens)
        own = copy.deepcopy(cache)
        own.crop(-1)  # the last token is read again, for its logits
        return _continue(model, ids, own, tokens), own

    return ask


def _recalled(model: Any, document: QuotedDocument, policy: Policy) -> Ask:
    read = Document(model, torch.tensor(document.ids), policy)

    def ask(question: list[int], tokens: int) -> tuple[list[int], CompressedCache]:
        inputs = read.inputs([question])
        cache = inputs["past_key_values"]
        return _continue(model, [*document.ids, *question], cache, tokens), cache

    return ask


def _read_again(model: Any, document: QuotedDocument, policy: Policy) -> Ask:
    def ask(question: list[int], tokens: int) -> tuple[list[int], CompressedCache]:
        cache = CompressedCache(model, policy)
        return _continue(model, [*document.ids, *question], cache, tokens), cache

    return ask


_CONTENDERS = {
    FULL: _read_once,
    PLAIN: _read_for_the_first,
    HIDDEN: _read_once,
    TWICE: _read_twice,
    RECALL: _recalled,
    AGAIN: _read_again,
}


def _continue(model: Any, ids: list[int], cache: CompressedCache, tokens: int) -> list[int]:
    prompt = torch.tensor([ids])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=cache,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
    )
    said: list[int] = output[0, len(ids) :].tolist()
    return said


class _Watched(CompressedCache):
    """Notes the most bytes that all layers together have held at any moment."""

    most_bytes = 0

    def update(self, *args: Any, **kwargs: Any) -> Any:
        updated = super().update(*args, **kwargs)
        held = sum(self.layers[index].held_bytes for index in self.compressed_layers)
        self.most_bytes = max(self.most_bytes, held)
        return updated


def measure_turns(loaded: LoadedModel, text: str, turns: int) -> Iterator[Row]:
    """A conversation in one cache with recall: what the device and the host hold, turn by turn."""
    quoted = quoted_document(loaded.tokenizer, text, tokens=TURN_DOCUMENT_TOKENS, questions=5)
    policy = SnapKV(TURN_BUDGET, window_size=16, kernel_size=13)
    cache = _Watched(loaded.model, policy, recall="host")
    ids = list(quoted.ids)
    for turn in range(turns):
        ids += quoted.quotes[turn % len(quoted.quotes)].question_ids
        begin, prompt_tokens = time.perf_counter(), len(ids)
        cache.most_bytes = 0
        ids += _continue(loaded.model, ids, cache, TURN_NEW_TOKENS)
        report = cache.report()
        per_token = report.full_bytes // report.seen_tokens
        yield {
            "task": "turns",
            "turn": turn + 1,
            "budget": TURN_BUDGET,
            "new_tokens": TURN_NEW_TOKENS,
            "prompt_tokens": prompt_tokens,
            "bytes_per_token": per_token,
            "layers": len(cache.layers),
            "held_bytes": report.held_bytes,
            "most_bytes": cache.most_bytes,
            "host_bytes": report.host_bytes,
            "seconds": round(time.perf_counter() - begin, 3),
        }


def cap_bytes(row: Row) -> int:
    """What a turn may hold: the budget and the new tokens, and one layer of all that was seen."""
    per_token, tokens = row["bytes_per_token"], row["budget"] + row["new_tokens"]
    staged = row["prompt_tokens"] * per_token // row["layers"]
    return int(tokens * per_token + staged)


def _tables(rows: list[Row]) -> list[str]:
    questions, turns = of(rows, task="questions"), of(rows, task="turns")
    return [
        "## Ten questions about one document",
        _questions_table(questions),
        f"## {len(turns)} turns in one cache",
        table(
            (row for row in turns if row["turn"] in (1, 2, 5, 10, 20, 30, 40, 50)),
            {
                "turn": "{turn}",
                "tokens seen": lambda row: f"{row['prompt_tokens'] + row['new_tokens'] - 1:,}",
                "device after it": "{held_bytes:bytes}",
                "most within it": "{most_bytes:bytes}",
                "cap": lambda row: format_bytes(cap_bytes(row)),
                "host": "{host_bytes:bytes}",
                "s": "{seconds:.2f}",
            },
        ),
    ]


def _questions_table(rows: list[Row]) -> str:
    names, full, lines = list(NAMES), share(rows, FULL, None), []
    for budget, place in sorted({(r["budget"] or 0, names.index(r["contender"])) for r in rows}):
        own = of(rows, contender=names[place], budget=budget or None)
        right = share(own, names[place], budget or None)
        keys = ("seconds", "read_seconds", "held_bytes", "host_bytes")
        lines.append(
            {"name": NAMES[names[place]], "budget": budget or "all", "right": right}
            | {"of_full": f"{right / full:.0%}" if full else "-"}
            | {key: fmean(row[key] for row in own) for key in keys}
        )
    return table(
        lines,
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
    )


def share(rows: Sequence[Row], contender: str, budget: int | None) -> float:
    """Fraction of right answers of a contender."""
    return fmean(row["right"] for row in of(rows, contender=contender, budget=budget))


EXPERIMENT = Experiment(
    name="recall",
    title="Many questions, many turns",
    measure=measure,
    options={"documents": 4, "tokens": 2048, "turns": 50, "budgets": (128, 256)},
    measured=lambda rows: environment_line(of(rows, task="questions")),
    tables=_tables,
    shown={
        "recall": Shown(
            "Ten questions about one document",
            ("cache", "right answers", "s per question", "device", "host"),
            (
                "full cache, read once | all",
                "SnapKV, kept for the first question | 128",
                "AdaKV(KVzip), kept before any question | 128",
                "SnapKV with recall | 128",
                "SnapKV, read again for every question | 128",
            ),
        )
    },
)


if __name__ == "__main__":
    EXPERIMENT.main()
