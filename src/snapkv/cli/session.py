"""What `ask` and `generate` do once it is known what to read: load, answer, show."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import transformers
from rich.console import Console

from snapkv import __version__
from snapkv.app.answering import Answer, TextSink, answer
from snapkv.app.draft_methods import DraftMethod
from snapkv.app.prompts import Prompt
from snapkv.app.protection import Protection
from snapkv.app.settings import GenerationSettings
from snapkv.cli.drafts import draft_method, require_drafts_that_fit
from snapkv.cli.grid import show
from snapkv.cli.loading import load_model
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
    *,
    protection: Protection,
) -> None:
    """Load the model, answer once or, to compare, twice; then show what was asked for.

    Standard output carries the answer, the comparison or one JSON object; progress, and the table
    below an answer, go to standard error.

    Args:
        options: what to load, how to draft and what to show.
        settings: how to generate.
        policy: the method.
        make_prompt: what the model continues, with its tokenizer.
        request: what the JSON object says about where the prompt came from.
        protection: what of the prompt must stay.

    Raises:
        SnapKVError: the options name no model that works, or drafts that do not fit the policy.
    """
    require_drafts_that_fit(options, policy)
    loaded = load_model(options)
    drafts = draft_method(options, loaded)
    prompt = make_prompt(loaded.tokenizer)

    def answered(
        policy: Policy, drafts: DraftMethod | None, on_text: TextSink | None = None
    ) -> Answer:
        with reading_progress(policy.name, on_text) as progress:
            return answer(
                loaded, prompt, policy, settings, drafts=drafts, protection=protection, **progress
            )

    if options.compare:
        _warm_up(loaded.model)
        answers = [answered(policy, drafts), answered(FullCache(), None)]
    elif options.json:
        answers = [answered(policy, drafts)]
    else:
        answers = [answered(policy, drafts, write)]
        write("\n")
    if options.json:
        made = {"settings": asdict(settings), "runs": [asdict(run) for run in answers]}
        write_json(versions() | {"model": loaded.description()} | request | made)
    elif options.compare:
        show(answers_table(answers, with_text=True))
    else:
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
