"""`snapkv ask`: a question about documents."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from snapkv.app import text_files
from snapkv.app.prefills import Exact
from snapkv.app.prompts import Prompt, question_prompt
from snapkv.cli import panels
from snapkv.cli.options import RunOptions, WholeNumber, with_options
from snapkv.cli.panels import Question
from snapkv.errors import InvalidArgumentError
from snapkv.validation import require_share


@dataclass(frozen=True, kw_only=True)
class AskOptions(RunOptions):
    """What `ask` takes."""

    library: Annotated[
        str | None,
        panels.library(metavar="FOLDER", help="Answer from documents that `library add` has read"),
    ] = None
    documents: Annotated[
        int | None,
        panels.library(help="How many of its documents to answer from", show_default="3"),
        WholeNumber(1),
    ] = None
    recompute: Annotated[
        float | None,
        panels.library(
            help="The fraction of their tokens to compute anew: 0 none, 1 all", show_default="0.15"
        ),
    ] = None

    def __post_init__(self) -> None:
        """Refuse what does not go with a library, or needs one."""
        super().__post_init__()
        if self.recompute is not None:
            require_share("recompute", self.recompute, "0.15")
        needs_one = {"documents": self.documents, "recompute": self.recompute}
        alone = {
            "medusa": self.medusa,
            "assistant": self.assistant,
            "prompt_lookup": self.prompt_lookup,
            "self_speculate": self.self_speculate or None,
            "prefill": None if self.reading == Exact() else self.prefill,
            "protect": self.protect,
            "protect_first": self.protect_first or None,
            "protect_system": self.protect_system,
        }
        for name, value in (needs_one if self.library is None else alone).items():
            if value is not None:
                expected = "--library beside it" if self.library is None else "none with --library"
                raise InvalidArgumentError(
                    f"{name}: expected {expected}, got {value}; leave it out"
                )


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
            f"files: expected FILES or --library, got {got}; pass one of the two"
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
