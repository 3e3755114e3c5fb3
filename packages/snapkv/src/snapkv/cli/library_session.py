"""What `ask --library` does: find documents, answer from their caches, name them."""

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.text import Text

from snapkv.app.answering import Answer, TextSink
from snapkv.app.draft_methods import DraftMethod
from snapkv.app.library_answers import LibraryQuestion, look_up
from snapkv.app.models import LoadedModel
from snapkv.app.remedies import Tried
from snapkv.app.settings import GenerationSettings
from snapkv.cli.ask_options import AskOptions
from snapkv.cli.library import like
from snapkv.cli.loading import load_model
from snapkv.cli.policy import build_policy
from snapkv.cli.progress import reading_progress
from snapkv.cli.remedies import Try
from snapkv.cli.session import show_answers
from snapkv.kvzip import require_one_reading
from snapkv.library.blending import DEFAULT_RECOMPUTE
from snapkv.library.embeddings import embeddings_folder
from snapkv.library.library import Library
from snapkv.library.searching import Hit
from snapkv.policies import FullCache, Policy
from snapkv.validation import DEFAULT
from snapkv.word_index import require_word_index

_DOCUMENTS = 3


def answer_from_library(options: AskOptions, question: str, typed: Sequence[str]) -> None:
    """Answer, show the answer, where it comes from, and what it took.

    Args:
        options: those of the command; they name a library.
        question: what is asked.
        typed: the command line, for the one to type next.

    Raises:
        SnapKVError: the library or the model does not work, or nothing is found in it.
        typer.Exit: a check found that the answer is not that of reading the documents in full.
    """
    settings, policy = options.settings(), build_policy(options)
    require_one_reading(policy, "have documents compressed by it where they are added")
    warnings: list[str] = []
    library = Library(str(options.library), on_notice=warnings.append)
    is_compressed = library.required().policy["name"] != FullCache.name
    if is_compressed and _is_unsaid(options):
        options, policy = replace(options, policy=FullCache.name), FullCache()
    require_word_index()
    if options.rerank:
        embeddings_folder()
    loaded = load_model(like(library, options))
    found = look_up(
        loaded,
        library,
        question,
        _DOCUMENTS if options.documents is None else options.documents,
        settings,
        recompute=DEFAULT_RECOMPUTE if options.recompute is None else options.recompute,
        answer_start=options.answer_start,
        by_meaning=options.rerank,
    )
    warnings += [
        f"{hit.name}: left out, since the model has no positions for its {hit.tokens:,} tokens"
        for hit in found.left_out
    ]
    request = {
        "library": str(library.path),
        "recompute": found.recompute,
        "sources": [_source(hit) for hit in found.hits],
        "warnings": warnings,
        "question": question,
    }
    asked = _AskedLibrary(found)
    lines = functools.partial(_lines, found.hits, warnings)
    show_answers(asked, options, policy, None, request, typed, sources=lines)


def _is_unsaid(options: AskOptions) -> bool:
    """Whether no method is named, nor a parameter of one: what was compressed then stays."""
    return options.policy == DEFAULT and not options.has_parameters


@dataclass(frozen=True)
class _AskedLibrary:
    """A question that is answered from the caches of documents."""

    question: LibraryQuestion

    @property
    def loaded(self) -> LoadedModel:
        return self.question.loaded

    @property
    def settings(self) -> GenerationSettings:
        return self.question.settings

    def answered(
        self, policy: Policy, drafts: DraftMethod | None, on_text: TextSink | None = None
    ) -> Answer:
        del drafts
        with reading_progress(policy, on_text) as progress:
            return self.question.answer(policy, progress["on_text"])

    def full(self, tokens: int | None = None) -> Answer:
        with reading_progress(FullCache(), None):
            return self.question.answer_in_full(tokens)

    def trying(self, answer: Answer) -> Try:
        del answer
        return _not_tried


def _not_tried(answer_ids: Sequence[int], candidates: Sequence[Policy]) -> Tried:
    del answer_ids, candidates
    return Tried(untold="raise --recompute, where 1 reads the documents in full, or --budget")


def _source(hit: Hit) -> dict[str, Any]:
    """A source, ready for JSON."""
    return {name: value for name, value in asdict(hit).items() if name != "key"}


def _lines(hits: Sequence[Hit], warnings: Sequence[str]) -> list[Text]:
    """A line per document, with the lines of its best passage."""
    found = [Text(f"source: {hit.name}, lines {hit.lines[0]:,}-{hit.lines[1]:,}") for hit in hits]
    return [*found, *(Text(f"warning: {line}") for line in warnings)]
