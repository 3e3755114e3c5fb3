"""`snapkv inspect`: a page that shows what was kept of a document, and why."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from snapkv.app import text_files
from snapkv.app.prompts import question_prompt
from snapkv.cache.saving.writing import replace_file
from snapkv.cli import panels
from snapkv.cli.options import MethodOptions, with_options
from snapkv.cli.outputs import Output, WritingOptions
from snapkv.cli.standard_output import write
from snapkv.cli.whole_numbers import WholeNumber
from snapkv.errors import InvalidArgumentError, OutputError


@dataclass(frozen=True, kw_only=True)
class InspectOptions(MethodOptions, WritingOptions):
    """Everything but the documents and the question."""

    beside: Annotated[
        list[str] | None,
        panels.policy(
            help="Another method on the same page, with parameters: streaming-llm, "
            "snapkv:kernel_size=1; again for more"
        ),
    ] = None
    checks: Annotated[
        int,
        panels.answer(help="Parts of the prompt to hide from the answer, one by one; 0 for none"),
        WholeNumber(0),
    ] = 64
    output: Annotated[str, panels.output("--output", "-o", help="The page to write"), Output()] = (
        "inspection.html"
    )


@with_options(InspectOptions)
def inspect(files: panels.Documents, question: panels.Question, options: InspectOptions) -> None:
    """Show on one page which tokens of documents were kept for a question, and why."""
    if not question.strip():
        raise InvalidArgumentError("question: expected a question, got an empty text; ask one")
    settings = options.settings()
    read, warnings = text_files.read_noting(files)

    from snapkv.cli.policy import build_policy  # imports torch; what is wrong above is said before

    policy = build_policy(options)

    from snapkv.cli.loading import load_model
    from snapkv.cli.progress import answers_progress
    from snapkv.cli.session import versions
    from snapkv.cli.sweep import methods
    from snapkv.lab.inspect import as_page, inspect_prompt

    beside = methods([], options.beside or [], [getattr(policy, "budget", None) or 1024])
    policies = [(policy.name, policy), *[(method.label, method.policy) for method in beside]]
    loaded = load_model(options)
    prompt = question_prompt(
        loaded.tokenizer, text_files.join(read), question, answer_start=options.answer_start
    )
    with answers_progress("inspecting") as advance:
        found = inspect_prompt(
            loaded, prompt, policies, settings, checks=options.checks, on_step=advance
        )
    request = {
        "documents": [document.name for document in read],
        "warnings": warnings or None,
        "question": question,
        "model": loaded.description(),
        "settings": asdict(settings),
        "checks": options.checks,
        **versions(),
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
