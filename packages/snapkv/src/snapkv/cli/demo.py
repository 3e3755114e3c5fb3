"""`snapkv demo`: a real document, asked from a compressed and a full cache and from a library."""

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
from snapkv.cli.amounts import TokenBudget, WholeNumber
from snapkv.cli.fields import with_options
from snapkv.cli.options import ModelOptions
from snapkv.validation import AUTO, format_bytes

EXAMPLES = {"demo": ("snapkv demo", "snapkv demo --budget 256")}

WARM_UP_CHARACTERS = 2_000


FIRST = "Which RFC requires the FNAME field to be Latin-1?"
FIRST_START = "The FNAME field is required to be Latin-1 by RFC"
SECOND = "Whose minigzip.py is this module based on?"
SECOND_START = "It is based on Andrew"
"""Questions about the source of Python's gzip module, and how their answers begin."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions(ModelOptions):
    """The options of the demo; the defaults are those of `snapkv ask`."""

    budget: Annotated[
        Any,
        panels.policy(
            metavar="INTEGER|auto|12%|64MiB", help="Tokens kept per head and layer, or bytes"
        ),
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

    After a warm-up, the compressed and the full cache answer. Then the document is read into a
    library, and a second question is answered from the library and by reading everything again.
    """
    from snapkv.cli.grid import say
    from snapkv.cli.loading import load_model
    from snapkv.policies import default_policy

    loaded, policy = load_model(options), default_policy(options.budget)
    text = Path(gzip.__file__).read_text(encoding="utf-8")[:characters]
    for lines in (_both(loaded, text, policy), _again(loaded, text, policy)):
        for label, line in lines:
            say([Text.assemble((f"{label:<13}", "bold"), line)])


def _both(loaded: Any, text: str, policy: Any) -> Iterator[tuple[str, str]]:
    """The first question, answered from the compressed and from the full cache."""
    from snapkv.app.answering import answer
    from snapkv.app.prompts import question_prompt
    from snapkv.cli.loading import reading_progress
    from snapkv.cli.policy import usual_bits
    from snapkv.policies import FullCache
    from snapkv.policies.default import method_name

    settings = GenerationSettings(max_new_tokens=6)

    def answered(text: str, policy: Any) -> Any:
        prompt = question_prompt(loaded.tokenizer, text, FIRST, answer_start=FIRST_START)
        with reading_progress(method_name(policy.describe())) as progress:
            bits, _ = usual_bits(policy, loaded.model)
            return answer(loaded, prompt, policy, settings, quantize=bits, **progress)

    tokens = len(loaded.tokenizer(text).input_ids)
    yield "document", f"the source of Python's gzip module, {tokens:,} tokens"
    yield "question", FIRST
    for who in (policy, FullCache()):
        answered(text[:WARM_UP_CHARACTERS], who)
    for who in (policy, FullCache()):
        given = answered(text, who)
        held, share = given.cache.held_bytes, given.cache.held_bytes / given.cache.full_bytes
        yield "full cache" if share == 1 else f"{share:.0%} of cache", _on_one_line(given)
        yield (
            "",
            f"{format_bytes(held)} of cache; {given.first_token_ms / 1000:.1f} s to the first "
            f"token, {given.token_ms or 0:.0f} ms for each one after it",
        )


def _again(loaded: Any, text: str, policy: Any) -> Iterator[tuple[str, str]]:
    """A second question, answered from a library and by reading everything again."""
    from snapkv.app.library_answers import search, take
    from snapkv.cli.loading import reading_progress
    from snapkv.library.library import Library

    with tempfile.TemporaryDirectory(prefix="snapkv-demo-") as folder:
        library = Library(Path(folder) / "library")
        begin = time.perf_counter()
        with reading_progress("library"):
            library.add(loaded.model, loaded.tokenizer, [("gzip.py", text)])
        seconds = time.perf_counter() - begin
        held = format_bytes(sum(record.bytes for record in library.documents))
        yield "library", f"the document, read once in {seconds:.1f} s, {held} on disk"
        yield "question", SECOND
        settings = GenerationSettings(max_new_tokens=8)
        hits = search(library, SECOND, 1)
        found = take(loaded, library, SECOND, hits, settings, answer_start=SECOND_START)
        with reading_progress("library"):
            ours = found.answer(policy)
        yield "library", f"{_on_one_line(ours)} ({ours.total_ms / 1000:.1f} s)"
        with reading_progress("full"):
            full = found.answer_in_full()
        seconds = full.total_ms / 1000
        yield "full cache", f"{_on_one_line(full)} ({seconds:.1f} s, all of it read again)"


def _on_one_line(answer: Any) -> str:
    return " ".join(answer.text.split())
