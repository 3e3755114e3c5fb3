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
from snapkv_app.library.records import Text
from snapkv_app.library_hits import changed_sources, search
from snapkv_app.prompts import Prompt, chat_prompt, require_question, require_unicode, text_prompt

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
    read, policy, request = _begun(files, options)

    from snapkv_app.cli.from_passages import answer_from_passages

    answer_from_passages(options, policy, read, question, request, context.obj)


def _ask_library(options: AskOptions, question: str, typed: Sequence[str]) -> None:
    """Find documents in the library and check them, then load the model and answer."""
    options.settings()
    warnings = list[str]()
    library = Library(str(options.library), on_notice=warnings.append)
    library.required()
    announce(f"opening {options.library}")
    found = search(library, question, options.documents or _DOCUMENTS)
    warnings += changed_sources(library, found.hits, is_allowed=options.allow_changed)

    from snapkv_app.cli.from_library import (
        answer_from_library,  # imports torch, after the checks above
    )

    answer_from_library(library, found, options, question, typed, warnings)


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
    read, policy, request = _begun(files or [], options)

    def made(loaded: Any) -> Prompt:
        text = "\n\n".join(filter(None, [text_files.join(read), prompt]))
        make = chat_prompt if chat else text_prompt
        return make(loaded.tokenizer, text, answer_start=options.answer_start)

    from snapkv_app.cli.from_files import answer_from_files

    request["prompt"] = prompt
    answer_from_files(options, policy, made, request, context.obj, system=False)


def _begun(files: list[str], options: RunOptions) -> tuple[list[Text], Any, dict[str, Any]]:
    """The files, the policy, and both as parts of the JSON object."""
    options.settings()
    read, warnings = text_files.read_noting(files) if files else ([], [])

    announce_model(options.model)
    from snapkv_app.cli.policy import build_policy  # imports torch, after the checks above

    documents = [document.name for document in read]
    request: dict[str, Any] = {"documents": documents, "warnings": warnings}
    return read, build_policy(options), request
