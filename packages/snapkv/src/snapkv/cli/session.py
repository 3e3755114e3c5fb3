"""What `ask` and `generate` do once it is known what to read: load, answer, show."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
import transformers
import typer
from rich.console import Console
from rich.text import Text

from snapkv import __version__
from snapkv.app.answering import Answer, TextSink, answer
from snapkv.app.draft_methods import DraftMethod
from snapkv.app.models import LoadedModel
from snapkv.app.prefills import Exact, Prefill
from snapkv.app.prompts import Prompt
from snapkv.app.protection import Protection
from snapkv.app.remedies import first_that_keeps
from snapkv.app.settings import GenerationSettings
from snapkv.cli.drafts import draft_method, require_drafts_that_fit
from snapkv.cli.grid import say, show
from snapkv.cli.loading import load_model
from snapkv.cli.notes import notes_on
from snapkv.cli.options import RunOptions
from snapkv.cli.progress import reading_progress
from snapkv.cli.remedies import Try
from snapkv.cli.standard_output import write, write_json
from snapkv.cli.tables import answers_table
from snapkv.policies import FullCache, Policy
from snapkv.policies.default import method_name


def answer_and_show(
    options: RunOptions,
    settings: GenerationSettings,
    policy: Policy,
    make_prompt: Callable[[Any], Prompt],
    request: dict[str, Any],
    typed: Sequence[str],
    *,
    protection: Protection,
) -> None:
    """Load the model, answer once or, to compare, twice; then show what was asked for.

    Standard output carries the answer, the comparison or one JSON object; progress, and what stands
    below an answer, go to standard error.

    Args:
        options: what to load, how to draft and what to show.
        settings: how to generate.
        policy: the method.
        make_prompt: what the model continues, with its tokenizer.
        request: what the JSON object says about where the prompt came from.
        typed: the command line, for the one to type next.
        protection: what of the prompt must stay.

    Raises:
        SnapKVError: the options name no model that works, or drafts that do not fit the policy.
        typer.Exit: a check found that the answer is not the full cache's.
    """
    require_drafts_that_fit(options, policy)
    loaded = load_model(options)
    drafts = draft_method(options, loaded)
    prompt = make_prompt(loaded.tokenizer)

    asked = _AskedPrompt(loaded, prompt, settings, protection, options.reading)
    show_answers(asked, options, policy, drafts, request, typed)


class Asked(Protocol):
    """What was asked, of whichever method answers."""

    @property
    def loaded(self) -> LoadedModel:
        """The model that answers."""

    @property
    def settings(self) -> GenerationSettings:
        """How to generate."""

    def answered(
        self, policy: Policy, drafts: DraftMethod | None, on_text: TextSink | None = None
    ) -> Answer:
        """The answer of a method, with its progress shown."""

    def full(self, tokens: int | None = None) -> Answer:
        """The full cache's answer, or the first so many tokens of it."""

    def trying(self, answer: Answer) -> Try:
        """What tries policies on the prompt, where an answer differs from the full cache's."""


def show_answers(
    asked: Asked,
    options: RunOptions,
    policy: Policy,
    drafts: DraftMethod | None,
    request: dict[str, Any],
    typed: Sequence[str],
    *,
    sources: Callable[[], Sequence[Text]] = tuple,
) -> None:
    """Answer once or, to compare, twice; then show what was asked for.

    Args:
        asked: the question, and the model.
        options: what to show.
        policy: the method.
        drafts: where drafts come from; None for none.
        request: what the JSON object says about where the prompt came from.
        typed: the command line, for the one to type next.
        sources: gives lines between an answer and what it took, once there is an answer.

    Raises:
        typer.Exit: a check found that the answer is not the full cache's.
    """
    if options.compare:
        _warm_up(asked.loaded.model)
        answers = [asked.answered(policy, drafts), asked.full()]
    else:
        answers = [asked.answered(policy, drafts, None if options.json else write)]
    if not options.json:
        _show(answers, sources())
    tried = asked.trying(answers[0])
    notes = notes_on(answers, options, typed, tried=tried, full_start=asked.full)
    if options.json:
        about = {"model": asked.loaded.description(), **request}
        about["settings"] = asdict(asked.settings)
        runs = [answer_record(each, with_layers=options.verbose) for each in answers]
        told = {note.key: note.record() for note in notes}
        write_json({"answer": runs[0]["text"]} | about | {"runs": runs} | told | versions())
    else:
        say([line for note in notes for line in note.lines()], to_errors=not options.compare)
    if status := max(note.status for note in notes):
        raise typer.Exit(status)


@dataclass(frozen=True)
class _AskedPrompt:
    """A prompt that every method reads."""

    loaded: LoadedModel
    prompt: Prompt
    settings: GenerationSettings
    protection: Protection
    prefill: Prefill

    def answered(
        self, policy: Policy, drafts: DraftMethod | None, on_text: TextSink | None = None
    ) -> Answer:
        """The answer of a method, with its progress shown."""
        with reading_progress(policy, on_text) as progress:
            return answer(
                self.loaded,
                self.prompt,
                policy,
                self.settings,
                drafts=drafts,
                protection=self.protection,
                prefill=self.prefill,
                **progress,
            )

    def full(self, tokens: int | None = None) -> Answer:
        limit = self.settings.max_new_tokens if tokens is None else tokens
        settings = replace(self.settings, max_new_tokens=limit)
        start = replace(self, settings=settings, prefill=Exact())
        return start.answered(FullCache(), None)

    def trying(self, answer: Answer) -> Try:
        asked = self.loaded, self.prompt, self.settings
        return functools.partial(first_that_keeps, *asked, protect=answer.protected)


def answer_record(answer: Answer, *, with_layers: bool) -> dict[str, Any]:
    """An answer ready for JSON; layer by layer is long, so only where that is asked for."""
    record = {"method": method_name(answer.policy), **asdict(answer)}
    if not with_layers:
        record["cache"] = {key: told for key, told in record["cache"].items() if key != "layers"}
    return record


def _show(answers: Sequence[Answer], sources: Sequence[Text]) -> None:
    """Two answers side by side on standard output, or below one that is there what it took."""
    if len(answers) > 1:
        show(answers_table(answers, with_text=True))
        say(sources)
    else:
        write("\n")
        say(sources, to_errors=True)
        Console(stderr=True).print(answers_table(answers, with_text=False))


def _warm_up(model: Any) -> None:
    """Touch the weights once, or the first of two runs would pay for reading them."""
    with torch.inference_mode():
        model(torch.zeros(1, 1, dtype=torch.int64, device=model.device))


def versions() -> dict[str, str]:
    """What computed it, for a record."""
    return {
        "snapkv": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
