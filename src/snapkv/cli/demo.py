"""`snapkv demo`: a real document, asked from the compressed and the full cache, then once more."""

import gzip
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.text import Text

from snapkv.app.settings import GenerationSettings
from snapkv.cli import panels
from snapkv.cli.options import ModelOptions, with_options
from snapkv.cli.whole_numbers import TokenBudget, WholeNumber
from snapkv.validation import format_bytes

FIRST = (
    "Which RFC requires the FNAME field to be Latin-1?",
    "The FNAME field is required to be Latin-1 by RFC",
)
SECOND = ("Whose minigzip.py is this module based on?", "It is based on Andrew")
"""Questions about the source of Python's own gzip module, and how their answers begin."""

SETTINGS = GenerationSettings(max_new_tokens=8)
WARM_UP_CHARACTERS = 2_000


@dataclass(frozen=True, kw_only=True)
class DemoOptions(ModelOptions):
    """What the demonstration takes."""

    budget: Annotated[
        Any,
        panels.policy(metavar="INTEGER|auto", help="Tokens kept per head and layer"),
        TokenBudget(),
    ] = 512


@with_options(DemoOptions)
def demo(
    characters: Annotated[
        int | None,
        typer.Option(help="How much of the document to read", show_default="all of it"),
        WholeNumber(1),
    ] = None,
    *,
    options: DemoOptions,
) -> None:
    """Ask about the source of Python's gzip module: what a small cache holds, takes and answers.

    The compressed and the full cache answer twice each, in an order that favours neither, behind a
    warm-up. Then the document is read into a library, and a second question answered from there.
    """
    from snapkv.cli.grid import say, show
    from snapkv.cli.loading import load_model
    from snapkv.cli.tables import answers_table
    from snapkv.policies import default_policy

    loaded = load_model(options)
    shown = Demonstration(
        loaded=loaded,
        text=Path(gzip.__file__).read_text(encoding="utf-8")[:characters],
        policy=default_policy(options.budget),
    )
    compressed, full = shown.both()
    show(answers_table([compressed, full], with_text=True))
    say([Text(_totals(compressed, full))])
    for line in shown.again():
        say([Text(line)])


def _totals(compressed: Any, full: Any) -> str:
    times = (f"{answer.total_ms / 1000:.1f} s" for answer in (compressed, full))
    return (
        "in total: {} with the compressed cache, {} with the full one; means of two readings, in "
        "the order compressed, full, full, compressed"
    ).format(*times)


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """What is shown.

    Attributes:
        loaded: the model.
        text: the document.
        policy: what the compressed cache keeps of it.
    """

    loaded: Any
    text: str
    policy: Any

    def both(self) -> tuple[Any, Any]:
        """The first question's answers from the compressed and the full cache."""
        from snapkv.policies import FullCache

        for policy in (self.policy, FullCache()):
            self._answer(self.text[:WARM_UP_CHARACTERS], policy)
        order = (self.policy, FullCache(), FullCache(), self.policy)
        first, second, third, fourth = (self._answer(self.text, policy) for policy in order)
        return _mean(first, fourth), _mean(second, third)

    def _answer(self, text: str, policy: Any) -> Any:
        from snapkv.app.answering import answer
        from snapkv.app.prompts import question_prompt
        from snapkv.cli.progress import reading_progress

        question, start = FIRST
        prompt = question_prompt(self.loaded.tokenizer, text, question, answer_start=start)
        with reading_progress(policy.name, None) as progress:
            return answer(self.loaded, prompt, policy, SETTINGS, **progress)

    def again(self) -> Iterator[str]:
        """Lines on a second question, answered from a library and by reading everything again."""
        from snapkv.app.library_answers import look_up
        from snapkv.cli.progress import reading_progress
        from snapkv.library.library import Library

        question, start = SECOND
        with tempfile.TemporaryDirectory(prefix="snapkv-demo-") as folder:
            library = Library(Path(folder) / "library")
            begin = time.perf_counter()
            with reading_progress("library", None):
                library.add(self.loaded.model, self.loaded.tokenizer, [("gzip.py", self.text)])
            held = sum(record.bytes for record in library.documents)
            yield (
                f"read into a library in {time.perf_counter() - begin:.1f} s, "
                f"{format_bytes(held)} on disk; asked again: {question}"
            )
            found = look_up(self.loaded, library, question, 1, SETTINGS, answer_start=start)
            with reading_progress("library", None):
                ours = found.answer(self.policy)
            with reading_progress("full", None):
                full = found.answer_in_full()
        for answer, way in ((ours, "from the library"), (full, "reading everything again")):
            seconds = answer.total_ms / 1000
            yield f"{seconds:6.1f} s {way}: {' '.join(answer.text.split())}"


def _mean(first: Any, second: Any) -> Any:
    """The first answer, with the mean times of both."""
    return replace(
        first,
        first_token_ms=fmean([first.first_token_ms, second.first_token_ms]),
        token_ms=fmean([first.token_ms or 0.0, second.token_ms or 0.0]),
        total_ms=fmean([first.total_ms, second.total_ms]),
    )
