"""`snapkv demo`: a real document, asked from the compressed and the full cache, then once more."""

import gzip
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from snapkv.app.settings import GenerationSettings
from snapkv.cli import panels
from snapkv.cli.options import ModelOptions, with_options
from snapkv.cli.whole_numbers import TokenBudget, WholeNumber
from snapkv.validation import AUTO, format_bytes

WARM_UP_CHARACTERS = 2_000


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question, how its answer begins, and how many tokens complete it."""

    text: str
    start: str
    tokens: int

    @property
    def settings(self) -> GenerationSettings:
        """How to generate the answer."""
        return GenerationSettings(max_new_tokens=self.tokens)


FIRST = Question(
    text="Which RFC requires the FNAME field to be Latin-1?",
    start="The FNAME field is required to be Latin-1 by RFC",
    tokens=6,
)
SECOND = Question(
    text="Whose minigzip.py is this module based on?", start="It is based on Andrew", tokens=8
)
"""Both are about the source of Python's own gzip module."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions(ModelOptions):
    """What the demonstration takes; without options it keeps what `snapkv ask` keeps."""

    budget: Annotated[
        Any,
        panels.policy(metavar="INTEGER|auto", help="Tokens kept per head and layer"),
        TokenBudget(),
    ] = AUTO


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

    The compressed cache answers, and the full one, behind a warm-up of both. Then the document is
    read into a library, and a second question is answered from there, and by reading all again.
    """
    from snapkv.cli.grid import say
    from snapkv.cli.loading import load_model
    from snapkv.policies import default_policy
    from snapkv.word_index import require_word_index

    require_word_index()
    loaded = load_model(options)
    shown = Demonstration(
        loaded=loaded,
        text=Path(gzip.__file__).read_text(encoding="utf-8")[:characters],
        policy=default_policy(options.budget),
    )
    for label, text in shown.lines():
        say([Text.assemble((f"{label:<13}", "bold"), text)])


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

    def lines(self) -> Iterator[tuple[str, str]]:
        """Ten lines, each with a label, as soon as what they say is known."""
        yield from self._both()
        yield from self._again()

    def _both(self) -> Iterator[tuple[str, str]]:
        """The first question, answered from the compressed and from the full cache."""
        from snapkv.policies import FullCache

        tokens = len(self.loaded.tokenizer(self.text).input_ids)
        yield "document", f"the source of Python's gzip module, {tokens:,} tokens"
        yield "question", FIRST.text
        for policy in (self.policy, FullCache()):
            self._answer(self.text[:WARM_UP_CHARACTERS], policy)
        for policy in (self.policy, FullCache()):
            answer = self._answer(self.text, policy)
            held, share = answer.cache.held_bytes, answer.cache.held_bytes / answer.cache.full_bytes
            yield "full cache" if share == 1 else f"{share:.0%} of cache", _on_one_line(answer)
            yield (
                "",
                f"{format_bytes(held)} of cache; {answer.first_token_ms / 1000:.1f} s to the first "
                f"token, {answer.token_ms or 0:.0f} ms for each one after it",
            )

    def _answer(self, text: str, policy: Any) -> Any:
        from snapkv.app.answering import answer
        from snapkv.app.prompts import question_prompt
        from snapkv.cli.progress import reading_progress

        tokenizer = self.loaded.tokenizer
        prompt = question_prompt(tokenizer, text, FIRST.text, answer_start=FIRST.start)
        with reading_progress(policy, None) as progress:
            return answer(self.loaded, prompt, policy, FIRST.settings, **progress)

    def _again(self) -> Iterator[tuple[str, str]]:
        """A second question, answered from a library and by reading everything again."""
        from snapkv.app.library_answers import look_up
        from snapkv.cli.progress import reading_progress
        from snapkv.library.library import Library

        with tempfile.TemporaryDirectory(prefix="snapkv-demo-") as folder:
            library = Library(Path(folder) / "library")
            begin = time.perf_counter()
            with reading_progress("library", None):
                library.add(self.loaded.model, self.loaded.tokenizer, [("gzip.py", self.text)])
            seconds = time.perf_counter() - begin
            held = format_bytes(sum(record.bytes for record in library.documents))
            yield "library", f"the document, read once in {seconds:.1f} s, {held} on disk"
            yield "question", SECOND.text
            found = look_up(
                self.loaded, library, SECOND.text, 1, SECOND.settings, answer_start=SECOND.start
            )
            with reading_progress("library", None):
                ours = found.answer(self.policy)
            yield "library", f"{_on_one_line(ours)} ({ours.total_ms / 1000:.1f} s)"
            with reading_progress("full", None):
                full = found.answer_in_full()
            seconds = full.total_ms / 1000
            yield "full cache", f"{_on_one_line(full)} ({seconds:.1f} s, all of it read again)"


def _on_one_line(answer: Any) -> str:
    return " ".join(answer.text.split())
