"""`snapkv inspect`: a page that shows what was kept of a document, and why."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from snapkv.app import text_files
from snapkv.cli.options import MethodOptions, with_options
from snapkv.cli.outputs import Output, WritingOptions
from snapkv.errors import InvalidArgumentError, OutputError
from snapkv.validation import require_at_least


@dataclass(frozen=True, kw_only=True)
class InspectOptions(MethodOptions, WritingOptions):
    """Everything but the documents and the question."""

    beside: Annotated[
        list[str] | None,
        typer.Option(
            help="Another method on the same page, with parameters: streaming-llm, "
            "snapkv:kernel_size=1; again for more",
            rich_help_panel="What to keep",
        ),
    ] = None
    checks: Annotated[
        int,
        typer.Option(
            help="Parts of the prompt to hide from the answer, one by one; 0 for none",
            rich_help_panel="Answer",
        ),
    ] = 64
    output: Annotated[
        str,
        typer.Option("--output", "-o", help="The page to write", rich_help_panel="Output"),
        Output(),
    ] = "inspection.html"


@with_options(InspectOptions)
def inspect(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...", help="Text, source code, HTML, PDF, a folder, or - for stdin"
        ),
    ],
    question: Annotated[str, typer.Option("--question", "-q", help="What to answer")],
    options: InspectOptions,
) -> None:
    """Show on one page which tokens of documents were kept for a question, and why."""
    if not question.strip():
        raise InvalidArgumentError("question: expected a question, got an empty text; ask one")
    require_at_least("checks", options.checks, 0)
    settings = options.settings()
    read, warnings = text_files.read_noting(files)

    from snapkv.cli.policy import build_policy  # imports torch; what is wrong above is said before

    policy = build_policy(options)

    import torch
    import transformers
    from rich.console import Console

    from snapkv import __version__
    from snapkv.app.prompts import question_prompt
    from snapkv.cache.saving.writing import replace_file
    from snapkv.cli.loading import load_model
    from snapkv.cli.progress import AnswersProgress
    from snapkv.cli.session import write
    from snapkv.cli.sweep import methods
    from snapkv.lab.inspect import as_page, inspect_prompt

    beside = methods([], options.beside or [], [getattr(policy, "budget", None) or 1024])
    policies = [(policy.name, policy), *[(method.label, method.policy) for method in beside]]
    console = Console(stderr=True)
    loaded = load_model(options, console)
    prompt = question_prompt(
        loaded.tokenizer, text_files.join(read), question, answer_start=options.answer_start
    )
    with AnswersProgress(console, "inspecting") as progress:
        found = inspect_prompt(
            loaded, prompt, policies, settings, checks=options.checks, on_step=progress.advance
        )
    request = {
        "documents": [document.name for document in read],
        "warnings": warnings or None,
        "question": question,
        "model": loaded.description(),
        "settings": asdict(settings),
        "checks": options.checks,
        "snapkv": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    page, target = as_page(found, request), Path(options.output)
    try:
        replace_file(target, page)
    except OutputError:  # the answers took minutes, and are not lost with their page
        write(f"full cache: {found.full.text.strip()}\n")
        for method in found.methods:
            write(f"{method.label}: {method.answer.text.strip()}\n")
        raise
    typer.echo(f"{target}: {len(page.encode()):,} bytes, open it in a browser")
