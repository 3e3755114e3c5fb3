"""`ask --library`: find documents, load the model, answer from their caches, print."""

from collections.abc import Sequence
from dataclasses import asdict, replace

from rich.text import Text

from snapkv.kvzip import require_one_reading
from snapkv.policies import FullCache
from snapkv.policies.default import method_name
from snapkv.validation import DEFAULT, DEFAULT_RECOMPUTE
from snapkv_app.answering import Answer, TextSink
from snapkv_app.cli.announcing import announce_model
from snapkv_app.cli.library import like
from snapkv_app.cli.loading import load_model, reading_progress
from snapkv_app.cli.options import AskOptions
from snapkv_app.cli.policy import build_policy, usual_bits
from snapkv_app.cli.session import AskSession, show_answers, without
from snapkv_app.library.library import Library
from snapkv_app.library.searching import Hit
from snapkv_app.library_answers import take
from snapkv_app.library_hits import Found


def answer_from_library(
    library: Library,
    hits: Found,
    options: AskOptions,
    question: str,
    typed: Sequence[str],
    warnings: list[str],
) -> None:
    """Answer from the caches of the documents that a question found; print their names.

    Args:
        library: a library, whose notices are added to `warnings`.
        hits: the documents.
        options: of the command.
        question: what is asked.
        typed: the command line.
        warnings: lines to print below the answer.
    """
    settings = options.settings()
    is_compressed = library.required().policy["name"] != FullCache.name
    is_partial = is_compressed and options.recompute != 1
    policy = build_policy(options, alone=is_partial)
    require_one_reading(policy, "compress the documents by it when they are added")
    if is_compressed and options.policy == DEFAULT and not options.has_parameters:
        options, policy = replace(options, policy=FullCache.name), FullCache()  # not changed
    options = like(library, options)
    announce_model(options.model)
    loaded = load_model(options)
    found = take(
        loaded,
        library,
        question,
        hits,
        settings,
        recompute=DEFAULT_RECOMPUTE if options.recompute is None else options.recompute,
        answer_start=options.answer_start,
    )
    warnings += [
        f"{hit.name}: left out, since the model has no positions for its {hit.tokens:,} tokens"
        for hit in found.left_out
    ]
    quantize, own_bits = usual_bits(policy, loaded.model, options)
    if quantize is not None and is_partial:
        quantize, own_bits = None, "unquantized, since the documents were compressed when added"
    request = {
        "library": str(library.path),
        "recompute": found.recompute,
        "sources": [without(asdict(hit), "key") for hit in found.hits],
        "warnings": warnings,
        "question": question,
    }

    def answered(on_text: TextSink | None) -> Answer:
        with reading_progress(loaded.model, method_name(policy.describe())) as bar:
            return found.answer(policy, on_text and bar.before(on_text), quantize=quantize)

    def full(tokens: int | None) -> Answer:
        with reading_progress(loaded.model, FullCache.name):
            return found.answer_in_full(tokens)

    asked = AskSession(
        loaded=loaded,
        settings=settings,
        answered=answered,
        full=full,
        exactly={} if found.recompute == 1 else {"recompute": 1},
        own_bits=own_bits,
        sources=lambda: _source_lines(found.hits, warnings),
    )
    show_answers(asked, options, request, typed)


def _source_lines(hits: Sequence[Hit], warnings: Sequence[str]) -> list[Text]:
    """A line per document, with the lines of its best passage."""
    found = [Text(f"source: {hit.name}, lines {hit.lines[0]:,}-{hit.lines[1]:,}") for hit in hits]
    return [*found, *(Text(f"warning: {line}") for line in warnings)]
