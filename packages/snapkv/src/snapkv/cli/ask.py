"""`snapkv ask`, a question about documents, and `snapkv generate`, which continues a text."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from snapkv.app import text_files
from snapkv.app.prefills import Exact
from snapkv.app.prompts import (
    Prompt,
    chat_prompt,
    question_prompt,
    require_unicode,
    text_prompt,
)
from snapkv.cli import panels
from snapkv.cli.amounts import WholeNumber
from snapkv.cli.fields import with_options
from snapkv.cli.options import DRAFTS, RunOptions
from snapkv.errors import InvalidArgumentError
from snapkv.validation import require_share

EXAMPLES = {
    "ask": (
        'snapkv ask contract.pdf -q "Who may end it?" --compare',
        'snapkv ask --library snapkv-library -q "Who may end it?"',
    ),
    "generate": ("snapkv generate notes.txt --prompt 'In short:' --budget 512",),
}


@dataclass(frozen=True, kw_only=True)
class AskOptions(RunOptions):
    """What `ask` takes, of files or of a library."""

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
            help="The fraction of their tokens that the second layer computes anew, up to 0.5 a "
            "tenth of it in the last: 0 none, 1 all in all layers",
            show_default="0.2",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Refuse what does not go with a library, or needs one."""
        super().__post_init__()
        if self.recompute is not None:
            require_share("recompute", self.recompute, "0.2")
        given: dict[str, Any]
        if self.library is None:
            expected = "--library beside it"
            given = {"documents": self.documents, "recompute": self.recompute}
        else:
            expected = "none with --library"
            given = {name: getattr(self, name) or None for name in (*DRAFTS, "protect_first")}
            given |= {"protect": self.protect, "protect_system": self.protect_system}
            given["prefill"] = None if self.reading == Exact() else self.prefill
        for name, value in given.items():
            if value is not None:
                raise InvalidArgumentError(
                    f"{name}: expected {expected}, got {value}; leave it out"
                )


@with_options(AskOptions)
def ask(
    context: typer.Context,
    files: panels.SomeDocuments = None,
    *,
    question: panels.Question,
    options: AskOptions,
) -> None:
    """Answer a question about documents, from a cache smaller than they are."""
    panels.require_question(question)
    if bool(files) == (options.library is not None):
        got = "both" if files else "neither"
        raise InvalidArgumentError(
            f"files: expected FILES or --library, got {got}; pass one of the two, for instance "
            f"{EXAMPLES['ask'][0]}"
        )
    if not files:
        from snapkv.cli.session import answer_from_library  # imports torch

        answer_from_library(options, question, context.obj)
        return
    read, policy, request = _begun(files, options)

    def prompt(tokenizer: Any) -> Prompt:
        made = question_prompt(tokenizer, read, question, answer_start=options.answer_start)
        return made.hiding(question) if policy.reads_context else made

    from snapkv.cli.session import answer_and_show

    request["question"] = question
    answer_and_show(options, policy, prompt, request, context.obj, system=None)


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

    def made(tokenizer: Any) -> Prompt:
        text = "\n\n".join(filter(None, [read, prompt]))
        make = chat_prompt if chat else text_prompt
        return make(tokenizer, text, answer_start=options.answer_start)

    from snapkv.cli.session import answer_and_show

    request["prompt"] = prompt
    answer_and_show(options, policy, made, request, context.obj, system=False)


def _begun(files: list[str], options: RunOptions) -> tuple[str, Any, dict[str, Any]]:
    """The text of the files, the policy, and what the JSON object says of them."""
    options.settings()
    read, warnings = text_files.read_noting(files) if files else ([], [])

    from snapkv.cli.policy import build_policy  # imports torch; what is wrong above is said before

    documents = [document.name for document in read]
    request: dict[str, Any] = {"documents": documents, "warnings": warnings}
    return text_files.join(read), build_policy(options), request
