"""What `ask` and `generate` do once it is known what to read: load, answer, show."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import transformers
import typer
from rich.console import Console
from rich.text import Text

from snapkv import __version__
from snapkv.app import draft_methods
from snapkv.app.answering import Answer, TextSink, answer
from snapkv.app.draft_methods import DraftMethod
from snapkv.app.library_answers import search, take
from snapkv.app.models import LoadedModel
from snapkv.app.prefills import Exact
from snapkv.app.prompts import Prompt
from snapkv.app.protection import Protection
from snapkv.app.remedies import Candidate, Tried, first_that_keeps
from snapkv.app.settings import GenerationSettings
from snapkv.cli.grid import Grid, say, show
from snapkv.cli.library import like
from snapkv.cli.loading import load_model, load_other, reading_progress
from snapkv.cli.notes import LostVotes, Note, Try, is_safe, notes_on
from snapkv.cli.options import DRAFTS, AskOptions, RunOptions
from snapkv.cli.policy import build_policy, usual_bits
from snapkv.cli.standard_output import write, write_json
from snapkv.errors import InvalidArgumentError
from snapkv.hf.placement import device_of
from snapkv.kvzip import require_one_reading
from snapkv.library.library import Library
from snapkv.library.searching import Hit
from snapkv.policies import FullCache, Policy
from snapkv.policies.default import method_name
from snapkv.validation import DEFAULT, DEFAULT_RECOMPUTE, format_bytes

_DOCUMENTS = 3


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was asked, and how to answer it.

    Attributes:
        loaded: the model that answers.
        settings: how it generates.
        answered: gives the answer of the method, whose text goes where it is told meanwhile.
        full: gives the full cache's answer, or the first so many tokens of it.
        trying: what tries policies where an answer differs from the full cache's.
        own_bits: why bits that would be chosen are the model's own; empty where they are not.
        sources: gives lines between an answer and what it took, once there is an answer.
    """

    loaded: LoadedModel
    settings: GenerationSettings
    answered: Callable[[TextSink | None], Answer]
    full: Callable[[int | None], Answer]
    trying: Callable[[Answer], Try]
    own_bits: str = ""
    sources: Callable[[], Sequence[Text]] = tuple


def answer_and_show(
    options: RunOptions,
    policy: Policy,
    make_prompt: Callable[[Any], Prompt],
    request: dict[str, Any],
    typed: Sequence[str],
    *,
    system: bool | None,
) -> None:
    """Load the model, answer once or, to compare, twice; then show what was asked for.

    Standard output carries the answer, the comparison or one JSON object; progress, and what stands
    below an answer, go to standard error.
    """
    settings, protection = options.settings(), protection_of(options, system=system)
    _require_drafts_that_fit(options, policy)
    loaded = load_model(options)
    drafts = _draft_method(options, loaded)
    prompt = make_prompt(loaded.tokenizer)
    quantize, own_bits = usual_bits(policy, loaded.model, options)

    def read(who: Policy, how: GenerationSettings, on_text: TextSink | None, **ways: Any) -> Answer:
        with reading_progress(method_name(who.describe()), on_text) as progress:
            return answer(loaded, prompt, who, how, protection=protection, **ways, **progress)

    def full(tokens: int | None) -> Answer:
        limit = settings.max_new_tokens if tokens is None else tokens
        return read(FullCache(), replace(settings, max_new_tokens=limit), None, prefill=Exact())

    def candidate(changed: RunOptions) -> Candidate:
        policy = build_policy(changed)
        return Candidate(policy, usual_bits(policy, loaded.model, changed)[0])

    asked = Asked(
        loaded=loaded,
        settings=settings,
        answered=lambda on_text: read(
            policy, settings, on_text, drafts=drafts, prefill=options.reading, quantize=quantize
        ),
        full=full,
        trying=lambda ours: (
            lambda answer_ids, changed: first_that_keeps(
                loaded,
                prompt,
                settings,
                answer_ids,
                [candidate(each) for each in changed],
                protect=ours.protected,
            )
        ),
        own_bits=own_bits,
    )
    _show_answers(asked, options, request, typed)


