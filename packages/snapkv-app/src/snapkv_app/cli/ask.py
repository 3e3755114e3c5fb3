"""`snapkv ask`, a question about documents, and `snapkv generate`, which continues a text."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from snapkv.errors import InvalidArgumentError
from snapkv_app import text_files
from snapkv_app.cli import panels
from snapkv_app.cli.announcing import announce, announce_model
from snapkv_app.cli.fields import with_options
from snapkv_app.cli.options import AskOptions, RunOptions
from snapkv_app.library.library import Library
from snapkv_app.library_files import changed_sources, search
from snapkv_app.prompts import require_question, require_unicode

EXAMPLES = {
    "ask": (
        'snapkv ask contract.pdf -q "Who may end it?" --compare',
        'snapkv ask --library snapkv-library -q "Who may end it?"',
    ),
    "generate": ("snapkv generate notes.txt --prompt 'In short:' --budget 512",),
}

_DOCUMENTS = 3
"""How many documents of a library an answer is from by default."""


@with_options(AskOptions)
def ask(
    context: typer.Context,
    files: panels.SomeDocuments = None,
    *,
    question: panels.Question,
    options: AskOptions,
) -> None:
    """Answer a question about documents, from a cache smaller than they are."""
    require_question(question)
    if bool(files) == (options.library is not None):
        got = "both" if files else "neither"
        raise InvalidArgumentError(
            f"files: expected FILES or --library, got {got}; pass one of the two, for instance "
            f"{EXAMPLES['ask'][0]}"
        )
    if not files:
        _ask_library(options, question, context.obj)
        return
    policy, found = _begun(files, options, context.obj)

    from snapkv_app.cli.session import show_answers
    from snapkv_app.cli.sources import FilesSource, open_prompt

    show_answers(open_prompt(FilesSource, options, policy, question=question, **found))


def _ask_library(options: AskOptions, question: str, typed: Sequence[str]) -> None:
    """Find documents in the library and check them, then load the model and answer."""
    options.settings()
    warnings = list[str]()
    library = Library(str(options.library), on_notice=warnings.append)
    library.required()
    announce(f"opening {options.library}")
    hits, search_ms = search(library, question, options.documents or _DOCUMENTS)
    warnings += changed_sources(library, hits, is_allowed=options.allow_changed)

    from snapkv_app.cli.session import show_answers
    from snapkv_app.cli.sources import open_library  # imports torch, after the checks above

    found = {"search_ms": search_ms, "typed": typed}
    show_answers(open_library(options, library, question, hits, warnings, **found))


@with_options(RunOptions)
def generate(
    context: typer.Context,
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="Files, folders or -, before the prompt"),
    ] = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text at the end")] = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="Send it as a message, through the chat template")
    ] = False,
    *,
    options: RunOptions,
) -> None:
    """Continue a text, from a cache smaller than it is."""
    if not (files or prompt):
        raise InvalidArgumentError(
            "prompt: expected --prompt or a file, got neither; pass one, for instance "
            f"{EXAMPLES['generate'][0]}"
        )
    require_unicode("prompt", prompt)
    policy, found = _begun(files or [], options, context.obj)

    from snapkv_app.cli.session import show_answers
    from snapkv_app.cli.sources import TextSource, open_prompt

    show_answers(open_prompt(TextSource, options, policy, text=prompt, is_chat=chat, **found))


def _begun(
    files: list[str], options: RunOptions, typed: Sequence[str]
) -> tuple[Any, dict[str, Any]]:
    """Read the files; return the policy, and fields of a source."""
    options.settings()
    read, warnings = text_files.read_noting(files) if files else ([], [])

    announce_model(options.model)
    from snapkv_app.cli.policy import build_policy  # imports torch, after the checks above

    found = {"documents": read, "warnings": warnings, "typed": typed}
    return build_policy(options), found
