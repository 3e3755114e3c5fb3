"""What `ask` and `generate` do once their prompt is known: load, answer, show."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import transformers
from rich.console import Console

from snapkv import __version__
from snapkv.app.answering import Answer, answer
from snapkv.app.draft_methods import DraftMethod
from snapkv.app.prompts import Prompt
from snapkv.app.settings import GenerationSettings
from snapkv.cli.drafts import draft_method, require_drafts_that_fit
from snapkv.cli.grid import show
from snapkv.cli.loading import load_model
from snapkv.cli.options import RunOptions
from snapkv.cli.progress import ReadingProgress
from snapkv.cli.tables import answers_table
from snapkv.policies import FullCache, Policy


class Session:
    """A loaded model and what to do with it.

    Standard output carries the answer, the comparison or one JSON object; progress, and the table
    below an answer, go to standard error.

    Raises:
        SnapKVError: the options name no model that works, or drafts that do not fit the policy.
    """

    def __init__(self, options: RunOptions, settings: GenerationSettings, policy: Policy) -> None:
        self._options = options
        self._settings = settings
        self._policy = policy
        require_drafts_that_fit(options, self._policy)
        self._errors = Console(stderr=True)
        self._loaded = load_model(options, self._errors)
        self._drafts = draft_method(options, self._loaded, self._errors)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._loaded.tokenizer

    @property
    def reads_twice(self) -> bool:
        """Whether the method reads the documents twice, and chooses before the question."""
        return self._policy.reads_twice

    def run(self, prompt: Prompt, *, request: dict[str, Any]) -> None:
        """Answer once or, to compare, twice; then show what was asked for.

        Args:
            prompt: what the model continues.
            request: what the JSON object says about where the prompt came from.
        """
        if self._options.compare:
            self._warm_up()
            drafted = self._answer(prompt, self._policy, self._drafts)
            answers = [drafted, self._answer(prompt, FullCache())]
        elif self._options.json:
            answers = [self._answer(prompt, self._policy, self._drafts)]
        else:
            answers = [self._answer(prompt, self._policy, self._drafts, on_text=write)]
            write("\n")
        self._show(answers, request)

    def _answer(
        self,
        prompt: Prompt,
        policy: Policy,
        drafts: DraftMethod | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Answer:
        with ReadingProgress(self._errors, policy.name) as progress:
            return answer(
                self._loaded,
                prompt,
                policy,
                self._settings,
                drafts=drafts,
                on_text=progress.ending_with(on_text),
                on_layer=progress.advance,
            )

    def _warm_up(self) -> None:
        """Touch the weights once, or the first of two runs would pay for reading them."""
        with torch.inference_mode():
            self._loaded.model(
                torch.zeros(1, 1, dtype=torch.int64, device=self._loaded.model.device)
            )

    def _show(self, answers: list[Answer], request: dict[str, Any]) -> None:
        if self._options.json:
            write_json(self._record(answers, request))
        elif self._options.compare:
            show(answers_table(answers, with_text=True))
        else:
            self._errors.print(answers_table(answers, with_text=False))

    def _record(self, answers: list[Answer], request: dict[str, Any]) -> dict[str, Any]:
        """The JSON object: what was asked, of which model, and a run per cache."""
        return {
            "snapkv": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "model": self._loaded.description(),
            **request,
            "settings": asdict(self._settings),
            "runs": [asdict(run) for run in answers],
        }


def write(text: str) -> None:
    """Write to standard output; what its encoding cannot express is escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def write_json(record: dict[str, Any], *, indent: int | None = 2) -> None:
    """Write one JSON object to standard output."""
    write(json.dumps(record, indent=indent) + "\n")