def protection_of(options: RunOptions, *, system: bool | None) -> Protection:
    """What the options protect; `system` is whether a system message stays by default."""
    return Protection(
        texts=tuple(options.protect or ()),
        first_tokens=options.protect_first,
        system=system if options.protect_system is None else options.protect_system,
    )


def _require_drafts_that_fit(options: RunOptions, policy: Policy) -> None:
    """Refuse several ways at once, and any behind documents that are not read at once."""
    flags = {name: f"--{name.replace('_', '-')}" for name in DRAFTS}
    given = [flag for name, flag in flags.items() if getattr(options, name) is not None]
    if len(given) > 1:
        raise InvalidArgumentError(
            f"drafts: expected one of {', '.join(flags.values())}, got {' and '.join(given)}; "
            "leave one out"
        )
    if given and policy.reads_context:
        raise InvalidArgumentError(
            f"drafts: expected none with {policy.name}, which has the documents read before the "
            f"question, got {given[0]}; leave it out"
        )
    if given and options.prefill != "exact":
        raise InvalidArgumentError(
            f"drafts: expected none with --prefill {options.prefill}, since they are verified in "
            f"one pass with the prompt, got {given[0]}; leave one of them out"
        )


def _draft_method(options: RunOptions, loaded: LoadedModel) -> DraftMethod | None:
    """Where the options say that drafts come from; None for plain decoding."""
    if options.medusa is not None:
        return draft_methods.medusa(loaded, options.medusa)
    if options.assistant is not None:
        return draft_methods.assistant(loaded, load_other(options.assistant, options))
    if options.prompt_lookup is not None:
        return draft_methods.prompt_lookup(options.prompt_lookup)
    return None


def answer_from_library(options: AskOptions, question: str, typed: Sequence[str]) -> None:
    """Find documents in the library that the options name, answer from their caches, name them."""
    settings, policy = options.settings(), build_policy(options)
    require_one_reading(policy, "have documents compressed by it where they are added")
    warnings: list[str] = []
    library = Library(str(options.library), on_notice=warnings.append)
    is_compressed = library.required().policy["name"] != FullCache.name
    if is_compressed and options.policy == DEFAULT and not options.has_parameters:
        options, policy = replace(options, policy=FullCache.name), FullCache()  # stays as it is
    documents = _DOCUMENTS if options.documents is None else options.documents
    hits = search(library, question, documents)
    loaded = load_model(like(library, options))
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
    request = {
        "library": str(library.path),
        "recompute": found.recompute,
        "sources": [_without(asdict(hit), "key") for hit in found.hits],
        "warnings": warnings,
        "question": question,
    }

    def answered(on_text: TextSink | None) -> Answer:
        with reading_progress(method_name(policy.describe()), on_text) as progress:
            return found.answer(policy, progress["on_text"])

    def full(tokens: int | None) -> Answer:
        with reading_progress(FullCache.name):
            return found.answer_in_full(tokens)

    asked = Asked(
        loaded=loaded,
        settings=settings,
        answered=answered,
        full=full,
        trying=lambda _: lambda *_: Tried(untold=_untried(found.recompute)),
        sources=lambda: _source_lines(found.hits, warnings),
    )
    _show_answers(asked, options, request, typed)


def _untried(recompute: float) -> str:
    if recompute == 1:
        return "raise --budget"
    return "raise --recompute, where 1 reads the documents in full, or --budget"


def _source_lines(hits: Sequence[Hit], warnings: Sequence[str]) -> list[Text]:
    """A line per document, with the lines of its best passage."""
    found = [Text(f"source: {hit.name}, lines {hit.lines[0]:,}-{hit.lines[1]:,}") for hit in hits]
    return [*found, *(Text(f"warning: {line}") for line in warnings)]


