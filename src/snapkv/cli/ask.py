"""`snapkv ask`: a question about documents."""

from typing import Annotated

import typer

from snapkv.app import text_files
from snapkv.cli.options import RunOptions, with_options
from snapkv.errors import InvalidArgumentError


@with_options(RunOptions)
def ask(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...", help="Text, source code, HTML, PDF, a folder, or - for stdin"
        ),
    ],
    question: Annotated[str, typer.Option("--question", "-q", help="What to answer")],
    options: RunOptions,
) -> None:
    """Answer a question about documents, from a cache smaller than they are."""
    if not question.strip():
        raise InvalidArgumentError("question: expected a question, got an empty text; ask one")
    settings = options.settings()
    read, warnings = text_files.read_noting(files)

    from snapkv.cli.policy import build_policy  # imports torch; what is wrong above is said before

    policy = build_policy(options)

    from snapkv.app.prompts import question_prompt
    from snapkv.cli.session import Session  # imports transformers

    session = Session(options, settings, policy)
    prompt = question_prompt(
        session.tokenizer, text_files.join(read), question, answer_start=options.answer_start
    )
    session.run(
        prompt.hiding(question) if session.reads_twice else prompt,
        request={
            "documents": [document.name for document in read],
            "warnings": warnings,
            "question": question,
        },
    )
