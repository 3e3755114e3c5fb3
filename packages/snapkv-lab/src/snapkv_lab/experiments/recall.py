"""Ten questions about one document, and fifty turns in one cache: what recall keeps, and its cost.

    python -m snapkv_lab.experiments recall  measure, write the rows, render the page
    python -m snapkv_lab.experiments recall --documents 1 --tokens 512 --budgets 96
    python -m snapkv_lab.experiments recall --render  render the page from the rows that are there

Rows: `docs/results/recall.jsonl`. Page: `docs/results/tables/recall.md`.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from snapkv import AdaKV, CompressedCache, Document, FullCache, KVzip, SnapKV
from snapkv.app.models import LoadedModel, load
from snapkv.kvzip import read_context
from snapkv.policies import Policy
from snapkv.validation import format_bytes
from snapkv_lab.evaluate.haystack import Haystack, load_haystack
from snapkv_lab.experiments.environment import describe_environment
from snapkv_lab.experiments.quotes import QuotedDocument, quoted_document
from snapkv_lab.experiments.records import (
    RESULTS,
    TABLES,
    Row,
    environment_line,
    markdown_table,
    read_rows,
    tables_page,
    write_rows,
)

ROWS = RESULTS / "recall.jsonl"
PAGE = TABLES / "recall.md"

DOCUMENTS, TOKENS, TURNS = 4, 2048, 50
BUDGETS = (128, 256)
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


def measure(
    documents: int, tokens: int, turns: int, budgets: Sequence[int] = BUDGETS
) -> Iterator[Row]:
    """All answers of all contenders, then a conversation, turn by turn."""
    loaded, haystack, environment = load("demo"), load_haystack(), describe_environment()
    common = {"model": loaded.description(), "environment": environment, "text": haystack.name}
    for row in _measurements(loaded, haystack, documents, tokens, turns, budgets):
        print(row, file=sys.stderr)
        yield {**row, **common}


def _measurements(
    loaded: LoadedModel,
    haystack: Haystack,
    documents: int,
    tokens: int,
    turns: int,
    budgets: Sequence[int],
) -> Iterator[Row]:
    for number in range(documents):
        start = len(haystack.pieces) * number // documents
        text = "\n\n".join(haystack.pieces[start:])
        document = quoted_document(loaded.tokenizer, text, tokens=tokens)
        for row in measure_questions(loaded.model, document, budgets):
            yield {"document": number, **row}
    yield from measure_turns(loaded, haystack.text, turns)


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


def render(rows: list[Row]) -> str:
    """The tables of these rows."""
    questions = [row for row in rows if row["task"] == "questions"]
    turns = [row for row in rows if row["task"] == "turns"]
    return tables_page(
        "recall",
        "Many questions, many turns",
        environment_line(questions),
        "## Ten questions about one document",
        _questions_table(questions),
        f"## {len(turns)} turns in one cache",
        _turns_table(turns),
    )


def _questions_table(rows: list[Row]) -> str:
    cells = sorted({(row["budget"] or 0, _ORDER.index(row["contender"])) for row in rows})
    full = share(rows, FULL, None)
    lines = []
    for budget, place in cells:
        name = _ORDER[place]
        own = [r for r in rows if (r["contender"], r["budget"] or 0) == (name, budget)]
        lines.append(
            [
                NAMES[name],
                str(budget or "all"),
                f"{share(own, name, budget or None):.0%}",
                f"{share(own, name, budget or None) / full:.0%}" if full else "-",
                f"{_mean(own, 'seconds'):.2f}",
                f"{_mean(own, 'read_seconds'):.1f}",
                format_bytes(_mean(own, "held_bytes")),
                format_bytes(_mean(own, "host_bytes")),
            ]
        )
    header = ["cache", "budget", "right answers", "of the full cache's", "s per question"]
    return markdown_table([*header, "s to read before", "device", "host"], lines)


def _turns_table(rows: list[Row]) -> str:
    shown = [row for row in rows if row["turn"] in (1, 2, 5, 10, 20, 30, 40, 50)]
    return markdown_table(
        ["turn", "tokens seen", "device after it", "most within it", "cap", "host", "s"],
        [
            [
                str(row["turn"]),
                f"{row['prompt_tokens'] + row['new_tokens'] - 1:,}",
                *[format_bytes(row[name]) for name in ("held_bytes", "most_bytes")],
                format_bytes(cap_bytes(row)),
                format_bytes(row["host_bytes"]),
                f"{row['seconds']:.2f}",
            ]
            for row in shown
        ],
    )


_ORDER = tuple(NAMES)


def share(rows: Sequence[Row], contender: str, budget: int | None) -> float:
    """Fraction of right answers of a contender."""
    own = [r["right"] for r in rows if (r["contender"], r["budget"]) == (contender, budget)]
    return sum(own) / len(own)


def _mean(rows: Sequence[Row], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def main() -> None:
    """Measure unless told only to render."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--render", action="store_true", help="only render the page from the rows")
    parser.add_argument("--documents", type=int, default=DOCUMENTS, help="stretches of text")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="length of each")
    parser.add_argument("--turns", type=int, default=TURNS, help="turns of the conversation")
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS, help="of SnapKV")
    options = parser.parse_args()
    if not options.render:
        write_rows(ROWS, measure(options.documents, options.tokens, options.turns, options.budgets))
    PAGE.write_text(render(read_rows(ROWS)), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
