"""`snapkv ask` answers a question about documents, and `snapkv generate` continues a text."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from snapkv.errors import wrong
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
"""The number of documents of a library that are read to answer, by default."""


@with_options(AskOptions)
def ask(
    context: typer.Context,
    files: panels.SomeDocuments = None,
    *,
    question: panels.Question,
    options: AskOptions,
) -> None:
    """Answer a question about documents, from a cache smaller than they are.

    Raises:
        InvalidArgumentError: the question is empty, files are passed together with a library or
            neither of them is, or an option is impossible.
        DocumentError: a file cannot be read, or no document of the library matches the question.
        LibraryError: there is no library, or a file has changed since it was read.
        SnapKVError: the model cannot be loaded, or the answer cannot be computed.
        Exit: the first tokens differ, with ``--check``; the exit status is 3.
    """
    require_question(question)
    if bool(files) == (options.library is not None):
        problem = f"expected either files or --library, but got {'both' if files else 'neither'}"
        raise wrong("files", problem, f"For example, run {EXAMPLES['ask'][0]}")
    if not files:
        _ask_library(options, question, context.obj)
        return
    policy, fields = _read_files(files, options, context.obj)

    from snapkv_app.cli.session import show_answers
    from snapkv_app.cli.sources import FilesSource, open_prompt

    show_answers(open_prompt(FilesSource, options, policy, question=question, **fields))


def _ask_library(options: AskOptions, question: str, typed: Sequence[str]) -> None:
    """Search the library and check the documents that are found; then load the model and answer.

    The answer is printed.

    Raises:
        InvalidArgumentError: an option is impossible.
        DocumentError: no document of the library matches the question.
        LibraryError: there is no library, or a file has changed since it was read.
        SnapKVError: the model cannot be loaded, or the answer cannot be computed.
        Exit: the first tokens differ, with ``--check``; the exit status is 3.
    """
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
        typer.Argument(
            metavar="FILE", help="Files, folders or - for stdin, whose text comes before the prompt"
        ),
    ] = None,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="The text at the end, which is continued")
    ] = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the text as a message, with the chat template")
    ] = False,
    *,
    options: RunOptions,
) -> None:
    """Continue a text, from a cache smaller than it is.

    Raises:
        InvalidArgumentError: neither files nor a prompt are passed, or an option is impossible.
        DocumentError: a file cannot be read.
        SnapKVError: the model cannot be loaded, or the answer cannot be computed.
        Exit: the first tokens differ, with ``--check``; the exit status is 3.
    """
    if not (files or prompt):
        problem = "expected --prompt or a file, but got neither"
        raise wrong("prompt", problem, f"For example, run {EXAMPLES['generate'][0]}")
    require_unicode("prompt", prompt)
    policy, fields = _read_files(files or [], options, context.obj)

    from snapkv_app.cli.session import show_answers
    from snapkv_app.cli.sources import TextSource, open_prompt

    show_answers(open_prompt(TextSource, options, policy, text=prompt, is_chat=chat, **fields))


def _read_files(
    files: list[str], options: RunOptions, typed: Sequence[str]
) -> tuple[Any, dict[str, Any]]:
    """Check the options, read the files, and build the policy.

    Notices about files go to standard error.

    Args:
        files: the files, folders or "-"; may be empty.
        options: the options of the command.
        typed: the command line, as it was typed.

    Returns:
        The policy, and the fields `documents`, `warnings` and `typed` of a source.

    Raises:
        DocumentError: a file cannot be read.
        InvalidArgumentError: an option is impossible, or the policy refuses a parameter.
    """
    options.settings()
    read, warnings = text_files.read_with_notices(files) if files else ([], [])

    announce_model(options.model)
    from snapkv_app.cli.policy import build_policy  # imports torch, after the checks above

    return build_policy(options), {"documents": read, "warnings": warnings, "typed": typed}
