"""`snapkv ask`: a question about documents."""

from typing import Any

import typer

from snapkv.app import text_files
from snapkv.app.prompts import Prompt, question_prompt
from snapkv.cli import panels
from snapkv.cli.ask_options import AskOptions
from snapkv.cli.examples import EXAMPLES
from snapkv.cli.options import with_options
from snapkv.cli.panels import Question
from snapkv.errors import InvalidArgumentError


@with_options(AskOptions)
def ask(
    context: typer.Context,
    files: panels.SomeDocuments = None,
    *,
    question: Question,
    options: AskOptions,
) -> None:
    """Answer a question about documents, from a cache smaller than they are."""
    if not question.strip():
        raise InvalidArgumentError("question: expected a question, got an empty text; ask one")
    if bool(files) == (options.library is not None):
        got = "both" if files else "neither"
        raise InvalidArgumentError(
            f"files: expected FILES or --library, got {got}; pass one of the two, for instance "
            f"{EXAMPLES['ask'][0]}"
        )
    if files:
        _ask_files(context, files, question, options)
    else:
        _ask_library(context, question, options)


def _ask_files(
    context: typer.Context, files: list[str], question: str, options: AskOptions
) -> None:
    settings = options.settings()
    read, warnings = text_files.read_noting(files)

    from snapkv.cli.policy import build_policy  # imports torch; what is wrong above is said before

    policy = build_policy(options)

    from snapkv.cli.protection import protection_of
    from snapkv.cli.session import answer_and_show  # imports transformers

    def prompt(tokenizer: Any) -> Prompt:
        made = question_prompt(
            tokenizer, text_files.join(read), question, answer_start=options.answer_start
        )
        return made.hiding(question) if policy.reads_twice else made

    documents = [document.name for document in read]
    request = {"documents": documents, "warnings": warnings, "question": question}
    protection = protection_of(options, system=None)
    answer_and_show(options, settings, policy, prompt, request, context.obj, protection=protection)


def _ask_library(context: typer.Context, question: str, options: AskOptions) -> None:
    from snapkv.cli.library_session import answer_from_library  # imports torch

    answer_from_library(options, question, context.obj)
