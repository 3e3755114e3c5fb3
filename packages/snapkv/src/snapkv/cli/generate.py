"""`snapkv generate`: continue a text."""

from typing import Annotated, Any

import typer

from snapkv.app import text_files
from snapkv.app.prompts import Prompt, chat_prompt, text_prompt
from snapkv.cli.examples import EXAMPLES
from snapkv.cli.options import RunOptions, with_options
from snapkv.errors import InvalidArgumentError


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
    settings = options.settings()
    read, warnings = text_files.read_noting(files) if files else ([], [])

    from snapkv.cli.policy import build_policy  # imports torch; what is wrong above is said before

    policy = build_policy(options)

    from snapkv.cli.protection import protection_of
    from snapkv.cli.session import answer_and_show  # imports transformers

    def made(tokenizer: Any) -> Prompt:
        text = "\n\n".join(filter(None, [text_files.join(read), prompt]))
        make = chat_prompt if chat else text_prompt
        return make(tokenizer, text, answer_start=options.answer_start)

    documents = [document.name for document in read]
    request = {"documents": documents, "warnings": warnings, "prompt": prompt}
    protection = protection_of(options, system=False)
    answer_and_show(options, settings, policy, made, request, context.obj, protection=protection)