def _show_answers(
    asked: Asked, options: RunOptions, request: dict[str, Any], typed: Sequence[str]
) -> None:
    """Answer once or, to compare, twice; then show what was asked for."""
    if options.compare:
        _warm_up(asked.loaded.model)
        answers = [asked.answered(None), asked.full(None)]
    else:
        answers = [asked.answered(None if options.json else write)]
    if not options.json:
        _show(answers, asked.sources(), safe=is_safe(answers, options))
    tried = asked.trying(answers[0])
    notes = notes_on(answers, options, typed, tried=tried, full_start=asked.full)
    if asked.own_bits:
        line = Text(f"bits: {asked.own_bits}")
        notes.append(Note(key="bits", record={"note": asked.own_bits}, lines=[line]))
    if options.json:
        about = {"model": asked.loaded.description(), **request}
        about["prefill"] = options.reading.describe()
        about["settings"] = asdict(asked.settings)
        runs = [answer_record(each, with_layers=options.verbose) for each in answers]
        told = {note.key: note.record for note in notes}
        write_json({"answer": runs[0]["text"]} | about | {"runs": runs} | told | versions())
    else:
        say([line for note in notes for line in note.lines], to_errors=not options.compare)
    if status := max(note.status for note in notes):
        raise typer.Exit(status)


def _show(answers: Sequence[Answer], sources: Sequence[Text], *, safe: bool) -> None:
    """Two answers side by side on standard output, or below one that is there what it took."""
    if len(answers) > 1:
        show(answers_table(answers, with_text=True, safe=safe))
        say(sources)
    else:
        write("\n")
        say(sources, to_errors=True)
        Console(stderr=True).print(answers_table(answers, with_text=False, safe=safe))


def _warm_up(model: Any) -> None:
    """Touch the weights once, or the first of two runs would pay for reading them."""
    with torch.inference_mode():
        model(torch.zeros(1, 1, dtype=torch.int64, device=device_of(model)))


def answers_table(answers: Sequence[Answer], *, with_text: bool, safe: bool) -> Grid:
    """A column per answer: its text where that was not shown yet, and what it cost."""
    columns = [_costs(answer, safe=safe) for answer in answers]
    rows = [(name, *(column.get(name, "-") for column in columns)) for name in columns[0]]
    if with_text:
        rows.insert(0, ("answer", *(answer.text.strip() for answer in answers)))
    names = (method_name(answer.policy) for answer in answers)
    return Grid(headings=("", *names), rows=tuple(rows), left=1 + len(answers), ruled=with_text)


def _costs(answer: Answer, *, safe: bool) -> dict[str, str]:
    cache = answer.cache
    costs = {
        "prompt tokens": f"{answer.prompt_tokens:,}",
        "kept tokens": f"{answer.kept_tokens:,.0f} of {answer.prompt_tokens:,}",
        "generated": f"{answer.new_tokens:,}",
        "lost votes": LostVotes.of(cache).said(safe=safe),
        "cache": f"{format_bytes(cache.held_bytes)} ({cache.held_bytes / cache.full_bytes:.0%})",
        "full cache": format_bytes(cache.full_bytes),
        "first token": f"{answer.first_token_ms / 1000:.1f} s",
        "per token": "-" if answer.token_ms is None else f"{answer.token_ms:.0f} ms",
        "whole answer": f"{answer.total_ms / 1000:.1f} s",
    }
    if drafts := answer.drafts:
        length, passes = drafts["acceptance_length"], drafts["passes"]
        costs["tokens per pass"] = f"{length:.2f}, {passes:,} passes ({drafts['method']})"
    return costs


def answer_record(answer: Answer, *, with_layers: bool) -> dict[str, Any]:
    """An answer ready for JSON; layer by layer is long, so only where that is asked for."""
    record = {"method": method_name(answer.policy), **asdict(answer)}
    if not with_layers:
        record["cache"] = _without(record["cache"], "layers")
    return record


def _without(record: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != name}


def versions() -> dict[str, str]:
    """What computed it, for a record."""
    return {
        "snapkv": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
