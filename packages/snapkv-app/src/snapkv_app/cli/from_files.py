"""`ask` and `generate` after the files are read: load the model, answer, print."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rich.text import Text

from snapkv.errors import InvalidArgumentError
from snapkv.policies import FullCache, Policy
from snapkv.policies.default import method_name
from snapkv_app import draft_methods
from snapkv_app.answering import Answer, TextSink, answer
from snapkv_app.cli.loading import load_model, load_other, reading_progress
from snapkv_app.cli.options import DRAFTS, RunOptions
from snapkv_app.cli.policy import usual_bits
from snapkv_app.cli.session import AskSession, show_answers
from snapkv_app.draft_methods import DraftMethod
from snapkv_app.models import LoadedModel
from snapkv_app.prefills import Exact
from snapkv_app.prompts import Prompt
from snapkv_app.protection import Protection
from snapkv_app.settings import GenerationSettings


def answer_from_files(
    options: RunOptions,
    policy: Policy,
    make_prompt: Callable[[LoadedModel], Prompt],
    request: dict[str, Any],
    typed: Sequence[str],
    *,
    system: bool | None,
    sources: Callable[[], Sequence[Text]] = tuple,
) -> None:
    """Load the model, answer once or, to compare, twice; then print the results.

    Standard output gets the answer, the comparison or one JSON object; progress and the table below
    an answer go to standard error.
    """
    settings, protection = options.settings(), protection_of(options, system=system)
    _require_drafts_that_fit(options, policy)
    loaded = load_model(options)
    drafts = _draft_method(options, loaded)
    prompt = make_prompt(loaded)
    quantize, own_bits = usual_bits(policy, loaded.model, options)

    def read(who: Policy, how: GenerationSettings, on_text: TextSink | None, **ways: Any) -> Answer:
        with reading_progress(loaded.model, method_name(who.describe())) as bar:
            ways |= {"protection": protection, "on_text": on_text and bar.before(on_text)}
            return answer(loaded, prompt, who, how, **ways)

    def full(tokens: int | None) -> Answer:
        limit = settings.max_new_tokens if tokens is None else tokens
        return read(FullCache(), replace(settings, max_new_tokens=limit), None, prefill=Exact())

    asked = AskSession(
        loaded=loaded,
        settings=settings,
        answered=lambda on_text: read(
            policy, settings, on_text, drafts=drafts, prefill=options.reading, quantize=quantize
        ),
        full=full,
        exactly={},
        own_bits=own_bits,
        sources=sources,
    )
    show_answers(asked, options, request, typed)


def protection_of(options: RunOptions, *, system: bool | None) -> Protection:
    """The protected tokens; `system`: whether a system message is kept by default."""
    return Protection(
        texts=tuple(options.protect or ()),
        first_tokens=options.protect_first,
        system=system if options.protect_system is None else options.protect_system,
    )


def _require_drafts_that_fit(options: RunOptions, policy: Policy) -> None:
    """Refuse several sources of drafts, and any if the prompt is not read in one pass."""
    flags = {name: f"--{name.replace('_', '-')}" for name in DRAFTS}
    given = [flag for name, flag in flags.items() if getattr(options, name) is not None]
    if len(given) > 1:
        raise InvalidArgumentError(
            f"drafts: expected one of {', '.join(flags.values())}, got {' and '.join(given)}; "
            "leave one out"
        )
    if given and policy.needs_reconstruction_pass:
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
    """The source of drafts that the options choose; None for plain decoding."""
    if options.assistant is not None:
        return draft_methods.assistant(loaded, load_other(options.assistant, options))
    if options.prompt_lookup is not None:
        return draft_methods.prompt_lookup(options.prompt_lookup)
    return None
