"""`snapkv demo`: a question about a real document, from a compressed and from the full cache."""

import gzip
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from snapkv.validation import AUTO, format_bytes
from snapkv_app.cli import panels
from snapkv_app.cli.amounts import TokenBudgetParameter, WholeNumber
from snapkv_app.cli.announcing import announce_model
from snapkv_app.cli.fields import with_options
from snapkv_app.cli.options import ModelOptions, PolicyOptions
from snapkv_app.cli.standard_output import write
from snapkv_app.packages import demo_file
from snapkv_app.settings import GenerationSettings

EXAMPLES = {"demo": ("snapkv demo", "snapkv demo --budget 256")}

QUESTION = "Which RFC requires the FNAME field to be Latin-1?"
START = "The FNAME field is required to be Latin-1 by RFC"
"""About the source of Python's gzip module, and how the answer begins."""

CHARACTERS = 24_000
"""How much of the source to read by default: nearly all of it."""

NEXT = (
    "ask {} -q 'Whose minigzip.py is this based on?'",
    "chat {}",
    "plan --model llama-3.1-8b --context 120k --gpu-memory 80GB",
)
"""Commands to type next; the braces are the document."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions(ModelOptions):
    """The options of the demo; the defaults are those of `snapkv ask`."""

    budget: Annotated[
        Any,
        panels.policy(
            metavar="INTEGER|auto|12%|64MiB", help="Tokens kept per head and layer, or bytes"
        ),
        TokenBudgetParameter(None),  # checked together with the window
    ] = AUTO

    def __post_init__(self) -> None:
        """Also refuse a budget without room for the window."""
        super().__post_init__()
        PolicyOptions(budget=self.budget)


@with_options(DemoOptions)
def demo(
    characters: Annotated[
        int,
        typer.Option(help="How much of the document to read; the answer is in its first 10,000"),
        WholeNumber(1),
    ] = CHARACTERS,
    *,
    options: DemoOptions,
) -> None:
    """Ask about the source of Python's gzip module, from a compressed and from the full cache.

    It prints both answers, and the bytes and the time that the compressed cache saves.
    """
    if options.model is None:
        demo_file()  # refused before torch is imported
    announce_model(options.model)
    from snapkv.policies import FullCache, default_policy
    from snapkv.policies.default import method_name
    from snapkv_app.answering import answer
    from snapkv_app.cli.grid import say
    from snapkv_app.cli.loading import load_model, reading_progress, say_if_demo
    from snapkv_app.cli.policy import usual_bits
    from snapkv_app.prompts import question_prompt

    loaded, policy = load_model(options), default_policy(options.budget)
    text = Path(gzip.__file__).read_text(encoding="utf-8")[:characters]
    prompt = question_prompt(loaded.tokenizer, text, QUESTION, answer_start=START)
    tokens = len(prompt.encoded(loaded.tokenizer)[0])
    write(f"{_label('document')}from the source of Python's gzip module, {tokens:,} tokens\n")
    write(f"{_label('question')}{QUESTION}\n")

    def answered(label: str, who: Any) -> Any:
        bits, _ = usual_bits(who, loaded.model)
        settings = GenerationSettings(max_new_tokens=12, stop_strings=("\n",))
        labels = iter([_label(label)])

        def labelled(text: str) -> None:  # the label when the answer begins, behind the bar
            write(next(labels, "") + text)

        with reading_progress(loaded.model, method_name(who.describe())) as bar:
            on_text = bar.before(labelled)
            given = answer(loaded, prompt, who, settings, quantize=bits, on_text=on_text)
        write("\n")
        return given

    ours, full = answered("answer", policy), answered("full cache", FullCache())
    write(f"{_saved(ours, full)}\n\nType next:\n")
    typed = sys.argv[0]
    on_path = shutil.which("snapkv") or Path(typed).name != "snapkv"
    program = "snapkv" if on_path else shlex.quote(typed)
    say(Text(f"  {program} {line.format(shlex.quote(gzip.__file__))}") for line in NEXT)
    say_if_demo(loaded)


def _label(text: str) -> str:
    return f"{text:<13}"


def _saved(ours: Any, full: Any) -> str:
    """Say in one line what the compressed cache saves, and whether both answers are the same."""
    held, whole = ours.cache.held_bytes, full.cache.held_bytes
    said = f"Saved: {1 - held / whole:.0%} of the cache, {format_bytes(held)} instead of "
    said += format_bytes(whole)
    if ours.token_ms and full.token_ms:
        said += f"; a token takes {ours.token_ms:.0f} ms instead of {full.token_ms:.0f} ms"
    same = "the same" if ours.text == full.text else "another"
    return f"{said}. The full cache gives {same} answer."
