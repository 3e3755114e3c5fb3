"""What `ask` and `generate` do once it is known what to read: load, answer, show."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import transformers
import typer
from rich.console import Console

from snapkv import __version__
from snapkv.app.answering import Answer, TextSink, answer
from snapkv.app.draft_methods import DraftMethod
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
from snapkv.cli.standard_output import write, write_json
from snapkv.cli.tables import answers_table
from snapkv.policies import FullCache, Policy


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

    def answered(
        policy: Policy,
        drafts: DraftMethod | None,
        on_text: TextSink | None = None,
        settings: GenerationSettings = settings,
    ) -> Answer:
        with reading_progress(policy.name, on_text) as progress:
            return answer(
                loaded, prompt, policy, settings, drafts=drafts, protection=protection, **progress
            )

    def full_start(tokens: int) -> Answer:
        return answered(FullCache(), None, settings=replace(settings, max_new_tokens=tokens))

    if options.compare:
        _warm_up(loaded.model)
        answers = [answered(policy, drafts), answered(FullCache(), None)]
    else:
        answers = [answered(policy, drafts, None if options.json else write)]
    if not options.json:
        _show(answers)
    tried = functools.partial(
        first_that_keeps, loaded, prompt, settings, protect=answers[0].protected
    )
    notes = notes_on(answers, options, typed, tried=tried, full_start=full_start)
    if options.json:
        made = {"settings": asdict(settings), "runs": [asdict(run) for run in answers]}
        told = {note.key: note.record() for note in notes}
        write_json(versions() | {"model": loaded.description()} | request | made | told)
    else:
        say([line for note in notes for line in note.lines()], to_errors=not options.compare)
    if status := max(note.status for note in notes):
        raise typer.Exit(status)


def _show(answers: Sequence[Answer]) -> None:
    """Two answers side by side on standard output, or below one that is there what it took."""
    if len(answers) > 1:
        show(answers_table(answers, with_text=True))
    else:
        write("\n")
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
