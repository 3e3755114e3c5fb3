"""`snapkv demo` asks about a real document, with a compressed cache and with the full cache."""

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
from snapkv_app.prompts import Prompt, question_prompt
from snapkv_app.settings import GenerationSettings

EXAMPLES = {"demo": ("snapkv demo", "snapkv demo --budget 256")}

QUESTION = "Which RFC requires the FNAME field to be Latin-1?"
START = "The FNAME field is required to be Latin-1 by RFC"
"""The beginning of the answer to `QUESTION`, which the model continues."""

CHARACTERS = 24_000
"""The number of characters of the source that are read by default, which is nearly all of it."""

SETTINGS = GenerationSettings(max_new_tokens=12, stop_strings=("\n",))
"""How the answer is generated, which is one line."""

NEXT = (
    "ask {} -q 'Whose minigzip.py is this based on?'",
    "chat {}",
    "plan --model llama-3.1-8b --context 120k --gpu-memory 80GB",
)
"""Commands to type next; the document takes the place of the braces."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions(ModelOptions):
    """The options of the command `snapkv demo`, with the same defaults as in `snapkv ask`."""

    budget: Annotated[
        Any,
        panels.policy(
            metavar="INTEGER|auto|12%|64MiB", help="Tokens kept per head and layer, or bytes"
        ),
        TokenBudgetParameter(None),  # checked together with the window
    ] = AUTO

    def __post_init__(self) -> None:
        """Check the options, among them that the budget is larger than the window.

        Raises:
            InvalidArgumentError: the budget is too small, or a parameter of auto is out of range.
        """
        super().__post_init__()
        PolicyOptions(budget=self.budget)


@with_options(DemoOptions)
def demo(
    characters: Annotated[
        int,
        typer.Option(help="Characters of the document to read; the answer is in the first 10,000"),
        WholeNumber(1),
    ] = CHARACTERS,
    *,
    options: DemoOptions,
) -> None:
    """Ask about the source of Python's gzip module, from a compressed and from the full cache.

    The command prints both answers, and the bytes and the time that the compressed cache saves.

    Raises:
        MissingDependencyError: the package of the demo model is not installed.
        SnapKVError: the model cannot be loaded, or an answer cannot be computed.
    """
    if options.model is None:
        demo_file()  # raises, if the demo model is missing, before torch is imported
    announce_model(options.model)
    from snapkv.policies import FullCache, default_policy
    from snapkv.policies.default import method_name
    from snapkv_app.answering import answer
    from snapkv_app.cli.grid import say
    from snapkv_app.cli.loading import load_model, reading_progress, say_if_demo
    from snapkv_app.cli.policy import usual_bits

    loaded, policy = load_model(options), default_policy(options.budget)
    prompt = demo_prompt(loaded.tokenizer, characters)
    tokens = len(prompt.encoded(loaded.tokenizer)[0])
    write(f"{_label('document')}from the source of Python's gzip module, {tokens:,} tokens\n")
    write(f"{_label('question')}{QUESTION}\n")

    def answer_with(label: str, method: Any) -> Any:
        bits, _ = usual_bits(method, loaded.model)
        labels = iter([_label(label)])

        def write_after_label(text: str) -> None:  # the label must not come before the bar is gone
            write(next(labels, "") + text)

        with reading_progress(loaded.model, method_name(method.describe())) as bar:
            on_text = bar.before(write_after_label)
            found = answer(loaded, prompt, method, SETTINGS, quantize=bits, on_text=on_text)
        write("\n")
        return found

    ours, full = answer_with("answer", policy), answer_with("full cache", FullCache())
    write(f"{_describe_savings(ours, full)}\n\nType next:\n")
    typed = sys.argv[0]
    is_on_path = shutil.which("snapkv") or Path(typed).name != "snapkv"
    program = "snapkv" if is_on_path else shlex.quote(typed)
    say(Text(f"  {program} {line.format(shlex.quote(gzip.__file__))}") for line in NEXT)
    say_if_demo(loaded)


def demo_prompt(tokenizer: Any, characters: int = CHARACTERS) -> Prompt:
    """Build the prompt of the demo: the source of Python's gzip module, and a question about it.

    Only the first `characters` characters are read. The answer begins with `START`.
    """
    text = Path(gzip.__file__).read_text(encoding="utf-8")[:characters]
    return question_prompt(tokenizer, text, QUESTION, answer_start=START)


def _label(text: str) -> str:
    return f"{text:<13}"


def _describe_savings(ours: Any, full: Any) -> str:
    """Return a line that compares an answer of the compressed cache with one of the full cache.

    It says how many bytes are saved, how long a token takes if both answers have later tokens, and
    whether both texts are the same. It does not end with a line break.
    """
    held, full_bytes = ours.cache.held_bytes, full.cache.held_bytes
    line = f"Saved: {1 - held / full_bytes:.0%} of the cache, {format_bytes(held)} instead of "
    line += format_bytes(full_bytes)
    if ours.token_ms and full.token_ms:
        line += f"; a token takes {ours.token_ms:.0f} ms instead of {full.token_ms:.0f} ms"
    same = "the same" if ours.text == full.text else "another"
    return f"{line}. The full cache gives {same} answer."
